"""Continuous batching as arithmetic: when each sequence of an engine finishes.

Belongs here: the slots, the waiting queue, the KV tokens, the pace, and the counters that follow from them.
Does not belong here: clocks, sockets, requests, texts. Time is whatever ``now_s`` the caller passes; it never
runs backwards.

The model. A sequence alone needs ``prompt / prefill_tokens_per_s + completion / tokens_per_s`` seconds. With
``b`` sequences running, every one of them moves at

    speed(b) = factor / (1 + slowdown * (b - 1) / slots)

of that, so the rate of one sequence falls with the batch while the sum of all, ``b * speed(b)``, grows for
every ``slowdown < slots``. All running sequences share one speed, hence one *virtual time* that advances by
``speed(b)`` per second: a sequence finishes when virtual time reaches its start plus what it needs alone. A
change of the batch bends virtual time and so moves every later finish, exactly and without touching the other
sequences.

Waiting is first come, first served. The head of the queue starts when a slot is free and its tokens, prompt
and completion together, fit beside those of the running ones (real engines admit sooner and preempt; to
reserve at once has the same throughput without the replays). A sequence larger than the whole KV cache still
runs, alone.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass


class QueueFullError(Exception):
    """The waiting queue holds as many sequences as it may; nothing was taken in."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast and how wide an engine is.

    ``tokens_per_s`` is the decode rate of one sequence alone and ``prefill_tokens_per_s`` its prefill rate; 0
    means that the phase takes no time. ``slowdown`` is how many times longer one sequence takes in a full
    batch, less one (about: ``1 + slowdown * (slots - 1) / slots`` times). ``max_queued`` None means an
    unbounded queue.
    """

    tokens_per_s: float
    slots: int
    slowdown: float
    prefill_tokens_per_s: float
    kv_tokens: int
    max_queued: int | None = None

    def prefill_s(self, tokens: int) -> float:
        """Seconds that the prompt of a sequence takes when it runs alone."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0

    def decode_s(self, tokens: int) -> float:
        """Seconds that the completion of a sequence takes when it runs alone."""
        return tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    def speed(self, batch: int) -> float:
        """The share of its lone pace that each of ``batch`` running sequences keeps: above 0, at most 1."""
        return 1.0 / (1.0 + self.slowdown * max(0, batch - 1) / self.slots)


@dataclass(frozen=True, slots=True)
class Sequence:
    """One prompt and how many tokens will be decoded for it."""

    key: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that ended, and the exact times at which it entered and left the batch."""

    sequence: Sequence
    started_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class _Running:
    sequence: Sequence
    started_s: float
    started_v: float  # virtual time of its start
    prefilled_v: float  # virtual time at which its prompt is done
    finished_v: float


class Batch:
    """The state of one engine: what runs, what waits, and how far each has come.

    Every method that takes ``now_s`` first moves the model there; what finished on the way is kept and handed
    out by the next ``advance``.
    """

    def __init__(self, pace: Pace, *, now_s: float = 0.0) -> None:
        self._pace = pace
        self._now_s = now_s
        self._virtual_s = 0.0
        self._factor = 1.0
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: dict[int, _Running] = {}
        self._ends: list[
            tuple[float, int, int]
        ] = []  # (virtual finish, order of start, key); aborted ones stay
        self._starts = 0
        self._finished: list[Finished] = []
        self._reserved_tokens = 0
        self._past_prompt_tokens = 0  # of sequences that have left the batch
        self._past_generated_tokens = 0
        self.max_running_seen = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_prompt_tokens(self) -> int:
        return sum(sequence.prompt_tokens for sequence in self._waiting.values())

    @property
    def held_tokens(self) -> int:
        """KV tokens in use: the prompts of the running sequences and what they have decoded so far."""
        return sum(run.sequence.prompt_tokens + self._generated(run) for run in self._running.values())

    @property
    def prompt_tokens_total(self) -> int:
        """Prompt tokens whose prefill is complete, of all sequences ever; a prompt counts at once or not at
        all.
        """
        prefilled = (run for run in self._running.values() if self._virtual_s >= run.prefilled_v)
        return self._past_prompt_tokens + sum(run.sequence.prompt_tokens for run in prefilled)

    @property
    def generation_tokens_total(self) -> int:
        """Tokens decoded, of all sequences ever, aborted ones included."""
        return self._past_generated_tokens + sum(map(self._generated, self._running.values()))

    @property
    def tokens_per_s_now(self) -> float:
        """Tokens decoded per second at this moment by all sequences that are past their prefill."""
        decoding = sum(self._virtual_s >= run.prefilled_v for run in self._running.values())
        return decoding * self._pace.tokens_per_s * self._speed()

    def has_room(self, sequences: int) -> bool:
        """Whether that many more could be taken in now, running or waiting.

        Free slots count as room even where the KV cache is what a sequence would have to wait for.
        """
        if self._pace.max_queued is None:
            return True
        free = 0 if self._waiting else max(0, self._pace.slots - len(self._running))
        return len(self._waiting) + sequences <= self._pace.max_queued + free

    def submit(self, sequence: Sequence, now_s: float) -> None:
        """Take a sequence in. Raises QueueFullError, changing nothing, when it would have to wait and may
        not.
        """
        self._move(now_s)
        if not self.has_room(1):
            raise QueueFullError
        self._waiting[sequence.key] = sequence
        self._start_waiting()

    def abort(self, key: int, now_s: float) -> bool:
        """Take a sequence out, waiting or running; its tokens stay counted. False when it is not here."""
        self._move(now_s)
        if self._waiting.pop(key, None) is not None:
            self._start_waiting()  # it may have been the large one that kept the queue from moving
            return True
        run = self._running.get(key)
        if run is None:
            return False
        self._leave(run, self._generated(run))
        self._start_waiting()
        return True

    def set_factor(self, factor: float, now_s: float) -> None:
        """Make everything ``factor`` times as fast from now on; 0 stands still, and finishes nothing."""
        self._move(now_s)
        self._factor = factor

    def advance(self, now_s: float) -> list[Finished]:
        """Move to ``now_s`` and hand out, in the order of their finish, the sequences that ended since last
        asked.
        """
        self._move(now_s)
        finished, self._finished = self._finished, []
        return finished

    def next_event_s(self) -> float | None:
        """When the next sequence finishes if nothing changes; None when none will."""
        if self._finished:
            return self._now_s
        return self._next_finish_s()

    def _move(self, now_s: float) -> None:
        while (event_s := self._next_finish_s()) is not None and event_s <= now_s:
            self._finish_next(event_s)
        if now_s > self._now_s:
            self._virtual_s += (now_s - self._now_s) * self._speed()
            self._now_s = now_s

    def _finish_next(self, event_s: float) -> None:
        end_v, _, key = heapq.heappop(self._ends)
        run = self._running[key]
        self._virtual_s = max(self._virtual_s, end_v)  # exactly, so that rounding does not add up
        self._now_s = max(self._now_s, event_s)
        self._leave(run, run.sequence.completion_tokens)
        self._finished.append(Finished(run.sequence, run.started_s, self._now_s))
        self._start_waiting()

    def _leave(self, run: _Running, generated_tokens: int) -> None:
        del self._running[run.sequence.key]
        self._reserved_tokens -= run.sequence.tokens
        self._past_generated_tokens += generated_tokens
        if self._virtual_s >= run.prefilled_v:
            self._past_prompt_tokens += run.sequence.prompt_tokens

    def _start_waiting(self) -> None:
        while self._waiting and self._can_start(next(iter(self._waiting.values()))):
            self._start(self._waiting.popitem(last=False)[1])

    def _can_start(self, sequence: Sequence) -> bool:
        if not self._running:
            return True
        fits = self._reserved_tokens + sequence.tokens <= self._pace.kv_tokens
        return fits and len(self._running) < self._pace.slots

    def _start(self, sequence: Sequence) -> None:
        prefilled_v = self._virtual_s + self._pace.prefill_s(sequence.prompt_tokens)
        finished_v = prefilled_v + self._pace.decode_s(sequence.completion_tokens)
        self._running[sequence.key] = _Running(
            sequence, self._now_s, self._virtual_s, prefilled_v, finished_v
        )
        self._starts += 1
        heapq.heappush(self._ends, (finished_v, self._starts, sequence.key))
        self._reserved_tokens += sequence.tokens
        self.max_running_seen = max(self.max_running_seen, len(self._running))

    def _generated(self, run: _Running) -> int:
        decoded = math.floor((self._virtual_s - run.prefilled_v) * self._pace.tokens_per_s)
        return min(max(decoded, 0), run.sequence.completion_tokens)

    def _speed(self) -> float:
        return self._factor * self._pace.speed(len(self._running))

    def _next_finish_s(self) -> float | None:
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        speed = self._speed()
        if not self._ends or speed <= 0.0:
            return None
        return self._now_s + max(0.0, self._ends[0][0] - self._virtual_s) / speed
