"""What a test may ask a simulated engine about its past: every request it got, and what became of each.

Belongs here: counting and remembering, bounded. Does not belong here: anything that an engine tells its
clients.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["open", "answered", "cut", "reset", "aborted"]


@dataclass(slots=True)
class RequestRecord:
    """One request. ``status`` None until an answer began; ``prompt`` is the head of its last prompt.

    ``outcome``: open while there is no answer; answered; cut in the middle of the body; reset before any
    byte; aborted, when the client went before the answer.
    """

    number: int
    method: str
    path: str
    request_id: str
    prompt: str
    body_sha256: str
    status: int | None = None
    outcome: Outcome = "open"


@dataclass(slots=True)
class Stats:
    """Counters since the start, and the latest inference requests. Requests to the control pages do not
    count.
    """

    remembered: int
    requests: int = 0
    by_path: Counter[str] = field(default_factory=Counter)
    by_status: Counter[int] = field(default_factory=Counter)
    aborted: int = 0
    rejected: int = 0
    connections: int = 0
    connections_total: int = 0
    last_authorization_sha256: str | None = None
    """SHA-256 (hex) of the last Authorization header's value; None when the last request had none."""
    log: deque[RequestRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.log = deque(maxlen=self.remembered)

    def receive(self, method: str, path: str, headers: dict[bytes, bytes], body: bytes) -> RequestRecord:
        """Count a request. It is remembered only once ``remember`` is called with what this returns."""
        self.requests += 1
        self.by_path[path] += 1
        sent = headers.get(b"authorization")
        self.last_authorization_sha256 = None if sent is None else hashlib.sha256(sent).hexdigest()
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        digest = hashlib.sha256(body).hexdigest() if body else ""
        return RequestRecord(self.requests, method, path, request_id, "", digest)

    def remember(self, record: RequestRecord, prompt: str) -> None:
        record.prompt = prompt
        self.log.append(record)

    def answered(self, record: RequestRecord, status: int, outcome: Outcome) -> None:
        record.status = status
        record.outcome = outcome
        self.by_status[status] += 1

    def gone(self, record: RequestRecord) -> None:
        """The client left before its answer."""
        record.outcome = "aborted"
        self.aborted += 1

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {
            "requests": self.requests,
            "by_path": dict(self.by_path),
            "by_status": {str(status): count for status, count in sorted(self.by_status.items())},
            "aborted": self.aborted,
            "rejected": self.rejected,
            "connections": self.connections,
            "connections_total": self.connections_total,
            "last_authorization_sha256": self.last_authorization_sha256,
            "log": [asdict(record) for record in self.log],
        }
