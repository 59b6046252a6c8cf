"""A run that nobody looks at: only what a person must know is said."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.batches.record import BatchRecord
from forebay.cli.failures import complain
from forebay.progress import Progress
from workers.fleet import WorkerView


class QuietWatcher:
    """Says nothing but notes."""

    def note(self, text: str) -> None:
        complain(text)

    def started(self, record: BatchRecord, *, resumed: bool) -> None:
        """Nothing to say."""

    def waiting(self, workers: Sequence[WorkerView]) -> None:
        """Nothing to say."""

    def close(self) -> None:
        """Nothing is open."""

    def progress(self, seen: Progress) -> None:
        """Nothing to say."""
