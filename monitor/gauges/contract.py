"""What a metrics page has to say: the fields of a load, how each is made of its series, and what may miss.

Which metric carries a field, per runtime, belongs to ``mappings``; reading a page to ``page``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workers.errors import TryAgain


class Field(StrEnum):
    """A field that a metrics page can fill. The values are the names that configuration uses."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE = "kv_usage"
    USED_TOKENS = "used_tokens"
    CAPACITY_TOKENS = "capacity_tokens"
    GEN_THROUGHPUT = "gen_throughput"
    CACHE_HIT_RATE = "cache_hit_rate"
    MAX_RUNNING = "max_running"
    PROMPT_TOKENS_TOTAL = "prompt_tokens_total"
    GENERATION_TOKENS_TOTAL = "generation_tokens_total"
    SUCCESS_TOTAL = "success_total"
    STEPS_TOTAL = "steps_total"
    PROCESS_START_TIME = "process_start_time"
    CACHE_CONFIG = "cache_config"


COUNTS = (
    Field.RUNNING,
    Field.WAITING,
    Field.USED_TOKENS,
    Field.CAPACITY_TOKENS,
    Field.MAX_RUNNING,
    Field.PROMPT_TOKENS_TOTAL,
    Field.GENERATION_TOKENS_TOTAL,
    Field.SUCCESS_TOTAL,
    Field.STEPS_TOTAL,
)
"""Whole numbers, summed over ranks."""


@dataclass(frozen=True, slots=True)
class MetricMap:
    """Where one runtime keeps its metrics.

    ``path``: the page on the worker; None: the runtime has none. ``aliases`` gives, for each field, the
    metric names to look for; the first one present wins. A field without aliases is unknown. ``mandatory``
    fields must be on every page. ``live``: its count of generated tokens moves while answers are written;
    else it does only when one ends.
    """

    path: str | None
    aliases: Mapping[Field, tuple[str, ...]]
    mandatory: frozenset[Field]
    live: bool = False


class UnreadablePageError(TryAgain):
    """The page is cut off, or one of its wanted lines does not parse. Nothing of it may be used."""


class MissingMetricsError(TryAgain):
    """The page lacks mandatory metrics: routing there would be blind.

    ``names`` has the first alias of every missing one, in the order of the contract.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"the metrics page lacks {', '.join(names)}")
        self.names = tuple(names)
