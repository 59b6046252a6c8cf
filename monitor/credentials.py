"""Where to ask a worker, and as whom. Where the key comes from is ``workers.credentials``' subject."""

from __future__ import annotations

from collections.abc import Mapping

from monitor.http import Target
from workers.credentials import read_key
from workers.fleet import WorkerView


def target_of(view: WorkerView, environ: Mapping[str, str]) -> Target:
    """The worker with its key, which goes to its own URL only. Raises MissingKeyError."""
    return Target(view.url, read_key(view.api_key_env, view.api_key_file, environ))
