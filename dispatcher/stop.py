"""A person's wish that a job ends now, and what it calls off.

Who sends it is `running`'s subject, what becomes of the job's lines that of `shard`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stop:
    """One job's. It may be wanted before the job has begun, and is never taken back."""

    def __init__(self) -> None:
        self.wanted = False
        self._waiting: set[asyncio.Task[Any]] = set()
        self._called_off: set[asyncio.Task[Any]] = set()

    def want(self) -> None:
        """Call off what is awaited inside `ends_waiting` now, and let nothing be awaited there any more."""
        self.wanted = True
        for task in self._waiting - self._called_off:
            self._called_off.add(task)
            task.cancel()

    @contextmanager
    def ends_waiting(self) -> Iterator[None]:
        """Leave the block, as if it were done, when the stop is wanted; do not enter it when it is already.

        A cancellation by anybody else goes on as ever.
        """
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._called_off or task.uncancel():
                raise
        finally:
            self._waiting.discard(task)
            self._called_off.discard(task)
