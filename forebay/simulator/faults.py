"""What can go wrong with a simulated engine, and which faults are at work at a given moment.

Belongs here: the kinds of fault (records that people write as JSON) and the board that counts them down. Does
not belong here: playing them. Faults that spoil single answers are played by ``engine`` on the request's
connection; faults of the whole engine are read from the board whenever load, listener or pace are asked for.

Pure: ``now_s`` comes in as an argument.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

if TYPE_CHECKING:
    from collections.abc import Iterator

INFERENCE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

Status = Annotated[int, Field(ge=200, le=599)]


class BaseFault(BaseModel):
    """When a fault is at work: from ``after_s`` seconds after it was set, for ``for_s`` seconds (None: until
    cleared).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    after_s: Annotated[float, Field(ge=0.0)] = 0.0
    for_s: Annotated[float, Field(gt=0.0)] | None = None


class RequestFault(BaseFault):
    """A fault that spoils single requests: those on ``paths``, at most ``requests`` of them (None: all)."""

    paths: tuple[str, ...] = INFERENCE_PATHS
    requests: Annotated[int, Field(ge=1)] | None = None


class AnswerFault(RequestFault):
    """Answer ``status``, ``delay_s`` seconds after the request came. ``body`` None: an error in the runtime's
    shape, or its words for a full queue.
    """

    kind: Literal["answer"] = "answer"
    status: Status = 500
    delay_s: Annotated[float, Field(ge=0.0)] = 0.0
    retry_after: str | None = None
    """Value of a Retry-After header, sent as it is written; None sends no such header, as both runtimes do.
    """
    body: str | None = None
    content_type: str = "application/json"
    queue_full: bool = False
    """Use the runtime's own words for a full queue; its status is ``status`` all the same."""


class AlternateFault(RequestFault):
    """Answer the statuses in turn, for ever; at 200 the request is served as if there were no fault."""

    kind: Literal["alternate"] = "alternate"
    statuses: Annotated[tuple[Status, ...], Field(min_length=1)] = (500, 200)


class ResetFault(RequestFault):
    """Reset the connection once the request has been read, before any byte of an answer."""

    kind: Literal["reset"] = "reset"


class HangFault(RequestFault):
    """Read the request and never answer it; the connection stays open until the client gives up."""

    kind: Literal["hang"] = "hang"


class CutBodyFault(RequestFault):
    """Serve the request, then send the headers and half of the body, and reset the connection."""

    kind: Literal["cut_body"] = "cut_body"


class OddBodyFault(RequestFault):
    """Answer at once, by default with 200, with a body that is none of the API's."""

    kind: Literal["odd_body"] = "odd_body"
    form: Literal["empty", "html", "invalid_json", "error_object"] = "html"
    status: Status = 200


class RefuseFault(BaseFault):
    """Close the listener, so that connecting is refused, and open it again on the same port ``for_s`` seconds
    later.

    ``for_s`` must be given: while the listener is closed nobody can clear the fault over HTTP. Open
    connections are reset with it, running requests included, unless ``drop_open`` is false.
    """

    kind: Literal["refuse"] = "refuse"
    for_s: Annotated[float, Field(gt=0.0)]
    drop_open: bool = True


class FreezeFault(BaseFault):
    """Loads and metrics keep what they said at the fault's start, the per-rank sample time of SGLang
    included.
    """

    kind: Literal["freeze"] = "freeze"


class LoadsFault(BaseFault):
    """``/v1/loads`` is there (``served``) or answers 404, whatever the runtime does by itself.

    Served by vLLM it stands for an upgrade in place, and has the shape that SGLang gives it.
    """

    kind: Literal["loads"] = "loads"
    served: bool = False


class BrokenMetricsFault(BaseFault):
    """``/metrics`` answers ``status``."""

    kind: Literal["broken_metrics"] = "broken_metrics"
    status: Status = 500


class ZeroLoadFault(BaseFault):
    """Loads, metrics and ``/load`` say that nothing runs, waits or is held, whatever is true; counters stay
    honest.
    """

    kind: Literal["zero_load"] = "zero_load"


class SlowFault(BaseFault):
    """Everything takes ``1 / factor`` times as long; 0 stands still: taken in, running, never finished."""

    kind: Literal["slow"] = "slow"
    factor: Annotated[float, Field(ge=0.0)]


class ShutdownFault(BaseFault):
    """Behave as after SIGTERM: running requests go on.

    vLLM answers new ones 500 "cannot schedule new futures after shutdown" while /health stays 200; SGLang
    serves new ones while /health says 503.
    """

    kind: Literal["shutdown"] = "shutdown"


Fault = Annotated[
    AnswerFault
    | AlternateFault
    | ResetFault
    | HangFault
    | CutBodyFault
    | OddBodyFault
    | RefuseFault
    | FreezeFault
    | LoadsFault
    | BrokenMetricsFault
    | ZeroLoadFault
    | SlowFault
    | ShutdownFault,
    Field(discriminator="kind"),
]

StateFault = TypeVar("StateFault", bound=BaseFault)

_FAULT: TypeAdapter[Fault] = TypeAdapter(Fault)


def parse_fault(text: str | bytes) -> Fault:
    """A fault from its JSON. Raises pydantic.ValidationError when it is none."""
    return _FAULT.validate_json(text)


@dataclass(slots=True)
class SetFault:
    """A fault on the board; times are on the board's clock, ``ends_s`` None means until cleared."""

    number: int
    fault: Fault
    starts_s: float
    ends_s: float | None
    hits: int = field(default=0)

    def at_work(self, now_s: float) -> bool:
        return self.starts_s <= now_s and (self.ends_s is None or now_s < self.ends_s)


class FaultBoard:
    """The faults that have been set, in that order; the first that matches a request is the one it meets."""

    def __init__(self) -> None:
        self._set: dict[int, SetFault] = {}
        self._numbers = itertools.count(1)

    def add(self, fault: Fault, now_s: float) -> SetFault:
        starts_s = now_s + fault.after_s
        ends_s = None if fault.for_s is None else starts_s + fault.for_s
        entry = SetFault(next(self._numbers), fault, starts_s, ends_s)
        self._set[entry.number] = entry
        return entry

    def clear(self, number: int | None = None) -> int:
        """Drop one fault, or all (None). Returns how many were dropped."""
        numbers = list(self._set) if number is None else [number]
        return sum(self._set.pop(each, None) is not None for each in numbers)

    def entries(self) -> list[SetFault]:
        return list(self._set.values())

    def meet(self, path: str, now_s: float) -> SetFault | None:
        """The fault that a request on ``path`` meets now, counted as one hit; None when it meets none."""
        for entry in self._set.values():
            if _spoils(entry, path) and entry.at_work(now_s):
                entry.hits += 1
                return entry
        return None

    def first(self, kind: type[StateFault], now_s: float) -> StateFault | None:
        """The first fault of that kind that is at work now."""
        return next((each.fault for each in self._of(kind, now_s) if isinstance(each.fault, kind)), None)

    def numbers(self, kind: type[BaseFault], now_s: float) -> list[int]:
        """The numbers of all faults of that kind that are at work now."""
        return [each.number for each in self._of(kind, now_s)]

    def next_change_s(self, now_s: float) -> float | None:
        """When the next fault starts or ends by itself; None when none will."""
        bounds = (bound for each in self._set.values() for bound in (each.starts_s, each.ends_s))
        return min((bound for bound in bounds if bound is not None and bound > now_s), default=None)

    def _of(self, kind: type[BaseFault], now_s: float) -> Iterator[SetFault]:
        return (each for each in self._set.values() if isinstance(each.fault, kind) and each.at_work(now_s))


def _spoils(entry: SetFault, path: str) -> bool:
    fault = entry.fault
    if not isinstance(fault, RequestFault) or path not in fault.paths:
        return False
    return fault.requests is None or entry.hits < fault.requests
