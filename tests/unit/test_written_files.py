"""Files that are written for people: whole or not at all, and never in somebody else's place."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dispatcher.batches.storage import Storage
from forebay.results import Saved, errors_path, save, targets, written_whole
from workers.errors import SettingsError


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


def test_standard_output_goes_on_where_it_is(tmp_path) -> None:
    captured = tmp_path / "captured"
    captured.write_bytes(b"what stood there\n")
    code = (
        "from pathlib import Path; from forebay.results import written_whole\n"
        "with written_whole(Path('/dev/stdout')) as sink: sink.write(b'results\\n')\n"
        "print('and more')\n"
    )
    with captured.open("ab") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert captured.read_bytes() == b"what stood there\nresults\nand more\n"


def test_what_cannot_be_written_is_named_as_the_user_named_it(tmp_path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        write(tmp_path / "none" / "out.jsonl")
    assert missing.value.filename == str(tmp_path / "none" / "out.jsonl")


def test_a_failure_that_names_no_file_is_told_of_the_target(tmp_path) -> None:
    with pytest.raises(OSError, match="No space left") as full, written_whole(tmp_path / "out.jsonl"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "out.jsonl"))


def test_a_failure_of_another_file_or_of_none_stays_as_it_is(tmp_path) -> None:
    for other in (FileNotFoundError(errno.ENOENT, "none", "input.jsonl"), OSError("something else")):
        with (
            pytest.raises(OSError, match=r"none|something else") as raised,
            written_whole(tmp_path / "out.jsonl"),
        ):
            raise other
        assert raised.value is other


def test_of_an_earlier_batch_only_files_make_way(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "old.errors.jsonl").write_bytes(b"of another batch")
    nothing = Storage(str(tmp_path / "storage")).files("batch_1")
    for errors in (tmp_path / "pipe", Path("/dev/null"), tmp_path / "old.errors.jsonl"):
        assert save(nothing, final=True, output=tmp_path / "out.jsonl", errors=errors) == Saved(None, None)
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/null").is_char_device()
    assert not (tmp_path / "old.errors.jsonl").exists()


def test_failed_lines_go_beside_the_results_unless_it_is_said(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    assert targets(out, None) == (out, tmp_path / "out.errors.jsonl") == (out, errors_path(out))
    assert targets(Path("/dev/stdout"), out) == (Path("/dev/stdout"), out)


@pytest.mark.parametrize(
    ("output", "errors", "why"),
    [
        ("/dev/stdout", None, "say where failed lines go, with --errors"),
        ("a.jsonl", "a.jsonl", "cannot both go to"),
        ("none/a.jsonl", None, "there is no folder none"),
        (".", "a.jsonl", "is a folder"),
    ],
)
def test_places_that_results_cannot_go_to_are_named(tmp_path, monkeypatch, output, errors, why) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=why):
        targets(Path(output), None if errors is None else Path(errors))


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
