"""One reading of one worker's load: the probe first, else the gauges, within one deadline.

What a reading leads to (memo, rates, limit) belongs to ``watch``; ``sweep`` reads the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from monitor.gauges.mappings import MappingOverride, mapping_for
from monitor.gauges.page import PageReader
from monitor.gauges.scrape import scrape
from monitor.probe import Form, Verdict, probe

if TYPE_CHECKING:
    import httpx

    from monitor.gauges.contract import Field, MetricMap
    from monitor.http import Target
    from monitor.probe import ProbeVerdict
    from workers.load import Load
    from workers.spec import Runtime

_PROBE_SHARE = 0.5
"""A probe that hangs leaves this part of the time to the gauges."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one poll learned. ``load`` None: nothing; ``reason`` says why.

    The load's stamps are on the clock of ``sent_s``. ``verdict`` None: the probe was left out, a memo stands.
    ``form`` is what to ask with next time; ``used`` names the metric each gauge was found under.
    """

    load: Load | None
    form: Form
    verdict: ProbeVerdict | None = None
    reason: str = ""
    page_reason: str = ""
    """The part of ``reason`` that is about the metrics page."""
    used: Mapping[Field, str] | None = None
    unreached: bool = False
    """There was no connection at all: the worker may be gone."""


class Gauges:
    """The metrics page of one worker's runtime; made once per incarnation, like its reader."""

    def __init__(
        self, runtime: Runtime | None, worker_id: str, overrides: Mapping[str, MappingOverride]
    ) -> None:
        self.runtime = runtime
        self._map: MetricMap | None = None if runtime is None else mapping_for(runtime, worker_id, overrides)
        self._reader = None if self._map is None else PageReader(self._map)

    @property
    def path(self) -> str | None:
        """The page's path; None: the runtime has no page, or is not known yet."""
        return None if self._map is None else self._map.path

    @property
    def live(self) -> bool:
        """Whether the page's count of generated tokens moves while answers are written."""
        return self._map is not None and self._map.live

    async def read(
        self,
        client: httpx.AsyncClient,
        target: Target,
        models: Collection[str],
        reading: Reading,
        *,
        deadline: float,
        sent_s: float,
    ) -> Reading:
        """``reading`` with what the page adds to it."""
        if self.path is None or self._reader is None:
            return replace(
                reading, reason=f"{reading.reason}; no metrics known for this runtime".lstrip("; ")
            )
        found = await scrape(
            client, target, self.path, self._reader, models, deadline=deadline, sent_s=sent_s
        )
        reason = "" if found.load is not None else f"{reading.reason}; {found.reason}".lstrip("; ")
        return replace(
            reading,
            load=found.load,
            reason=reason,
            page_reason=found.reason,
            used=found.used,
            unreached=found.unreached,
        )


async def read_load(
    client: httpx.AsyncClient,
    target: Target,
    gauges: Gauges,
    *,
    form: Form,
    memo: bool,
    models: Collection[str],
    deadline: float,
    sent_s: float,
) -> Reading:
    """Read a worker once. ``memo``: it is known to have no ``/v1/loads``, so that is not asked.

    ``deadline`` is on the loop's clock; ``sent_s`` is now, on the clock that the load shall be stamped with.
    """
    reading = Reading(None, form)
    if not memo:
        reading = await _probed(client, target, gauges, form, deadline=deadline, sent_s=sent_s)
        if reading.load is not None or reading.unreached:
            return reading
    return await gauges.read(client, target, models, reading, deadline=deadline, sent_s=sent_s)


async def _probed(
    client: httpx.AsyncClient, target: Target, gauges: Gauges, form: Form, *, deadline: float, sent_s: float
) -> Reading:
    now = asyncio.get_running_loop().time()
    share = 1.0 if gauges.path is None else _PROBE_SHARE
    probed = await probe(client, target, form, deadline=now + (deadline - now) * share, sent_s=sent_s)
    verdict = probed.verdict
    load = None if verdict.load is None else _rebased(verdict, verdict.load, sent_s)
    reason = "" if verdict.verdict is Verdict.AVAILABLE else f"/v1/loads: {verdict.reason}"
    return Reading(load, probed.form, verdict, reason, unreached=probed.unreached)


def _rebased(verdict: ProbeVerdict, load: Load, sent_s: float) -> Load:
    # Worker clocks are not ours: only the age of the sample, a difference on one clock, may be carried over.
    age_s = verdict.sample_age_s or 0.0
    return load.model_copy(update={"sampled_at": max(0.0, sent_s - age_s), "received_at": sent_s})
