"""What is answered in place of the truth, for the faults that answer at all.

Belongs here: a fault, how often it was met, and the runtime's words, to a reply. Pure. Does not belong here:
faults that are played on the connection or on the engine as a whole (``engine``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.simulator.dialect import empty_reply
from forebay.simulator.faults import AlternateFault, AnswerFault, BaseFault, OddBodyFault
from forebay.simulator.reply import JSON, Reply, json_reply

if TYPE_CHECKING:
    from forebay.simulator.dialect import Dialect

_HTML = b"<html><body><h1>Welcome</h1></body></html>"
_BROKEN_JSON = b'{"id":"chatcmpl-1","choices":[{"index":0,'


def fault_reply(fault: BaseFault, hits: int, dialect: Dialect) -> Reply | None:
    """The answer to the ``hits``-th request (from 1) that met the fault; None when it is to be served after
    all.
    """
    match fault:
        case AnswerFault():
            return _told(fault, dialect)
        case AlternateFault(statuses=statuses):
            status = statuses[(hits - 1) % len(statuses)]
            return None if status == 200 else simulated_error(status, dialect)
        case OddBodyFault():
            return _odd_body(fault)
        case _:
            return None


def simulated_error(status: int, dialect: Dialect) -> Reply:
    """An error in the runtime's shape that says what it is."""
    return dialect.error(status, "SimulatedFault", f"Simulated fault: status {status}.")


def _told(fault: AnswerFault, dialect: Dialect) -> Reply:
    reply = _told_body(fault, dialect)
    if fault.retry_after is None:
        return reply
    header = (b"retry-after", fault.retry_after.encode("latin-1"))
    return Reply(reply.status, reply.body, reply.content_type, (header,))


def _told_body(fault: AnswerFault, dialect: Dialect) -> Reply:
    if fault.body is not None:
        return Reply(fault.status, fault.body.encode(), fault.content_type.encode())
    if fault.queue_full:
        return dialect.queue_full(fault.status)
    return simulated_error(fault.status, dialect)


def _odd_body(fault: OddBodyFault) -> Reply:
    match fault.form:
        case "empty":
            return empty_reply(fault.status)
        case "html":
            return Reply(fault.status, _HTML, b"text/html; charset=utf-8")
        case "invalid_json":
            return Reply(fault.status, _BROKEN_JSON, JSON)
        case "error_object":
            error = {"message": "Simulated error inside an answer.", "type": "BadRequestError", "code": 400}
            return json_reply(fault.status, {"error": error})
