"""Fetch one worker's metrics page and make a load of it; every ending is a value.

What the page means belongs to ``page`` and ``reduce``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monitor import lenient
from monitor.gauges.contract import Field, MissingMetricsError, UnreadablePageError
from monitor.gauges.reduce import to_load
from monitor.http import Answer, NoAnswer, Silence, Target, get

if TYPE_CHECKING:
    import httpx

    from monitor.gauges.page import PageReader
    from workers.load import Load

ACCEPT = "text/plain; version=0.0.4"
"""Asked for OpenMetrics, prometheus_client >= 0.23 renames the metrics [prometheus/client_python#1177]."""


@dataclass(frozen=True, slots=True)
class Scraped:
    """A load, or why there is none. ``used`` tells which alias each field was found under.

    ``unreached``: there was no connection at all.
    """

    load: Load | None
    reason: str = ""
    used: Mapping[Field, str] | None = None
    unreached: bool = False


async def scrape(
    client: httpx.AsyncClient,
    target: Target,
    path: str,
    reader: PageReader,
    models: Collection[str],
    *,
    deadline: float,
    sent_s: float,
) -> Scraped:
    """Read the page once. A page without a stamp is as old as the question: ``sent_s``.

    ``deadline`` is on the loop's clock.
    """
    answer = await get(client, target, path, deadline=deadline, accept=ACCEPT)
    if isinstance(answer, NoAnswer):
        unreached = answer.silence is Silence.REFUSED
        return Scraped(None, f"metrics: {answer.reason}", unreached=unreached)
    return judge(answer, reader, models, sent_s=sent_s)


def judge(answer: Answer, reader: PageReader, models: Collection[str], *, sent_s: float) -> Scraped:
    """What a complete answer says."""
    if answer.status != 200:
        return Scraped(None, f"metrics: status {answer.status}")
    try:
        page = reader.read(answer.body.decode("utf-8", errors="replace"))
    except (MissingMetricsError, UnreadablePageError) as error:
        return Scraped(None, str(error))
    load = to_load(page, models, sampled_s=sent_s, received_s=sent_s)
    if load.process_start_time is None:
        load = load.model_copy(update={"process_start_time": _start_header(answer.headers)})
    return Scraped(load, used=page.used)


def _start_header(headers: Mapping[str, str]) -> float | None:
    # llama.cpp tells its start in a header instead of a metric.
    return lenient.digits(headers.get("process-start-time-unix"))
