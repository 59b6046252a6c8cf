"""The fleets that a batch runs on, what goes wrong with them, and how soon the batch could end all the same.

Belongs here: facts about a scenario, pure. Does not belong here: its requests (``workload``), or making it
happen (``engines``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench_fleet import MIXED, SIGMA, Engine, lower_bound_s
from trouble import Trouble, remaining_bound_s

from forebay.simulator.faults import (
    AnswerFault,
    BaseFault,
    BrokenMetricsFault,
    LoadsFault,
    SlowFault,
)

EQUAL = (Engine(200, 16), Engine(200, 16, "sglang"), Engine(200, 16), Engine(200, 16, "sglang"))
MIDDLE, LARGEST = 2, 3
"""Places in ``MIXED`` of the worker of speed 2 and of the one of speed 4."""
PREFILL = 25.0
"""How many times as fast an engine reads as it writes, where prompts take time at all."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of run. ``what`` completes the sentence "The batch runs on ...".

    ``place`` is the engine in trouble: it is killed, or its ``faults`` set, a third of the lower bound after
    the first request, or before it when ``from_start``. ``lost``: it does no work from then on. ``prefixes``:
    how many long beginnings the prompts share; ``over_long``: how many prompts that fit no engine come first.
    ``interactive``: the share of all capacity that other traffic uses. ``timeout_s``: how long a client waits
    for one answer.
    """

    what: str
    engines: tuple[Engine, ...] = MIXED
    sigma: float = SIGMA
    most: int = 2048
    place: int | None = None
    kills: bool = False
    faults: tuple[BaseFault, ...] = ()
    from_start: bool = False
    lost: bool = False
    prefixes: int = 0
    over_long: int = 0
    interactive: float = 0.0
    timeout_s: float = 600.0

    @property
    def capacity(self) -> float:
        """Tokens per second of all engines."""
        return sum(engine.capacity for engine in self.engines)

    def trouble_after_s(self, tokens: Sequence[int]) -> float:
        """From the first request to the trouble."""
        return 0.0 if self.from_start else lower_bound_s(tokens, self.engines) / 3

    def bound_s(self, tokens: Sequence[int]) -> float:
        """When the capacity that is left could end the work. ``tokens``: of each answer that can be given.

        Prompts are not counted, even where engines take time to read them.
        """
        if self.lost:
            trouble = Trouble(killed=self.place)
            return remaining_bound_s(tokens, self.engines, trouble, self.trouble_after_s(tokens))
        left = self.capacity * (1 - self.interactive)
        return max(lower_bound_s(tokens, self.engines), sum(tokens) / left)


def _full(status: int) -> tuple[BaseFault, ...]:
    return (AnswerFault(status=status, queue_full=True),)


SCENARIOS: dict[str, Scenario] = {
    "mixed": Scenario("four engines of speed 1, 1, 2, 4 with 8, 8, 16, 32 slots"),
    "equal": Scenario("four engines of speed 2 with 16 slots each", engines=EQUAL),
    "skewed": Scenario(
        "the mixed fleet; a few answers are very long (lognormal, sigma 1.4, up to 4096 tokens)",
        sigma=1.4,
        most=4096,
    ),
    "prefixes": Scenario(
        "the mixed fleet; prompts share 32 beginnings of 1,500 tokens, which an engine keeps in its cache "
        f"once read, and engines read {PREFILL:g} times as fast as they write",
        prefixes=32,
    ),
    "killed": Scenario(
        "the mixed fleet; the worker of speed 2 is killed a third in",
        place=MIDDLE,
        kills=True,
        lost=True,
    ),
    "queue-full": Scenario(
        "the mixed fleet; from a third in the worker of speed 2 answers 503, its queue is full",
        place=MIDDLE,
        faults=_full(503),
        lost=True,
    ),
    "429": Scenario(
        "the mixed fleet; from a third in the worker of speed 2 answers 429, without Retry-After",
        place=MIDDLE,
        faults=_full(429),
        lost=True,
    ),
    "over-long": Scenario("the mixed fleet; sixty prompts that fit no engine come first", over_long=60),
    "hangs": Scenario(
        "the mixed fleet; from a third in the worker of speed 2 takes requests and finishes none, while its "
        "health page says 200; clients wait 30 s for an answer",
        place=MIDDLE,
        faults=(SlowFault(factor=0.0),),
        lost=True,
        timeout_s=30.0,
    ),
    "telemetry": Scenario(
        "the mixed fleet; the largest worker's load and metrics pages answer errors",
        place=LARGEST,
        faults=(BrokenMetricsFault(), LoadsFault(served=False)),
        from_start=True,
    ),
    "interactive": Scenario(
        "the mixed fleet, half of whose capacity interactive traffic uses, sent to the engines themselves; "
        "*no batch* is that traffic alone",
        interactive=0.5,
    ),
}
DEFAULT = "mixed"
