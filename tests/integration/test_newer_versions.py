"""What a newer version wrote harms nobody: unknown fields are left out, what cannot be read is left alone."""

from __future__ import annotations

import io

import msgspec
import pytest
from typer.testing import CliRunner

from dispatcher.archive import Archive
from dispatcher.batches.errors import UnreadableRecordError
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.storage import RECORD
from dispatcher.finaliser import Finaliser
from dispatcher.records import record_of
from forebay import Forebay
from forebay.cli.main import app
from forebay.errors import NotEnded
from tests.sightings import sighting
from workers import keys

pytestmark = pytest.mark.integration

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
NEWER = {"status": "paused"}


@pytest.fixture
def forebay(redis_url, tmp_path):
    with Forebay(redis_url, str(tmp_path / "storage")) as client:
        yield client


@pytest.fixture
def write(forebay):
    """Write fields of a batch, as another version might; gives what is known of it then."""

    def write(batch_id, fields):
        forebay._portal.call(forebay.desk.ledger.set_fields, batch_id, fields)
        return forebay._portal.call(forebay.desk.entry, batch_id)

    return write


@pytest.fixture
def command(redis_url, monkeypatch):
    """The command line on the same Redis."""
    monkeypatch.setenv("FOREBAY_REDIS_URL", redis_url)
    return lambda *words: CliRunner().invoke(app, list(words), prog_name="forebay")


def with_news(entry):
    """The batch's record, with a field in it and in its options that is not known here."""
    record = msgspec.json.decode(entry.fields["record"])
    record["forebay"]["news"] = record["news"] = {"a": 1}
    return {"record": msgspec.json.encode(record).decode()}


def finalise(forebay, batch_id):
    forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, batch_id)


def test_a_batch_with_new_fields_is_shown_and_ended_as_without_them(forebay, write):
    record = forebay.submit(io.BytesIO(LINE))
    write(record.id, with_news(forebay._portal.call(forebay.desk.entry, record.id)))
    assert forebay.status(record.id) == record
    forebay.cancel(record.id)
    finalise(forebay, record.id)
    assert forebay.status(record.id).status is BatchStatus.CANCELLED
    written = forebay.desk.storage.files(record.id).read(RECORD)
    assert written == forebay.status(record.id).to_json()


@pytest.mark.parametrize("fields", [NEWER, {"record": '{"id": 7}'}])
def test_batches_are_listed_beside_one_that_cannot_be_read(forebay, write, command, fields):
    newer, readable = forebay.submit(io.BytesIO(LINE)).id, forebay.submit(io.BytesIO(LINE)).id
    write(newer, fields)
    unreadable: list[UnreadableRecordError] = []
    assert [record.id for record in forebay.batches(on_unreadable=unreadable.append)] == [readable]
    assert [newer in str(error) for error in unreadable] == [True]
    listed = command("batches")
    assert (listed.exit_code, readable in listed.stdout, newer in listed.stderr) == (0, True, True)


def test_to_ask_for_one_that_cannot_be_read_ends_with_a_message(forebay, write, command):
    newer = forebay.submit(io.BytesIO(LINE)).id
    write(newer, NEWER)
    for words in (["status"], ["status", newer], ["wait", newer], ["resume", newer]):
        ended = command(*words)
        assert ended.exit_code == 4, words
        assert f"the status 'paused' of {newer} cannot be read by this version" in ended.stderr


def test_a_batch_that_cannot_be_read_is_neither_forgotten_nor_ended(forebay, write):
    newer = forebay.submit(io.BytesIO(LINE)).id
    before = write(newer, NEWER)
    with pytest.raises(NotEnded, match="it is paused"):
        forebay.forget(newer)
    with pytest.raises(UnreadableRecordError):
        finalise(forebay, newer)
    assert forebay._portal.call(forebay.desk.entry, newer) == before


def test_whoever_cannot_read_a_record_does_not_end_its_batch(forebay, write):
    record = forebay.submit(io.BytesIO(LINE))
    forebay.cancel(record.id)
    write(record.id, {"record": '{"id": 7}'})
    with pytest.raises(UnreadableRecordError):
        finalise(forebay, record.id)
    assert forebay._portal.call(forebay.desk.entry, record.id).status == "cancelling"


async def test_a_batch_of_a_status_that_is_not_known_hides_no_other(valkey):
    ledger = Ledger(valkey)
    of_all = {
        "queue": "q",
        "total": "5",
        "completed": "2",
        "keep_s": "1",
        "paused_at": "1",
        "completed_at": "1",
    }
    for place, status in enumerate(["in_progress", "paused", "completed"]):
        await ledger.open(f"batch_{status}", place, of_all | {"status": status})
    assert [entry.status for entry in await ledger.unfinished()] == ["in_progress", "paused"]
    assert await ledger.due_for_removal(10.0) == ["batch_completed"]
    assert await ledger.lines_left("q") == 6


async def test_a_decision_that_cannot_be_read_is_left_out_and_told_of(valkey):
    archive = Archive(valkey)
    now_s = await Ledger(valkey).now()
    kept = record_of(
        sighting(now_s),
        "d1",
    )
    await archive.keep([kept])
    await valkey.zadd(keys.DECISION.of("r1"), {'{"attempt": "many"}': now_s})
    unreadable: list[str] = []
    assert await archive.of_requests(["r1"], unreadable.append) == [[kept]]
    assert await archive.find("c1", on_unreadable=unreadable.append) == [[kept]]
    assert unreadable == ["r1", "r1"]
