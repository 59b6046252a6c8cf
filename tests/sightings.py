"""An attempt as a dispatcher's recorder sees it: everything sensible unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from dispatcher.outcome import Label
from dispatcher.records import Sighting
from dispatcher.scheduler.question import Need
from workers.breaker import Verdict


def sighting(at_s: float, **changes: Any) -> Sighting:
    """The first attempt of request r1, line c1 of batch_1, that was answered after half a second."""
    plain: dict[str, Any] = {
        "request_id": "r1",
        "custom_id": "c1",
        "batch_id": "batch_1",
        "attempt": 1,
        "decision": None,
        "need": Need("m", 10, 20, 30),
        "urgency": 1,
        "answer_tokens": 5,
        "sample": 1.0,
        "worker": "a:1",
        "granted_s": at_s,
        "waited_s": 0.0,
        "outcome": Label.OK,
        "verdict": Verdict.SUCCESS,
        "elapsed_s": 0.5,
    }
    return Sighting(**(plain | changes))
