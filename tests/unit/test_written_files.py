"""Files that are written for people: whole or not at all, and never in somebody else's place."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from dispatcher.batches.storage import Storage
from forebay.results import written_whole


@pytest.fixture
def umask():
    """Sets the umask of this process until the test ends."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write(target: Path, data: bytes = b"new") -> None:
    with written_whole(target) as sink:
        sink.write(data)


def test_a_new_file_is_as_the_user_wants_new_files(tmp_path, umask) -> None:
    umask(0o027)
    write(tmp_path / "out.jsonl")
    assert mode(tmp_path / "out.jsonl") == 0o640


def test_a_file_that_is_replaced_keeps_its_permissions_also_while_it_is_written(tmp_path, umask) -> None:
    umask(0o022)
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"old")
    target.chmod(0o600)
    with written_whole(target) as sink:
        sink.write(b"new")
        [temporary] = [path for path in tmp_path.iterdir() if path != target]
        assert mode(temporary) == 0o600
        assert target.read_bytes() == b"old"
    assert (mode(target), target.read_bytes()) == (0o600, b"new")


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), written_whole(target):
        raise RuntimeError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("out.jsonl", b"old")]


def test_a_link_is_replaced_and_what_it_leads_to_left_alone(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    precious.chmod(0o400)
    target = tmp_path / "out.jsonl"
    target.symlink_to(precious)
    write(target)
    assert (precious.read_bytes(), target.read_bytes(), target.is_symlink()) == (b"precious", b"new", False)
    assert mode(target) != 0o400


def test_a_link_planted_under_any_temporary_name_is_not_written_through(tmp_path, monkeypatch) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "foreseen")
    (tmp_path / ".out.jsonl.foreseen.tmp").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write(tmp_path / "out.jsonl")
    assert precious.read_bytes() == b"precious"


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path) -> None:
    target = tmp_path / "pipe"
    os.mkfifo(target)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(target.read_bytes()))
    reader.start()
    write(target, b"through the pipe")
    reader.join()
    assert read == [b"through the pipe"]
    assert target.is_fifo()


def test_a_device_is_written_and_stays_a_device() -> None:
    write(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_standard_output_is_written_in_place_even_when_it_is_a_file(tmp_path) -> None:
    with (tmp_path / "captured").open("wb") as captured:
        link = Path(f"/dev/fd/{captured.fileno()}")
        write(link, b"results")
    assert (tmp_path / "captured").read_bytes() == b"results"


def test_a_very_long_name_has_a_temporary_one_too(tmp_path) -> None:
    target = tmp_path / ("x" * 250)
    write(target)
    assert target.read_bytes() == b"new"


def test_what_a_batch_stores_is_the_user_s_alone_under_any_umask(tmp_path, umask) -> None:
    umask(0)
    files = Storage(str(tmp_path / "storage")).files("batch_1")
    files.write("input.jsonl", b"a prompt")
    with files.writing("parts/0/1-0.jsonl") as sink:
        sink.write(b"an answer")
        found = list((tmp_path / "storage").rglob("*"))
        assert {mode(path) for path in found if path.is_dir()} == {0o700}
        assert {mode(path) for path in found if path.is_file()} == {0o600}
        assert any(path.name.endswith(".tmp") for path in found)
    with files.spool() as spool:
        assert stat.S_IMODE(os.fstat(spool._file.fileno()).st_mode) == 0o600
