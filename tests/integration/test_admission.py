"""A queue takes so many requests and no more: who submits beyond that is told, and leaves nothing behind."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from dispatcher.batches.errors import StorageDeniedError
from dispatcher.batches.ledger import Tally
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.storage import BatchFiles
from forebay import Forebay
from forebay.cli.main import app
from forebay.errors import QueueFull
from forebay.run import _Run
from forebay.run_settings import RunSettings
from forebay.settings import FrontSettings
from forebay.submission import Options, prepare

pytestmark = pytest.mark.integration


def a_file(lines, bad=0):
    rows = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
        for number in range(lines)
    ]
    return b"\n".join([*map(msgspec.json.encode, rows), *[b"no json"] * bad]) + b"\n"


@pytest.fixture
def forebay(redis_url, tmp_path):
    """Its queues take a hundred requests."""
    storage = str(tmp_path / "storage")
    settings = FrontSettings(redis_url=redis_url, storage=storage, most_queued_requests=100)
    with Forebay(settings=settings) as client:
        yield client


def submit(forebay, lines, bad=0, **options):
    return forebay.submit(io.BytesIO(a_file(lines, bad)), **options)


def stored(forebay):
    """The batches that the storage holds anything of."""
    folder = Path(forebay.settings.storage) / "batches"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def report(forebay, batch_id, completed):
    portal, ledger = forebay._portal, forebay.desk.ledger
    claim = portal.call(ledger.claim, batch_id, 0, "test")

    async def progress():
        return await ledger.progress(claim, "test", Tally(completed=completed), done=False)

    portal.call(progress)


def test_a_file_beyond_what_the_queue_takes_is_refused_and_nothing_of_it_stays(forebay):
    first = submit(forebay, 60)
    with pytest.raises(QueueFull, match=r"60 requests wait.*41 more.*above 100"):
        submit(forebay, 41)
    assert [record.id for record in forebay.batches()] == [first.id]
    assert stored(forebay) == [first.id]
    submit(forebay, 40)


def test_that_there_is_no_room_is_said_also_where_nothing_can_be_deleted(forebay, monkeypatch):
    def remove_all(_files):
        raise StorageDeniedError("not permitted")

    submit(forebay, 60)
    monkeypatch.setattr(BatchFiles, "remove_all", remove_all)
    with pytest.raises(QueueFull):
        submit(forebay, 41)


def test_a_full_queue_refuses_before_it_stores_a_large_file(forebay, monkeypatch):
    submit(forebay, 100)

    class Unread(io.RawIOBase):
        def read(self, size=-1):
            raise AssertionError("it was read")

    with pytest.raises(QueueFull, match="100 requests wait"):
        forebay.submit(Unread())


def test_what_has_a_result_waits_no_more(forebay):
    first = submit(forebay, 100)
    report(forebay, first.id, 30)
    submit(forebay, 30)


def test_batches_that_ended_and_other_queues_do_not_count(forebay):
    ended = submit(forebay, 100)
    portal, ledger = forebay._portal, forebay.desk.ledger

    async def end():
        await ledger.move(ended.id, BatchStatus.FAILED, among=[BatchStatus.IN_PROGRESS])

    portal.call(end)
    submit(forebay, 90)
    submit(forebay, 90, queue="low")


def test_lines_that_are_no_requests_take_no_room(forebay):
    submit(forebay, 100, bad=5, bad_lines="skip")


def test_more_batches_than_are_read_at_once_all_count(forebay, monkeypatch):
    monkeypatch.setattr("dispatcher.batches.ledger._ENTRIES_AT_ONCE", 2)
    for _ in range(5):
        submit(forebay, 19)
    with pytest.raises(QueueFull, match="95 requests wait"):
        submit(forebay, 6)


def test_the_command_says_so_with_its_exit_code(redis_url, tmp_path, monkeypatch):
    (tmp_path / "forebay.toml").write_text(
        f'redis_url = "{redis_url}"\nstorage = "{tmp_path}/storage"\nmost_queued_requests = 10\n'
    )
    monkeypatch.setenv("FOREBAY_CONFIG", str(tmp_path / "forebay.toml"))
    for variable in ("FOREBAY_REDIS_URL", "FOREBAY_STORAGE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "in.jsonl").write_bytes(a_file(11))
    done = CliRunner().invoke(app, ["submit", str(tmp_path / "in.jsonl")])
    assert done.exit_code == 4
    assert "the queue default is full" in done.output
    monkeypatch.setenv("FOREBAY_MOST_QUEUED_REQUESTS", "11")
    assert CliRunner().invoke(app, ["submit", str(tmp_path / "in.jsonl")]).exit_code == 0


@pytest.fixture
def begin_run(forebay):
    """A run from the point where its services are up."""

    def begin(*, lines, redis_url, fresh=True):
        storage = forebay.desk.storage
        options = Options(queue="default")
        record = prepare(storage, io.BytesIO(a_file(lines)), name="in", options=options, now_s=1.0)
        paths = {name: Path(name) for name in ("input", "output", "errors")}
        settings = RunSettings(**paths, workers=(), redis_url=redis_url, wait_ready_s=0.0)
        batch = SimpleNamespace(
            replaces=None,
            settings=settings,
            fresh=fresh,
            files=storage.files(record.id),
            queue="default",
            id=record.id,
        )
        services = SimpleNamespace(drain=lambda: None, check=lambda: None, monitored=True)
        _Run(batch, services, forebay, SimpleNamespace(), 0.0).outcome()

    return begin


def test_a_run_on_somebodys_redis_is_refused_before_it_waits_for_a_worker(forebay, begin_run, redis_url):
    submit(forebay, 60)
    with pytest.raises(QueueFull):
        begin_run(lines=41, redis_url=redis_url)


@pytest.mark.parametrize(
    "how", [{"redis_url": None}, {"redis_url": "redis://x", "fresh": False}], ids=["its own", "resumed"]
)
def test_a_run_on_a_redis_of_its_own_and_one_that_goes_on_are_never_refused(forebay, begin_run, how):
    from forebay.errors import NoWorkerReady

    submit(forebay, 60)
    with pytest.raises(NoWorkerReady):
        begin_run(lines=41, **how)
    assert len(stored(forebay)) == 2
