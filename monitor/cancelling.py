"""A task that was told to end, ends: for loops around clients that may lose the word."""

from __future__ import annotations

import asyncio


def heed_cancellation() -> None:
    """Raise CancelledError if somebody cancelled the running task, even if nothing raised it since.

    redis-py writes under ``asyncio.wait_for``, which before Python 3.12 drops a cancellation that arrives
    together with the result [python/cpython#86296]; a loop around it would then run for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
