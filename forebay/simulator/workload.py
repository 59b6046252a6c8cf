"""The batching model tied to the event loop's clock: jobs in, a callback when each is done.

Belongs here: jobs of several sequences, the one timer that sleeps until the next finish, and the load that
follows. Does not belong here: requests and replies (``engine``), the arithmetic itself (``batching``).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.simulator.batching import Batch, Pace, Sequence
from forebay.simulator.load import LoadSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a job; ``stopped`` when it ends by itself, not by its ceiling."""

    prompt_tokens: int
    tokens: int
    stopped: bool


@dataclass(slots=True)
class Job:
    """Sequences that run side by side; ``done`` is called once, when the last has finished."""

    parts: list[Part]
    done: Callable[[], None]
    keys: list[int] = field(default_factory=list)
    left: int = 0


class Workload:
    """What an engine has to do. Needs a running event loop, whose clock is the model's."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._batch = Batch(pace, now_s=self._loop.time())
        self._jobs: dict[int, Job] = {}
        self._keys = itertools.count(1)
        self._finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def max_running_seen(self) -> int:
        """The most sequences that ever ran at once."""
        return self._batch.max_running_seen

    def try_run(self, job: Job) -> bool:
        """Take a job in, whole; False, changing nothing, when the queue has no room for it."""
        self.pump()  # first, so that slots that are free by now count as room
        if not self._batch.has_room(len(job.parts)):
            return False
        self._idle.clear()
        self._submit(job)
        self.pump()
        return True

    def abandon(self, job: Job) -> None:
        """Take out what is left of a job; its ``done`` is not called any more."""
        now_s = self._loop.time()
        for key in job.keys:
            if self._batch.abort(key, now_s):
                self._finished["abort"] += 1
            self._jobs.pop(key, None)
        self.pump()

    def set_factor(self, factor: float) -> None:
        """Run at ``factor`` times the pace from now on; 0 stands still."""
        self._batch.set_factor(factor, self._loop.time())
        self.pump()

    def load(self, rejected: int) -> LoadSnapshot:
        """What is true now; ``rejected`` is how many requests found the queue full so far."""
        self.pump()
        batch = self._batch
        return LoadSnapshot(
            sampled_at_s=time.time(),
            running=batch.running,
            waiting=batch.waiting,
            waiting_prompt_tokens=batch.waiting_prompt_tokens,
            used_tokens=batch.held_tokens,
            capacity_tokens=self._pace.kv_tokens,
            gen_tokens_per_s=batch.tokens_per_s_now,
            prompt_tokens_total=batch.prompt_tokens_total,
            generation_tokens_total=batch.generation_tokens_total,
            finished=dict(self._finished),
            rejected=rejected,
        )

    def pump(self) -> None:
        """Report what has finished by now, and sleep until the next finish."""
        for finished in self._batch.advance(self._loop.time()):
            job = self._jobs.pop(finished.sequence.key, None)
            if job is not None:
                self._finish_one(job)
        if not self._jobs:
            self._idle.set()
        self._sleep_until_next_finish()

    async def until_idle(self) -> None:
        """Return once nothing runs or waits."""
        await self._idle.wait()

    def stop(self) -> None:
        """Report no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _submit(self, job: Job) -> None:
        now_s = self._loop.time()
        job.keys = [next(self._keys) for _ in job.parts]
        job.left = len(job.parts)
        for key, part in zip(job.keys, job.parts, strict=True):
            self._jobs[key] = job
            self._batch.submit(Sequence(key, part.prompt_tokens, part.tokens), now_s)

    def _finish_one(self, job: Job) -> None:
        job.left -= 1
        if job.left == 0:
            self._finished.update("stop" if part.stopped else "length" for part in job.parts)
            job.done()

    def _sleep_until_next_finish(self) -> None:
        self.stop()
        next_s = self._batch.next_event_s()
        if next_s is not None:
            self._timer = self._loop.call_at(next_s, self.pump)
