"""Ctrl-C and its kin, made into two wishes: stop in order, then stop at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While it is open, the first signal raises KeyboardInterrupt and every later one calls ``on_hurry``.

    So an orderly end, which takes a moment, is not torn apart by a second Ctrl-C. What was to be ignored, as
    the hang-up is under nohup, is ignored still. Main thread only.
    """

    def __init__(self) -> None:
        self.on_hurry: Callable[[], object] = lambda: None
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            raise KeyboardInterrupt
        self.on_hurry()
