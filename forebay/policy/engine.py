"""One modelled engine in virtual time: slots, a queue, and a pace that does not depend on the batch.

Every sequence writes at the same speed however full the engine is, so its end is known when it starts, and an
event costs the same on any engine. Engines whose batch slows down are `forebay.simulator.batching`'s subject;
what a monitor makes of an engine is `watched`'s.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How fast and how wide an engine is.

    `speed`: tokens per second that one sequence writes. `prefill`: tokens per second that one prompt is read
    with; 0: prompts take no time. `name`: its worker's; empty: it gets a number.
    """

    speed: float
    slots: int
    prefill: float = 0.0
    name: str = ""

    @property
    def capacity(self) -> float:
        """Tokens written per second with all slots taken."""
        return self.speed * self.slots

    def takes_s(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Seconds from the start of a sequence to its end."""
        prefill_s = prompt_tokens / self.prefill if self.prefill else 0.0
        return prefill_s + answer_tokens / self.speed


@dataclass(frozen=True, slots=True)
class Sequence:
    """One attempt, as its engine sees it. Keys are unique among all engines, and rise."""

    key: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence that took a slot, and when it will leave it unless it is aborted."""

    key: int
    end_s: float


@dataclass(frozen=True, slots=True)
class _Running:
    writes_from_s: float
    answer_tokens: int


class Engine:
    """What runs and what waits. Time is what callers pass, and never runs backwards."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.finished = 0
        """Sequences that came to their end."""
        self.most_running = 0
        self._busy_s = 0.0
        self._now_s = 0.0
        self._written = 0
        self._running: dict[int, _Running] = {}
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy_slot_s(self) -> float:
        """Seconds that slots were taken, all slots together, up to the last event."""
        return self._busy_s

    def submit(self, sequence: Sequence, now_s: float) -> list[Started]:
        """Take a sequence in; it starts at once if a slot is free, else it queues."""
        self._move(now_s)
        self._waiting[sequence.key] = sequence
        return self._start_waiting()

    def finish(self, key: int, now_s: float) -> list[Started]:
        """End a running sequence, whose time has come; gives who starts in its place."""
        self._move(now_s)
        self._written += self._running.pop(key).answer_tokens
        self.finished += 1
        return self._start_waiting()

    def abort(self, key: int, now_s: float) -> list[Started]:
        """Take a sequence out, running or waiting; what it wrote stays counted. Gives who starts then."""
        self._written += self.tokens_of(key, now_s)
        if self._waiting.pop(key, None) is None:
            del self._running[key]
        return self._start_waiting()

    def tokens_of(self, key: int, now_s: float) -> int:
        """Tokens written so far for a sequence that runs; 0 for one that waits."""
        self._move(now_s)
        return int(self._wrote(self._running[key])) if key in self._running else 0

    def tokens_written(self, now_s: float) -> int:
        """Tokens written so far, by all sequences ever."""
        self._move(now_s)
        return self._written + int(sum(map(self._wrote, self._running.values())))

    def _wrote(self, one: _Running) -> float:
        return min(one.answer_tokens, max(0.0, self._now_s - one.writes_from_s) * self.spec.speed)

    def _move(self, now_s: float) -> None:
        self._busy_s += (now_s - self._now_s) * len(self._running)
        self._now_s = now_s

    def _start_waiting(self) -> list[Started]:
        started = []
        while self._waiting and len(self._running) < self.spec.slots:
            key, sequence = self._waiting.popitem(last=False)
            end_s = self._now_s + self.spec.takes_s(sequence.prompt_tokens, sequence.answer_tokens)
            writes_from_s = end_s - sequence.answer_tokens / self.spec.speed
            self._running[key] = _Running(writes_from_s, sequence.answer_tokens)
            started.append(Started(key, end_s))
        self.most_running = max(self.most_running, len(self._running))
        return started
