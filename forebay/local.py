"""The services on this machine, as child processes: an embedded server unless a Redis is given, a monitor,
dispatchers. Started together, watched, ended in order. What they do is their own subject.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from forebay.children import Child, end_all, start_child
from forebay.embedded import EmbeddedServer

_NOT_FOR_SEVERAL = ("FOREBAY_NAME", "FOREBAY_METRICS_PORT")
"""Settings that no two services on one machine can share."""
_MONITOR_GRACE_S = 5.0
DRAIN_S = 3.0
"""How long a dispatcher may go on with what is in flight when a run is stopped."""
_DISPATCHER_GRACE_S = DRAIN_S + 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """``redis_url`` None: embedded. ``queues`` None: the dispatchers' default. ``monitor`` False: none is
    started before it is asked for.
    """

    redis_url: str | None
    storage: str
    logs: Path
    dispatchers: int = 1
    monitor: bool = True
    queues: Sequence[str] | None = None


class LocalServices:
    """Running services. As a context manager they are ended at the end; nothing of them is left behind."""

    def __init__(self, settings: LocalSettings) -> None:
        """Start them; from the main thread only. Raises NoServer, ChildDied."""
        self._settings = settings
        self._server: EmbeddedServer | None = None
        self._monitor: Child | None = None
        self._dispatchers: list[Child] = []
        self._hurry = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        if self._settings.redis_url is None:
            self._server = EmbeddedServer(self._settings.logs / "valkey.log")
        if self._settings.monitor:
            self.start_monitor()
        for number in range(1, self._settings.dispatchers + 1):
            suffix = f"-{number}" if self._settings.dispatchers > 1 else ""
            self._dispatchers.append(self._service("dispatcher", f"dispatcher{suffix}"))

    def start_monitor(self) -> None:
        """Start one, unless there is one. Raises ChildDied."""
        if self._monitor is None:
            self._monitor = self._service("monitor", "monitor")

    @property
    def monitored(self) -> bool:
        """Whether a monitor is among them."""
        return self._monitor is not None

    def _service(self, module: str, name: str) -> Child:
        return start_child(
            name,
            [sys.executable, "-m", module],
            log=self._settings.logs / f"{name}.log",
            environment=self._environment(),
        )

    def _environment(self) -> Mapping[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_SEVERAL}
        own = {
            "FOREBAY_REDIS_URL": self.redis_url,
            "FOREBAY_STORAGE": self._settings.storage,
            "FOREBAY_DRAIN_TIMEOUT_S": str(DRAIN_S),
            "FOREBAY_METRICS_PORT": "none",  # what a file asks for may be another service's
        }
        if self._settings.queues is not None:
            own["FOREBAY_QUEUES"] = _as_json(self._settings.queues)
        return {"FOREBAY_EXPLAIN_SAMPLE": "1"} | inherited | own

    @property
    def redis_url(self) -> str:
        """Where the services' Redis is."""
        if self._server is not None:
            return self._server.url
        assert self._settings.redis_url is not None, "a Redis is given or embedded"
        return self._settings.redis_url

    def check(self) -> None:
        """Raise ChildDied when one of them has ended."""
        server = [self._server.child] if self._server else []
        for child in (*server, *([self._monitor] if self._monitor else []), *self._dispatchers):
            child.check()

    def hurry(self) -> None:
        """Do not wait for what is in flight. May be called while ``close`` waits."""
        self._hurry = True
        for child in self._dispatchers:
            child.strike()

    def drain(self) -> None:
        """End the dispatchers, who store what is in flight first. Doing it twice does nothing."""
        end_all(self._dispatchers, grace_s=0 if self._hurry else _DISPATCHER_GRACE_S)
        self._dispatchers = []

    def close(self) -> None:
        """End them in order: dispatchers, monitor, server. Doing it twice does nothing."""
        self.drain()
        if self._monitor is not None:
            end_all([self._monitor], grace_s=0 if self._hurry else _MONITOR_GRACE_S)
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_json(names: Sequence[str]) -> str:
    return msgspec.json.encode(list(names)).decode()
