"""Loads are written together, and each poller hears what became of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from monitor.loads import MOST, LoadWriter
from tests.monitored import make_load
from workers.errors import StoreUnavailable


class Store:
    """Remembers what was written together; knows incarnation 1 of every worker; fails as told."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self.failure: Exception | None = None

    async def write_loads(self, loads: list[tuple[str, int, Any]]) -> list[bool]:
        if self.failure is not None:
            raise self.failure
        self.written.append([worker for worker, _, _ in loads])
        return [incarnation == 1 for _, incarnation, _ in loads]


@contextlib.asynccontextmanager
async def writing(store: Any) -> AsyncIterator[LoadWriter]:
    writer = LoadWriter(store)
    task = asyncio.create_task(writer.run())
    yield writer
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_what_comes_together_is_written_together_and_each_hears_of_its_own() -> None:
    store = Store()
    async with writing(store) as writer:
        found = await asyncio.gather(
            *(
                writer.write(name, incarnation, make_load())
                for name, incarnation in (("a", 1), ("b", 2), ("c", 1))
            )
        )
    assert found == [True, False, True]
    assert store.written == [["a", "b", "c"]]


async def test_no_step_is_longer_than_it_may_be() -> None:
    store = Store()
    async with writing(store) as writer:
        await asyncio.gather(*(writer.write(str(number), 1, make_load()) for number in range(MOST + 5)))
    assert [len(step) for step in store.written] == [MOST, 5]


@pytest.mark.parametrize("failure", [StoreUnavailable("gone"), ZeroDivisionError()])
async def test_a_failure_is_heard_by_all_and_ends_nothing(failure: Exception) -> None:
    store = Store()
    async with writing(store) as writer:
        store.failure = failure
        found = await asyncio.gather(
            *(writer.write(name, 1, make_load()) for name in "ab"), return_exceptions=True
        )
        assert found == [failure, failure]
        store.failure = None
        assert await writer.write("c", 1, make_load())


async def test_a_poller_that_ends_meanwhile_takes_nobody_with_it() -> None:
    store = Store()
    async with writing(store) as writer:
        ending = asyncio.create_task(writer.write("a", 1, make_load()))
        await asyncio.sleep(0)
        ending.cancel()
        assert await writer.write("b", 1, make_load())
    assert ending.cancelled()


async def test_whoever_waits_when_the_writer_ends_is_cancelled() -> None:
    async with writing(Store()) as writer:
        waiting = asyncio.create_task(writer.write("a", 1, make_load()))
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await waiting
