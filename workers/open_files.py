"""How many files and connections a service may have open: as many as the system lets it."""

from __future__ import annotations

import contextlib
import resource


def allow_open_files() -> None:
    """Raise this process' own limit to what it is allowed. 1,024 is a usual one, and each request in flight
    is a connection.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
