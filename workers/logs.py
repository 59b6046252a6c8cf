"""One way of logging for all services: structlog, key=value for people, JSON lines where asked.

Never a prompt, a body or a key: log statuses, sizes and ids.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def configure(*, level: str = "info", form: Literal["text", "json"] = "text") -> None:
    """Set up logging to standard error, once, at a process's start."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    libraries = max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()])
    logging.basicConfig(stream=sys.stderr, level=libraries)
    for name in ("rq.worker", "rq.job", "rq.queue", "rq.registry"):
        logging.getLogger(name).setLevel(libraries)  # RQ sets its own to info when it is imported
