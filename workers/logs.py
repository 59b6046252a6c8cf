"""One way of logging for all services: structlog, key=value for people, JSON lines where asked.

Never a prompt, a body or a key: log statuses, sizes and ids.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from workers.legible import legible, legible_lines


def configure(*, level: str = "info", form: Literal["text", "json"] = "text") -> None:
    """Set up logging to standard error, once, at a process's start."""
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.JSONRenderer()]
        if form == "json"
        else [
            _without_what_acts,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The pretty ones show local variables: bodies and keys.
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Never below warnings: at debug level RQ logs results, and clients of object stores headers and bodies.
    libraries = max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()])
    logging.basicConfig(stream=sys.stderr, level=libraries)
    for name in ("rq.worker", "rq.job", "rq.queue", "rq.registry"):
        logging.getLogger(name).setLevel(libraries)  # RQ sets its own to info when it is imported


def _without_what_acts(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Show text that others wrote as it is, not as a terminal would take it. JSON needs no such care."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = legible_lines(value) if name == "exception" else legible(value)
    return event
