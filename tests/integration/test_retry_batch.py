"""A batch of the failed lines of another: what it holds, how it is made, and when it is refused."""

from __future__ import annotations

import io
import json

import pytest

from dispatcher.batches.ledger import Tally
from dispatcher.batches.parts import Entry, PartWriter
from dispatcher.batches.plan import open_plan
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.results import Usage, error_line, record_id
from dispatcher.batches.storage import INPUT
from dispatcher.finaliser import Finaliser
from forebay import Forebay
from forebay.errors import RetryRefused, UnknownBatch
from workers.errors import SettingsError

pytestmark = pytest.mark.integration

LINES = 12
TALLY = Tally()


def lines(count=LINES):
    return [
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "m", "prompt": "ä" * number, "max_tokens": 5},
            }
        ).encode()
        for number in range(1, count + 1)
    ]


def file_of(rows):
    return io.BytesIO(b"\n".join(rows) + b"\n")


@pytest.fixture
def forebay(redis_url, tmp_path):
    with Forebay(redis_url, str(tmp_path / "storage")) as client:
        yield client


def end(forebay, batch_id, failed):
    """Answer all lines, those badly, and finalise: the work of a dispatcher."""
    call, ledger, storage = forebay._portal.call, forebay.desk.ledger, forebay.desk.storage
    files = storage.files(batch_id)
    plan = open_plan(files)
    for shard in range(plan.shard_count):
        claim = call(ledger.claim, batch_id, shard, "test")
        writer = PartWriter(files, shard, "1.test")
        for request in plan.shard(shard):
            name = record_id(batch_id, request.line)
            record = error_line(f"c{request.line}", "max_attempts", "x", None, record_id=name)
            writer.add(Entry(request.line, request.line not in failed, Usage(None, None), record))
        writer.flush()
        call(lambda claim=claim: ledger.progress(claim, "test", TALLY, done=True))
    call(Finaliser(storage, ledger).run, batch_id)


@pytest.fixture
def ended(forebay):
    """A batch of which lines 2, 5 and 11 failed."""
    record = forebay.submit(
        file_of(lines()),
        queue="low",
        order="completed",
        detail=False,
        strategy="chat",
        hedge=False,
        share=2.0,
        window="6h",
        metadata={"team": "a"},
    )
    end(forebay, record.id, {2, 5, 11})
    return forebay.status(record.id)


def input_of(forebay, batch_id):
    return forebay.desk.storage.files(batch_id).read(INPUT).splitlines()


def test_the_new_batch_holds_the_failed_lines_only_and_is_queued_like_the_old_one(forebay, ended):
    record = forebay.retry(ended.id)
    assert input_of(forebay, record.id) == [lines()[number - 1] for number in (2, 5, 11)]
    assert (record.status, record.request_counts.total) == (BatchStatus.IN_PROGRESS, 3)
    assert record.metadata == {"input_name": "input", "team": "a", "retry_of": ended.id}
    options = record.forebay
    assert (options.queue, options.order, options.detail) == ("low", "completed", False)
    assert (options.strategy, options.hedge, options.share) == ("chat", False, 2.0)
    assert record.completion_window == "6h"
    assert forebay.desk.connection.llen("rq:queue:low") > 0
    assert forebay.status(ended.id) == ended


def test_what_is_given_anew_counts(forebay, ended):
    record = forebay.retry(
        ended.id, queue="high", order="input", strategy="batch", hedge=True, share=0.5, window="1h"
    )
    options = record.forebay
    assert (options.queue, options.order, options.strategy, options.hedge) == ("high", "input", "batch", True)
    assert options.share == 0.5
    assert record.expires_at - record.created_at == 3600


def test_a_retry_can_be_retried_and_names_the_batch_before_it(forebay, ended):
    first = forebay.retry(ended.id)
    end(forebay, first.id, {2})
    second = forebay.retry(first.id)
    assert input_of(forebay, second.id) == [lines()[4]]
    assert second.metadata["retry_of"] == first.id


def test_lines_that_are_no_requests_are_left_out_and_counted_once(forebay):
    record = forebay.submit(file_of([*lines(3), b"no json", b"nor this"]), bad_lines="skip")
    end(forebay, record.id, {3})
    first = forebay.retry(record.id)
    assert first.metadata["retry_left_out"] == "2"
    assert input_of(forebay, first.id) == [lines()[2]]
    end(forebay, first.id, {1})
    assert "retry_left_out" not in forebay.retry(first.id).metadata


def test_lines_of_a_cancelled_batch_are_retried(forebay):
    record = forebay.submit(file_of(lines()))
    forebay.cancel(record.id)
    forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, record.id)
    assert forebay.status(record.id).status is BatchStatus.CANCELLED
    assert input_of(forebay, forebay.retry(record.id).id) == lines()


def refusal(forebay, batch_id):
    known = len(forebay.batches())
    with pytest.raises(RetryRefused) as refused:
        forebay.retry(batch_id)
    assert len(forebay.batches()) == known
    return str(refused.value)


def test_a_batch_that_has_not_ended_is_not_retried(forebay):
    record = forebay.submit(file_of(lines()))
    assert "has not ended, it is in_progress" in refusal(forebay, record.id)


def test_a_batch_without_failed_lines_is_not_retried(forebay):
    record = forebay.submit(file_of(lines()))
    end(forebay, record.id, set())
    assert "nothing to retry" in refusal(forebay, record.id)


def test_a_batch_whose_failed_lines_are_no_requests_is_not_retried(forebay):
    record = forebay.submit(file_of([*lines(), b"no json"]), bad_lines="skip")
    end(forebay, record.id, set())
    assert "submit them anew" in refusal(forebay, record.id)


@pytest.mark.parametrize("name", ["errors.jsonl", "plan.npy", "shards.json", "input.jsonl"])
def test_a_batch_whose_files_are_gone_is_not_retried(forebay, ended, name, tmp_path):
    forebay.desk.storage.files(ended.id).remove(name)
    assert "are gone from" in refusal(forebay, ended.id)
    folders = [path.name for path in (tmp_path / "storage" / "batches").iterdir() if any(path.iterdir())]
    assert folders == [ended.id]


def test_a_batch_that_nobody_knows_and_a_strategy_that_nobody_knows_are_refused(forebay, ended):
    with pytest.raises(UnknownBatch):
        forebay.retry("batch_unknown")
    with pytest.raises(SettingsError):
        forebay.retry(ended.id, strategy="no such")
