"""A request's two attempts: one of them wins, exactly once; the other is called off.

When a second attempt is worth it is `hedges`' subject, what an attempt does that of `attempts`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Race(Generic[T]):
    """The first attempt runs in the task that makes the race: a request without a second pays nothing."""

    def __init__(self, usable: Callable[[T], bool], wins: Callable[[T], bool]) -> None:
        """`usable` says of the first's result whether the request may end with it, `wins` the same of the
        second's: what only the second worker refuses is no reason to give the first up.
        """
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._usable = usable
        self._wins = wins
        self._second: asyncio.Task[T] | None = None
        self._second_begun = False
        self._winner: T | None = None
        self._over = False

    @property
    def open(self) -> bool:
        """Whether a second attempt may join: the first still runs, and runs alone."""
        return not self._over and self._second is None

    def join(self, second: Callable[[], Awaitable[T]], *, never_begun: Callable[[], None]) -> None:
        """Start the second attempt. `never_begun` is called if it is called off before its first step.

        Such a task is just not run: the attempt could not give back what it holds.
        """
        assert self.open
        self._second = asyncio.create_task(self._run_second(second))
        self._second.add_done_callback(lambda _: None if self._second_begun else never_begun())

    async def run(self, first: Awaitable[T]) -> T:
        """The winner's result; the first's when there is none. Cancelling it calls off both."""
        try:
            result = await first
        except asyncio.CancelledError:
            self._over = True
            if self._winner is None:
                await self._call_off()
                raise
            self._task.uncancel()
            if self._task.cancelling():  # by somebody else too
                raise
            return self._winner
        self._over = True
        if self._second is None or self._usable(result):
            await self._call_off()
            return result
        other = await self._second
        return other if self._wins(other) else result

    async def _run_second(self, second: Callable[[], Awaitable[T]]) -> T:
        self._second_begun = True
        result = await second()
        if not self._over and self._wins(result):
            self._winner = result
            self._task.cancel()
        return result

    async def _call_off(self) -> None:
        if self._second is not None:
            self._second.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._second
