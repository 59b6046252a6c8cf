"""Workers that ``forebay.toml`` lists: registered, followed on change, drained when taken out."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import structlog

from monitor import configured
from monitor.configured import ConfiguredWorkers, read_workers
from workers.connection import AsyncRedis
from workers.errors import SettingsError
from workers.fleet import FleetView, WorkerState
from workers.spec import WorkerSpec
from workers.store import FleetStore

pytestmark = pytest.mark.integration

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def table(worker: str, more: str = "") -> str:
    return f'[[worker]]\nurl = "http://{worker}"\n{more}\n'


class Unreadable(FleetStore):
    """Whose fleet cannot be read at first."""

    def __init__(self, client: AsyncRedis) -> None:
        super().__init__(client)
        self.failures = 3
        self.was_read = asyncio.Event()

    async def view(self) -> FleetView:
        if self.failures:
            self.failures -= 1
            raise ValueError("spoiled")
        self.was_read.set()
        return await super().view()


class File:
    """A configuration file whose every change is seen, however soon it follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changes = 0

    def write(self, text: str) -> None:
        self.path.write_text(text, encoding="utf-8")
        self._changes += 1
        os.utime(self.path, (self._changes, self._changes))


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "forebay.toml")


@pytest.fixture
def store(valkey: AsyncRedis) -> FleetStore:
    return FleetStore(valkey)


async def states(store: FleetStore) -> dict[str, str]:
    return {worker.id: worker.state.value for worker in (await store.view()).workers}


async def follow(workers: ConfiguredWorkers, store: FleetStore) -> None:
    workers.look()
    await workers.tell(store)


async def test_listed_workers_are_registered_with_all_that_is_said_of_them(
    store: FleetStore, file: File
) -> None:
    file.write(
        table(f"{A}/v1/", 'runtime = "vllm"\nweight = 2\nmax_running = 8\napi_key_file = "/k"') + table(B)
    )
    await ConfiguredWorkers(file.path).tell(store)
    first, second = (await store.view()).workers
    assert (first.id, first.runtime, first.weight, first.max_running) == (A, "vllm", 2.0, 8)
    assert (first.api_key_file, first.origin) == ("/k", str(file.path))
    assert second.id == B


async def test_one_that_is_added_later_is_registered_and_the_others_live_on(
    store: FleetStore, file: File
) -> None:
    file.write(table(A))
    workers = ConfiguredWorkers(file.path)
    await follow(workers, store)
    before = (await store.view()).workers[0].incarnation
    file.write(table(A) + table(B))
    await follow(workers, store)
    assert [(worker.id, worker.incarnation == before) for worker in (await store.view()).workers] == [
        (A, True),
        (B, False),
    ]


async def test_one_that_changed_begins_its_next_life(store: FleetStore, file: File) -> None:
    file.write(table(A))
    workers = ConfiguredWorkers(file.path)
    await follow(workers, store)
    before = (await store.view()).workers[0]
    file.write(table(A, "weight = 3"))
    await follow(workers, store)
    [after] = (await store.view()).workers
    assert (after.weight, after.incarnation > before.incarnation) == (3.0, True)


async def test_one_that_was_taken_out_is_drained_and_those_of_other_origin_are_not(
    store: FleetStore, file: File, tmp_path: Path
) -> None:
    other = File(tmp_path / "other.toml")
    file.write(table(A))
    other.write(table("10.0.0.3:8000"))
    await store.register(WorkerSpec(url=f"http://{B}"))
    await ConfiguredWorkers(other.path).tell(store)
    workers = ConfiguredWorkers(file.path)
    await follow(workers, store)
    file.write("")
    await follow(workers, store)
    assert await states(store) == {A: "draining", B: "starting", "10.0.0.3:8000": "starting"}


async def test_one_that_was_taken_out_while_no_monitor_ran_is_drained_at_the_next_start(
    store: FleetStore, file: File
) -> None:
    file.write(table(A) + table(B))
    await ConfiguredWorkers(file.path).tell(store)
    file.write(table(B))
    await ConfiguredWorkers(file.path).tell(store)
    assert await states(store) == {A: "draining", B: "starting"}


async def test_a_worker_that_a_person_registered_first_stays_when_the_file_drops_it(
    store: FleetStore, file: File
) -> None:
    await store.register(WorkerSpec(url=f"http://{A}"))
    file.write(table(A))
    workers = ConfiguredWorkers(file.path)
    await follow(workers, store)
    file.write("")
    await follow(workers, store)
    assert await states(store) == {A: "starting"}


async def test_one_that_a_person_drained_stays_so_while_its_entry_is_the_same(
    store: FleetStore, file: File
) -> None:
    file.write(table(A))
    workers = ConfiguredWorkers(file.path)
    await follow(workers, store)
    await store.drain(A, deadline_s=600)
    file.write(table(A) + table(B))
    await follow(workers, store)
    assert (await states(store))[A] == WorkerState.DRAINING


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "colour = 1\n",
        table(A, "colour = 1"),
        table("no url at all"),
        table(A) + table(f"{A}/v1"),
        f'[worker]\nurl = "http://{A}"\n',
    ],
)
async def test_a_bad_file_is_refused_with_a_warning_and_the_old_list_stands(
    store: FleetStore, file: File, text: str
) -> None:
    file.write(table(A))
    workers = ConfiguredWorkers(file.path)
    await follow(workers, store)
    file.write(text)
    with structlog.testing.capture_logs() as logs:
        await follow(workers, store)
        await follow(workers, store)
    assert [line["log_level"] for line in logs] == ["warning"]
    assert await states(store) == {A: "starting"}
    with pytest.raises(SettingsError, match=r"forebay\.toml"):
        read_workers(file.path)
    file.write(table(B))
    await follow(workers, store)
    assert await states(store) == {A: "draining", B: "starting"}


async def test_a_file_that_is_gone_takes_nobody_with_it(store: FleetStore, file: File) -> None:
    file.write(table(A))
    workers = ConfiguredWorkers(file.path)
    await follow(workers, store)
    file.path.unlink()
    with structlog.testing.capture_logs() as logs:
        await follow(workers, store)
    assert [line["log_level"] for line in logs] == ["warning"]
    await ConfiguredWorkers(file.path).tell(store)
    assert await states(store) == {A: "starting"}


async def test_workers_of_flags_are_added_and_never_drained(store: FleetStore, file: File) -> None:
    await ConfiguredWorkers(file.path, [WorkerSpec(url=f"http://{A}")]).tell(store)
    file.write(table(B))
    await ConfiguredWorkers(file.path).tell(store)
    assert await states(store) == {A: "starting", B: "starting"}


async def test_a_mistake_of_ours_is_said_once_and_the_telling_goes_on(
    valkey: AsyncRedis, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "LOOK_INTERVAL_S", 0.001)
    file.write(table(A))
    store = Unreadable(valkey)
    with structlog.testing.capture_logs() as logs:
        keeping = asyncio.create_task(ConfiguredWorkers(file.path).keep(store))
        await asyncio.wait_for(store.was_read.wait(), 10)
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
    assert await states(store) == {A: "starting"}
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["workers not registered"]


async def test_a_redis_that_was_emptied_and_filled_by_others_lacks_nobody(
    store: FleetStore, file: File
) -> None:
    async def others_register() -> None:
        for number in range(3):
            await store.register(WorkerSpec(url=f"http://10.0.1.{number}:8000"))

    file.write(table(A))
    workers = ConfiguredWorkers(file.path, [WorkerSpec(url=f"http://{B}")])
    await follow(workers, store)
    await others_register()
    await follow(workers, store)
    await store.client.flushall()
    await others_register()
    await follow(workers, store)
    assert {A, B} <= set(await states(store))
