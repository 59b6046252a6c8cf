"""Where a batch's files are kept: whole or absent, private, and never outside their folder."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from dispatcher.batches.backend import translated
from dispatcher.batches.errors import (
    InvalidNameError,
    StorageDeniedError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
    StorageUrlError,
)
from dispatcher.batches.storage import BatchFiles, Storage


@pytest.fixture(params=["disk", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A local folder, and an object store held in memory."""
    if request.param == "disk":
        yield Storage(str(tmp_path / "not" / "made" / "yet"))
        return
    root = f"memory://{tmp_path.name}"
    yield Storage(root)
    memory = fsspec.filesystem("memory")
    if memory.exists(root):
        memory.rm(root, recursive=True)


@pytest.fixture
def files(storage: Storage) -> BatchFiles:
    return storage.files("batch_1")


def everything_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_written_is_read(files: BatchFiles) -> None:
    files.write("parts/0/a-0.jsonl", b"one\n")
    assert files.exists("parts/0/a-0.jsonl")
    assert files.read("parts/0/a-0.jsonl") == b"one\n"
    with files.open("parts/0/a-0.jsonl") as handle:
        assert list(handle) == [b"one\n"]
    [found] = files.walk("parts")
    assert (found.path, found.size) == ("parts/0/a-0.jsonl", 4)
    assert found.modified_s > 1e9


def test_a_file_may_be_replaced_unless_it_is_to_be_new(files: BatchFiles) -> None:
    files.write("x", b"one")
    files.write("x", b"two")
    with pytest.raises(StorageExistsError):
        files.write("x", b"three", replace=False)
    assert files.read("x") == b"two"
    assert [found.path for found in files.walk()] == ["x"]


def test_a_file_appears_when_it_is_whole(files: BatchFiles) -> None:
    with files.writing("x") as sink:
        sink.write(b"one")
        assert not files.exists("x")
        sink.write(b"two")
    assert files.read("x") == b"onetwo"


def test_a_write_that_raises_leaves_neither_half_a_file_nor_harms_the_old_one(
    files: BatchFiles, tmp_path: Path
) -> None:
    def fail(name: str) -> None:
        with files.writing(name) as sink:
            sink.write(b"half")
            raise KeyboardInterrupt

    files.write("old", b"old")
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            fail(name)
    assert files.read("old") == b"old"
    assert not files.exists("new")
    assert all(path.name == "old" for path in everything_in(tmp_path))


def test_pieces_come_in_the_order_asked_and_short_behind_the_end(files: BatchFiles) -> None:
    files.write("x", b"0123456789")
    assert files.read_ranges("x", [(5, 2), (0, 3), (8, 9), (4, 0)]) == [b"56", b"012", b"89", b""]
    assert files.read_ranges("x", []) == []


def test_what_is_missing_is_called_missing(files: BatchFiles) -> None:
    with pytest.raises(StorageMissingError) as raised:
        files.read("x")
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    with pytest.raises(StorageMissingError), files.open("x"):
        pass
    with pytest.raises(StorageMissingError):
        files.read_ranges("x", [(0, 1)])
    assert files.walk("parts") == []
    assert not files.exists("x")
    files.remove("x")


def test_removing_takes_a_file_a_folder_or_all(storage: Storage, files: BatchFiles) -> None:
    for name in ("a", "parts/0/a", "parts/1/a"):
        files.write(name, b"x")
    files.remove("a")
    files.remove("parts/0")
    assert [found.path for found in files.walk()] == ["parts/1/a"]
    files.remove_all()
    assert files.walk() == []
    assert storage.batch_ids() == []


def test_the_batches_with_files_are_listed(storage: Storage) -> None:
    assert storage.batch_ids() == []
    for name in ("b", "a"):
        storage.files(name).write("x", b"")
    assert storage.batch_ids() == ["a", "b"]


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty answer would mean that nothing is durable, and every line would be sent again.
    def denied(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    files = Storage(str(tmp_path)).files("batch_1")
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(StorageDeniedError):
        files.walk("parts")


def test_a_spool_is_gone_when_it_is_closed(files: BatchFiles, tmp_path: Path) -> None:
    with files.spool() as spool:
        spool.write(b"x")
    assert everything_in(tmp_path) == []


HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc",
    ".hidden",
    "a\0",
    "a\n",
    "a b",
    "é",
    "x" * 129,
    "~",
    "%2e%2e",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_id_that_could_leave_its_folder_is_refused(storage: Storage, name: str) -> None:
    with pytest.raises(InvalidNameError):
        storage.files(name)


@pytest.mark.parametrize("name", ["../x", "parts/../../x", "/x", "parts//x", "a\n"])
def test_a_file_name_that_could_leave_its_folder_is_refused(files: BatchFiles, name: str) -> None:
    with pytest.raises(InvalidNameError):
        files.write(name, b"")


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    root = tmp_path / "root"
    Storage(str(root)).files("batch_1").write("parts/0/a", b"")
    modes = {path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")] if path.is_dir()}
    assert modes == {0o700}
    assert {path.stat().st_mode & 0o777 for path in everything_in(root)} == {0o600}


def test_a_file_is_synced_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Storage(str(tmp_path)).files("batch_1")
    files.write("first", b"makes the folder")
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        steps.append("sync of " + ("file" if Path(f"/proc/self/fd/{descriptor}").is_file() else "folder"))
        fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    files.write("x", b"data")
    assert steps == ["sync of file", "rename", "sync of folder"]


def test_a_full_disk_is_named_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Storage(str(tmp_path)).files("batch_1")
    files.write("old", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match="old: No space left on device"):
        files.write("old", b"new")
    assert files.read("old") == b"old"
    assert [path.name for path in everything_in(tmp_path)] == ["old"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, ""), StorageFullError),
        (OSError(errno.EDQUOT, ""), StorageFullError),
        (OSError(errno.EFBIG, ""), StorageFullError),
        (OSError(errno.EACCES, ""), StorageDeniedError),
        (OSError(errno.EPERM, ""), StorageDeniedError),
        (OSError(errno.EROFS, ""), StorageDeniedError),
        (PermissionError("Forbidden"), StorageDeniedError),
        (FileNotFoundError("no such bucket"), StorageMissingError),
        (FileExistsError("there"), StorageExistsError),
        (OSError(errno.EIO, "Input/output error"), StorageError),
        (RuntimeError(), StorageError),
    ],
)
def test_every_foreign_error_becomes_one_of_ours_and_stays_its_cause(
    error: Exception, kind: type[StorageError]
) -> None:
    with pytest.raises(StorageError, match=r"^x: .+") as raised, translated("x"):
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("url", ["nonsense://x", "foo+bar://x"])
def test_a_url_of_no_known_storage_is_refused(url: str) -> None:
    with pytest.raises(StorageUrlError):
        Storage(url)


def test_a_file_url_is_a_local_folder(tmp_path: Path) -> None:
    Storage(f"file://{tmp_path}").files("batch_1").write("x", b"1")
    assert (tmp_path / "batches" / "batch_1" / "x").read_bytes() == b"1"
