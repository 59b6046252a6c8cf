"""How a run looks: plain lines, JSON events, the live picture. What is unknown is shown as such."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dispatcher.batches.record import BatchRecord, BatchStatus, RequestCounts
from forebay.cli.events import EventWatcher, progress_event
from forebay.cli.live import LiveWatcher, picture
from forebay.cli.plain import PlainWatcher
from forebay.cli.tables import fleet_table
from forebay.progress import Progress
from tests.fleets import NOW_S, load, worker
from workers.breaker import BreakerState
from workers.fleet import WorkerState
from workers.spec import Runtime

BUSY = worker(
    "gpu-1:8000",
    runtime=Runtime.VLLM,
    load=load(running=7, waiting=2, kv_usage_max=0.81),
    limit=16,
    leases=9,
)
SILENT = worker("gpu-2:8000", load=None, state=WorkerState.UNREADY, breaker=BreakerState.OPEN)
RECORD = BatchRecord(id="batch_1", created_at=1, request_counts=RequestCounts(total=500, failed=3))


def look(**changes):
    seen = Progress(
        batch_id="batch_1",
        status=BatchStatus.IN_PROGRESS,
        total=500,
        completed=120,
        failed=5,
        in_flight=9,
        completion_tokens=1000,
        tokens_per_s=1234.5,
        eta_s=65.0,
        elapsed_s=12.0,
        workers=(BUSY, SILENT),
        now_s=NOW_S,
    )
    return replace(seen, **changes)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return []


@pytest.fixture
def plain(said, clock):
    return PlainWatcher(said.append, every_s=5.0, now=clock)


def test_a_plain_line_says_how_far_it_is(plain, said):
    plain.progress(look())
    assert said == [
        ("in_progress 25%: 120 done, 5 failed, 9 in flight of 500; 1,234 tokens/s; 0:12 passed, 1:05 left"),
        "  gpu-1:8000 vllm ready: running 7, waiting 2, KV 81%, leases 9/16, breaker closed",
        "  gpu-2:8000 - unready: running -, waiting -, KV -%, leases 0/16, breaker open",
    ]


def test_plain_lines_come_every_few_seconds(plain, said, clock):
    for _ in range(20):
        plain.progress(look())
        clock.now_s += 0.5
    assert len([line for line in said if line.startswith("in_progress")]) == 2


def test_a_worker_that_changes_is_told_at_once_and_alone(plain, said):
    plain.progress(look())
    said.clear()
    plain.progress(look(workers=(replace(BUSY, breaker=BreakerState.OPEN), SILENT)))
    assert [line.split()[0] for line in said] == ["in_progress", "gpu-1:8000"]
    assert said[1].endswith("breaker open")


def test_the_first_look_is_told_even_right_after_a_wait(plain, said):
    plain.waiting([SILENT])
    plain.progress(look())
    assert said[0].startswith("waiting for a worker: gpu-2:8000 (unready)")
    assert said[1].startswith("in_progress")


def test_trouble_with_the_storage_is_told_once_and_so_is_its_end(plain, said):
    plain.progress(look())
    said.clear()
    for _ in range(2):
        plain.progress(look(trouble="d1: no room\x1b[2J"))
    plain.progress(look())
    assert said == ["  trouble: d1: no room\\x1b[2J", "  the storage can be used again"]


def test_trouble_with_the_storage_stands_in_the_picture_and_in_events():
    console = Console(width=120, file=io.StringIO())
    console.print(picture(look(trouble="d1: no room")))
    assert "trouble: d1: no room" in console.file.getvalue()
    assert progress_event(look(trouble="d1: no room"))["trouble"] == "d1: no room"
    assert progress_event(look())["trouble"] is None


SERVING = replace(BUSY, models=frozenset({"llama", "\x1b[2Jtuned"}))


def test_models_that_nobody_serves_are_told_once_and_so_is_that_somebody_does(plain, said):
    plain.progress(look(workers=(SERVING,)))
    said.clear()
    for _ in range(2):
        plain.progress(look(workers=(SERVING,), unserved=("lama",)))
    plain.progress(look(workers=(SERVING,)))
    assert said == [
        "  no worker serves lama, its lines wait (they serve \\x1b[2Jtuned, llama)",
        "  every model is served now",
    ]


def test_of_many_models_that_nobody_serves_a_few_are_named(plain, said):
    plain.progress(look(workers=(), unserved=("a", "b", "c", "d", "e")))
    assert said[-1] == "  no worker serves a, b, c, 2 more, its lines wait (none is registered)"


def test_a_batch_that_ends_while_nobody_serves_its_model_does_not_say_that_somebody_does(plain, said):
    plain.progress(look(workers=(SERVING,), unserved=("lama",)))
    said.clear()
    plain.progress(look(workers=(SERVING,), status=BatchStatus.CANCELLED))
    assert [line.split(":")[0] for line in said] == ["cancelled 25%"]


def test_models_that_nobody_serves_stand_in_the_picture_and_in_events():
    waiting = look(workers=(SERVING,), unserved=("lama",))
    assert "no worker serves lama" in rendered(picture(waiting))
    assert "no worker serves" not in rendered(picture(look()))
    assert progress_event(waiting)["unserved"] == ["lama"]
    assert progress_event(look())["unserved"] == []


def test_the_end_is_told_at_once(plain, said):
    plain.progress(look())
    said.clear()
    plain.progress(look(status=BatchStatus.COMPLETED, completed=495))
    assert [line.split(":")[0] for line in said] == ["completed 100%"]


def test_plain_lines_carry_no_escape_codes(plain, said):
    plain.started(RECORD, resumed=True)
    plain.waiting([SILENT])
    plain.progress(look(tokens_per_s=None, eta_s=None))
    assert said[0] == "batch_1: 500 lines taken up again, 3 of them refused"
    assert not any("\x1b" in line for line in said)
    assert "- tokens/s; 0:12 passed, - left" in said[2]


def test_events_come_about_every_second_and_at_the_end(clock):
    events = []
    watcher = EventWatcher(events.append, every_s=1.0, now=clock)
    watcher.started(RECORD, resumed=False)
    for _ in range(4):
        watcher.progress(look())
        clock.now_s += 0.5
    watcher.progress(look(status=BatchStatus.COMPLETED))
    watcher.progress(look(status=BatchStatus.COMPLETED))
    assert [event["event"] for event in events] == ["started", "progress", "progress", "progress", "progress"]
    assert events[0] == {"event": "started", "batch_id": "batch_1", "total": 500, "resumed": False}


def test_an_event_leaves_what_is_unknown_null(clock):
    events = []
    EventWatcher(events.append, now=clock).progress(look(tokens_per_s=None, eta_s=None))
    [event] = events
    assert event["request_counts"] == {"total": 500, "completed": 120, "failed": 5}
    assert event["tokens_per_s"] is None
    assert event["workers"][0]["running"] == 7
    assert event["workers"][1] == {
        "id": "gpu-2:8000",
        "runtime": None,
        "state": "unready",
        "reason": "",
        "running": None,
        "waiting": None,
        "kv_usage_max": None,
        "leases": 0,
        "limit": 16,
        "breaker": "open",
    }


def rendered(renderable, *, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def test_the_picture_shows_the_bar_the_numbers_and_each_worker():
    shown = rendered(picture(look()))
    assert "25%" in shown
    assert "125/500" in shown
    assert "1,234 tokens/s" in shown
    assert "left 1:05" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("gpu-")]
    assert rows == [
        ["gpu-1:8000", "vllm", "ready", "7", "2", "81", "9", "16", "closed"],
        ["gpu-2:8000", "-", "unready", "-", "-", "-", "0", "16", "open"],
    ]


def test_a_worker_of_markup_like_name_is_shown_as_it_is():
    assert "[red]a:1" in rendered(fleet_table([worker("[red]a:1")]))


def test_a_picture_that_is_closed_leaves_the_terminal_to_others(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal, as a build server's, gets no cursor to hide
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    watcher = LiveWatcher(console)
    watcher.started(RECORD, resumed=False)
    watcher.waiting([SILENT])
    watcher.progress(look())
    watcher.close()
    written = console.file.getvalue()
    assert "500 lines taken in" in written
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor is shown again
