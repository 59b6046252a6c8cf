"""What can go wrong on the file side of a batch, as one tree, grouped by what the handler does.

    BatchError
    ├── StorageError              the storage did not do what was asked; the cause is kept
    │   ├── StorageFullError          wait for room, then try again
    │   ├── StorageDeniedError        give up: a person has to grant access
    │   ├── StorageMissingError       give up: the file or the folder is not there
    │   ├── StorageExistsError        give up: an immutable file would have been overwritten
    │   └── StorageUrlError           give up: no storage can be made of this URL
    ├── DamagedFileError          give up: what is stored is not what was written
    │   ├── DamagedPlanError          plan.npy or shards.json
    │   ├── DamagedPartError          a part file; names the file and its line
    │   └── ChangedInputError         input.jsonl no longer holds what was planned
    ├── UnreadableRecordError     leave it to whoever can: a newer version wrote what Redis knows of the batch
    ├── MissingLinesError         run the missing lines, then finalise again
    ├── ShardsLeftError           run these shards, then finalise again
    ├── IllegalMoveError          our bug: a batch's status cannot change so
    └── InvalidNameError          our bug, or an attack: this id may not become a path

A bad line of an input file is no exception: it is a value, see `parse.BadLine`.
"""

from collections.abc import Sequence

from workers.errors import ForebayError


class BatchError(ForebayError):
    """Root of everything this package raises on purpose."""


class StorageError(BatchError):
    """The storage refused or failed, with no reason that we know better."""


class StorageFullError(StorageError):
    """No room, or the quota is used up."""


class StorageDeniedError(StorageError):
    """Not permitted, or mounted read-only."""


class StorageMissingError(StorageError):
    """There is no such file or folder."""


class StorageExistsError(StorageError):
    """A file that is never rewritten exists already."""


class StorageUrlError(StorageError):
    """The URL names no storage that is installed here."""


class DamagedFileError(BatchError):
    """A stored file does not hold what this program wrote."""


class DamagedPlanError(DamagedFileError):
    """The plan cannot be read, or does not fit its list of shards."""


class DamagedPartError(DamagedFileError):
    """A part file holds something that is no result, or the result of no line of this batch."""


class ChangedInputError(DamagedFileError):
    """The stored input was altered after planning."""


class UnreadableRecordError(BatchError):
    """What Redis knows of a batch is not readable here, most likely since a newer version wrote it."""


class MissingLinesError(BatchError):
    """Some accepted lines have no result yet.

    `missing` is how many; `first` are the lowest of their line numbers, at most ten.
    """

    def __init__(self, missing: int, first: tuple[int, ...]) -> None:
        """Name how many lines are missing, and the first of them."""
        listed = ", ".join(map(str, first)) + (", ..." if missing > len(first) else "")
        super().__init__(f"{missing} accepted lines have no result (lines {listed})")
        self.missing = missing
        self.first = first


class ShardsLeftError(BatchError):
    """A batch cannot be finalised yet: these shards, by number, are not done."""

    def __init__(self, shards: Sequence[int]) -> None:
        super().__init__(f"shards {', '.join(map(str, shards))} are not done")
        self.shards = tuple(shards)


class IllegalMoveError(BatchError):
    """A batch may not go from the one status to the other."""


class InvalidNameError(BatchError):
    """A batch id, shard or claim that may not become part of a path."""
