"""A worker's key: read from the environment variable that its record names, sent to that worker only.

The key itself is never stored, logged or put into a reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from monitor.http import Target
from workers.errors import GiveUp
from workers.fleet import WorkerView


class MissingKeyError(GiveUp):
    """The variable that the worker's record names is not set in this process' environment."""


def target_of(view: WorkerView, environ: Mapping[str, str]) -> Target:
    """Where to ask and as whom. Raises MissingKeyError, whose text is fit for people."""
    if view.api_key_env is None:
        return Target(view.url)
    key = environ.get(view.api_key_env, "").strip()
    if not key:
        raise MissingKeyError(f"environment variable {view.api_key_env} is not set for the monitor")
    return Target(view.url, key)
