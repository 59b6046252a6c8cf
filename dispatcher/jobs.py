"""The functions that queued jobs name. Their dotted paths are wire format and never move.

Only a dispatcher runs them, by its own table (`dispatcher.running`): a job that names anything else is moved
to failed. Here they exist so that plain RQ code can enqueue them by name; run by a stock RQ worker they fail
and say why.
"""

from __future__ import annotations

from typing import Any, Never

RUN_SHARD = "dispatcher.jobs.run_shard"
RUN_REQUEST = "dispatcher.jobs.run_request"
FINALISE_BATCH = "dispatcher.jobs.finalise_batch"


def run_shard(batch_id: str, shard: int) -> Never:
    """Answer the lines of one shard of a batch."""
    _only_a_dispatcher_runs_this(RUN_SHARD, batch_id, shard)


def run_request(
    body: dict[str, Any], *, url: str = "/v1/chat/completions", timeout_s: float | None = None
) -> Never:
    """Send one inline request; its RQ result is ``{"status_code", "body", "forebay"}``.

    ``body`` is the JSON body of the request; ``url`` one of the allowed paths; ``timeout_s`` the time it may
    take all in all, counted from when it was queued last; None: the dispatcher's default, counted from when a
    dispatcher takes it.
    """
    _only_a_dispatcher_runs_this(RUN_REQUEST, body, url, timeout_s)


def finalise_batch(batch_id: str) -> Never:
    """Write a batch's output and error files from its durable parts."""
    _only_a_dispatcher_runs_this(FINALISE_BATCH, batch_id)


def _only_a_dispatcher_runs_this(name: str, *_: object) -> Never:
    raise RuntimeError(f"{name} is run by `forebay dispatcher`, not by a stock RQ worker")
