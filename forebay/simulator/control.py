"""The pages below ``/_control/``, by which a test steers an engine in another process and looks into it.

Belongs here: their three requests. They need no key, count in no statistic, and no fault applies to them,
except a closed listener.

- ``POST /_control/fault`` with a fault's JSON sets it: ``{"number": 3}``; 422 when it is none.
- ``DELETE /_control/fault`` clears all, ``?number=3`` one: ``{"cleared": 1}``.
- ``GET /_control/state``: settings, true load, statistics, faults.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from pydantic import ValidationError

from forebay.simulator.faults import parse_fault
from forebay.simulator.reply import Reply, json_reply

if TYPE_CHECKING:
    from forebay.simulator.connection import Request
    from forebay.simulator.engine import Engine

PREFIX = "/_control/"
FAULT_PATH = "/_control/fault"
STATE_PATH = "/_control/state"


def control_reply(engine: Engine, request: Request) -> Reply:
    """Do what a control request asks."""
    match request.method, request.path:
        case "POST", "/_control/fault":
            return _set_fault(engine, request.body)
        case "DELETE", "/_control/fault":
            return _clear_faults(engine, request.query)
        case "GET", "/_control/state":
            return json_reply(200, engine_state(engine))
        case _:
            return json_reply(404, {"detail": "Not Found"})


def engine_state(engine: Engine) -> dict[str, Any]:
    """What ``GET /_control/state`` tells; the key is left out of the settings."""
    load = engine.true_load()
    return {
        "name": engine.settings.name,
        "settings": engine.settings.model_dump(mode="json", exclude={"api_key"}),
        "running": load.running,
        "waiting": load.waiting,
        "max_running_seen": engine.max_running_seen,
        "load": asdict(load),
        "stats": engine.stats.as_dict(),
        "faults": [
            {"number": entry.number, "hits": entry.hits, "fault": entry.fault.model_dump(mode="json")}
            for entry in engine.fault_entries()
        ],
    }


def _set_fault(engine: Engine, body: bytes) -> Reply:
    try:
        fault = parse_fault(body)
    except ValidationError as error:
        return json_reply(422, {"detail": error.errors(include_url=False, include_context=False)})
    return json_reply(200, {"number": engine.set_fault(fault)})


def _clear_faults(engine: Engine, query: str) -> Reply:
    numbers = parse_qs(query).get("number")
    if numbers is not None and not numbers[0].isdecimal():
        return json_reply(422, {"detail": "number must be a number"})
    return json_reply(200, {"cleared": engine.clear_faults(int(numbers[0]) if numbers else None)})
