"""Strategies: what is weighed how, and who picks. They are data, read from configuration and checked here.

The scorers and pickers they name stand in ``scorers`` and ``pickers``; chat, batch and long-context
differ only in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dispatcher.scheduler.pickers import PICKERS, Picker
from dispatcher.scheduler.scorers import SCORERS, Scorer
from workers.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dispatcher.scheduler.question import Need

Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
"""Bounded, so that no sum of weights is infinite: every share would be 0 then."""
LONG_CONTEXT = "long-context"


class StrategySpec(BaseModel):
    """One strategy as configuration says it. A scorer without a weight counts for nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: dict[str, Weight]
    picker: str = "max-score"
    temperature: float = Field(
        default=0.1, gt=0, allow_inf_nan=False, description="softmax only: how much chance decides"
    )

    @field_validator("weights")
    @classmethod
    def _weighs_known_scorers(cls, weights: dict[str, float]) -> dict[str, float]:
        unknown = sorted(weights.keys() - SCORERS.keys())
        if unknown:
            raise ValueError(f"no scorer is named {', '.join(unknown)}; there are {', '.join(SCORERS)}")
        if not sum(weights.values()):
            raise ValueError("at least one scorer needs a weight above 0")
        return weights

    @field_validator("picker")
    @classmethod
    def _picker_is_known(cls, picker: str) -> str:
        if picker not in PICKERS:
            raise ValueError(f"no picker is named {picker}; there are {', '.join(PICKERS)}")
        return picker


def _spec(picker: str, **weights: float) -> StrategySpec:
    return StrategySpec(weights=weights, picker=picker)


DEFAULTS = {
    "chat": _spec("p2c", queue=3, kv=2, inflight=2, load=2, weight=1, session=3),
    "batch": _spec("max-score", queue=1, kv=1, inflight=3, load=3, speed=8, weight=1, session=1),
    LONG_CONTEXT: _spec("max-score", queue=2, kv=4, inflight=1, load=3, speed=4, weight=1, session=0),
}


class SchedulerPolicy(BaseModel):
    """All that can be set about decisions. Strategies given here stand beside the defaults, or replace
    them by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategies: dict[str, StrategySpec] = Field(default_factory=dict)
    default_strategy: str = "batch"
    long_context_tokens: int = Field(
        default=8192, gt=0, description="a request that costs more is placed by long-context, always"
    )
    kv_ceiling: float = Field(
        default=0.9, gt=0, le=1, description="KV usage from which on a worker is a last resort"
    )
    stale_after_s: float = Field(default=3.0, gt=0, description="age from which on a load fades")
    dead_after_s: float = Field(default=10.0, gt=0, description="age at which a load is unknown")
    keep: int = Field(default=4, ge=1, description="how many candidates one acquire may try")

    @field_validator("strategies")
    @classmethod
    def _stand_beside_the_defaults(cls, given: dict[str, StrategySpec]) -> dict[str, StrategySpec]:
        return DEFAULTS | given

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> SchedulerPolicy:
        if self.default_strategy not in (names := DEFAULTS | self.strategies):
            raise ValueError(f"no strategy is named {self.default_strategy}; there are {', '.join(names)}")
        if self.dead_after_s <= self.stale_after_s:
            raise ValueError("dead_after_s must be above stale_after_s")
        return self


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy ready for use. ``shares``: scorers that count, each with its part of the total; they sum
    to 1.
    """

    name: str
    shares: tuple[tuple[Scorer, float], ...]
    picker_name: str
    picker: Picker
    kv_ceiling: float
    keep: int

    @classmethod
    def of(cls, name: str, spec: StrategySpec, *, kv_ceiling: float = 0.9, keep: int = 4) -> Strategy:
        total = sum(spec.weights.values())
        shares = tuple(
            (scorer, spec.weights[scorer.name] / total)
            for scorer in SCORERS.values()
            if spec.weights.get(scorer.name)
        )
        return cls(name, shares, spec.picker, PICKERS[spec.picker](spec.temperature), kv_ceiling, keep)


class Strategies:
    """The strategies of one policy, and which of them a request goes by."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy
        self._strategies: Mapping[str, Strategy] = {
            name: Strategy.of(name, spec, kv_ceiling=policy.kv_ceiling, keep=policy.keep)
            for name, spec in (DEFAULTS | policy.strategies).items()
        }

    def for_request(self, need: Need) -> Strategy:
        """Long-context for whatever is long; else the one that the request names, else the default.

        Raises SettingsError when the request names one that is not configured.
        """
        if need.cost_tokens > self._policy.long_context_tokens:
            return self._strategies[LONG_CONTEXT]
        name = need.strategy or self._policy.default_strategy
        try:
            return self._strategies[name]
        except KeyError:
            known = ", ".join(self._strategies)
            raise SettingsError(f"no strategy is named {name}; there are {known}") from None
