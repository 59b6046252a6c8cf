"""What a decision is asked: one request's needs, and the question as filters and scorers see it.

How the fleet stands belongs to ``fleet``; what is answered, to ``decision``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dispatcher.scheduler.fleet import FleetModel

Column: TypeAlias = npt.NDArray[np.float64]
"""One number per worker of the fleet, in the order of ``FleetModel.ids``; NaN is unknown."""
Mask: TypeAlias = npt.NDArray[np.bool_]
"""One yes or no per worker of the fleet, in the same order."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one request needs of a worker."""

    model: str | None
    """None: any worker will do."""
    prompt_tokens: int
    """Estimated."""
    asked_tokens: int | None
    """The ceiling of the answer (``max_tokens``); None: the request names none."""
    cost_tokens: int
    """Estimated tokens of the whole exchange: what a lease for it is charged."""
    strategy: str | None = None
    """A strategy's name; None: the policy's default."""
    session_key: str | None = None
    prefix_key: str | None = None
    """Requests that share it begin alike; stands in for a missing session key."""
    tried: frozenset[str] = frozenset()
    """Ids of workers that this request already failed on."""

    @property
    def context_tokens(self) -> int:
        """The context that prompt and answer may fill together."""
        return self.prompt_tokens + (self.asked_tokens or 0)

    @property
    def answer_tokens(self) -> int:
        """What the answer may have: the ceiling, else what the plan expects."""
        return self.asked_tokens or max(1, self.cost_tokens - self.prompt_tokens)

    @property
    def affinity_key(self) -> str | None:
        """What ties the request to a worker's caches; None: nothing does."""
        return self.session_key if self.session_key is not None else self.prefix_key


@dataclass(slots=True)
class Question:
    """One decision in the making. Filters narrow ``candidates`` in their order; scorers only read it."""

    need: Need
    fleet: FleetModel
    now_s: float
    candidates: Mask
