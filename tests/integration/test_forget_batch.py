"""Forgetting a batch: what goes, what stays, and when it is refused."""

from __future__ import annotations

import io
import os

import msgspec
import pytest
from typer.testing import CliRunner

from dispatcher.batches.errors import StorageMissingError
from dispatcher.finaliser import Finaliser
from forebay import Forebay
from forebay.cli.main import app
from forebay.desk import Forgotten
from forebay.errors import NotEnded, UnknownBatch

pytestmark = pytest.mark.integration

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@pytest.fixture
def forebay(redis_url, tmp_path):
    with Forebay(redis_url, str(tmp_path / "storage")) as client:
        yield client


@pytest.fixture
def ended(forebay):
    """The id of a batch that was cancelled."""
    record = forebay.submit(io.BytesIO(LINE))
    forebay.cancel(record.id)
    forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, record.id)
    return record.id


@pytest.fixture
def command(redis_url, tmp_path):
    """The command line on the same Redis and storage: what it prints, if it ends as expected."""
    environment = {"FOREBAY_REDIS_URL": redis_url, "FOREBAY_STORAGE": str(tmp_path / "storage")}

    def run(*words, expect=0):
        result = CliRunner().invoke(app, list(words), prog_name="forebay", env=os.environ | environment)
        assert result.exit_code == expect, result.output
        return result.stdout

    return run


def test_a_forgotten_batch_can_be_brought_back_from_its_files(forebay, ended):
    before = forebay.status(ended)
    assert forebay.forget(ended) == Forgotten(known=True, files=False)
    assert forebay.batches() == []
    assert [record.id for record in forebay.forgotten()] == [ended]
    forebay.resume(ended)
    assert forebay.status(ended) == before


def test_with_its_files_nothing_is_left(forebay, ended, tmp_path):
    assert forebay.forget(ended, files=True) == Forgotten(known=True, files=True)
    assert (forebay.batches(), forebay.forgotten()) == ([], [])
    assert list((tmp_path / "storage" / "batches").iterdir()) == []
    with pytest.raises(UnknownBatch):
        forebay.forget(ended, files=True)


def test_files_of_which_redis_knows_nothing_are_removed_too(forebay, ended):
    forebay.forget(ended)
    with pytest.raises(UnknownBatch):
        forebay.forget(ended)
    assert forebay.forget(ended, files=True) == Forgotten(known=False, files=True)


def test_a_batch_that_is_called_off_and_whose_files_are_gone_is_forgotten(forebay):
    record = forebay.submit(io.BytesIO(LINE))
    forebay.desk.storage.files(record.id).remove_all()
    with pytest.raises(NotEnded):
        forebay.forget(record.id)
    forebay.cancel(record.id)
    assert forebay.forget(record.id) == Forgotten(known=True, files=False)
    assert forebay.batches() == []


def test_a_batch_that_is_called_off_and_has_its_files_ends_by_itself(forebay):
    record = forebay.submit(io.BytesIO(LINE))
    forebay.cancel(record.id)
    with pytest.raises(NotEnded, match="it is cancelling"):
        forebay.forget(record.id)


def test_a_batch_that_has_not_ended_is_not_forgotten(forebay):
    record = forebay.submit(io.BytesIO(LINE))
    with pytest.raises(NotEnded, match="cancel it first"):
        forebay.forget(record.id, files=True)
    assert forebay.status(record.id) == record
    assert forebay.desk.storage.batch_ids() == [record.id]


def test_a_batch_stays_known_when_its_files_are_not_where_they_should_be_removed(
    forebay, ended, command, redis_url, tmp_path
):
    elsewhere = str(tmp_path / "elsewhere")
    with (
        Forebay(redis_url, elsewhere) as stranger,
        pytest.raises(StorageMissingError, match=f"not in {elsewhere}, so nothing is forgotten.*--storage"),
    ):
        stranger.forget(ended, files=True)
    assert command("forget", ended, "--files", "--storage", elsewhere, expect=4) == ""
    assert [record.id for record in forebay.batches()] == [ended]
    assert forebay.forget(ended, files=True) == Forgotten(known=True, files=True)


def test_a_folder_that_is_not_named_like_a_batch_is_left_alone(forebay):
    forebay.desk.storage.files("mine").write("notes", b"x")
    with pytest.raises(UnknownBatch):
        forebay.forget("mine", files=True)
    assert forebay.desk.storage.batch_ids() == ["mine"]


def test_the_command_says_what_it_did(forebay, ended, command, tmp_path):
    said = f"{ended} is forgotten\nits files were left alone\n"
    assert command("forget", ended, "--storage", str(tmp_path / "elsewhere")) == said
    printed = msgspec.json.decode(command("forget", ended, "--files", "--json"))
    assert printed == {"batch_id": ended, "known": False, "files": True}
    assert command("forget", ended, "--files", expect=2) == ""
    record = forebay.submit(io.BytesIO(LINE))
    assert command("forget", record.id, expect=2) == ""
    forebay.cancel(record.id)
    forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, record.id)
    said = f"{record.id} is forgotten\nits files are removed from {tmp_path / 'storage'}\n"
    assert command("forget", record.id, "--files") == said


def test_how_long_a_batch_is_kept_is_said_when_it_is_submitted_and_listed(forebay, command, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(LINE)
    source = str(tmp_path / "in.jsonl")
    kept = msgspec.json.decode(command("submit", source, "--keep", "30d", "--json"))
    assert kept["forebay"]["keep"] == "30d"
    assert msgspec.json.decode(command("submit", source, "--json"))["forebay"]["keep"] is None
    assert command("submit", source, "--keep", "a month", expect=2) == ""
    listed = command("batches")
    assert "30d after its end" in listed
    assert "forever" in listed
    forebay.cancel(kept["id"])
    forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, kept["id"])
    retried = forebay.retry(kept["id"])
    assert retried.forebay.keep == "30d"
    assert forebay.retry(kept["id"], keep="forever").forebay.keep is None


def test_a_run_of_which_nothing_stays_cannot_be_kept(command, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(LINE)
    words = ("run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--keep", "1d")
    result = CliRunner().invoke(app, [*words, "--worker", "http://127.0.0.1:9"], prog_name="forebay")
    assert result.exit_code == 2
    assert "--redis and --storage" in result.output
