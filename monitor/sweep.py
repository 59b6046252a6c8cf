"""Read all workers now, on demand, as ``forebay workers loads`` shows them.

The loop that does so all the time is ``service``. A sweep concludes nothing: no rates, no limits, no states.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monitor.credentials import target_of
from monitor.detect import detect
from monitor.gauges.mappings import MappingOverride
from monitor.probe import Form, ProbeVerdict, Verdict
from monitor.readiness import check
from monitor.reading import Gauges, read_load
from workers.credentials import MissingKeyError
from workers.load import Load

if TYPE_CHECKING:
    import httpx

    from monitor.http import Target
    from workers.fleet import WorkerView
    from workers.store import FleetStore, Memo

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Swept:
    """One worker's load as it is now; None: unknown, and ``reason`` says why.

    ``verdict`` None: it was not probed, a memo stands or it could not be asked.
    """

    worker: str
    load: Load | None
    reason: str = ""
    verdict: ProbeVerdict | None = None


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """``budget_s`` is for everything asked of one worker."""

    budget_s: float = 2.0
    memo_ttl_s: float = 600.0
    mappings: Mapping[str, MappingOverride] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


async def sweep_fleet(
    store: FleetStore, client: httpx.AsyncClient, options: SweepOptions | None = None
) -> list[Swept]:
    """Read every registered worker, sharing the absence memos with the monitors, both ways.

    Raises StoreUnavailable.
    """
    options = options or SweepOptions()
    view = await store.view()
    memos = await store.memos([worker.id for worker in view.workers])
    found = await sweep(client, view.workers, memos, now_s=view.now_s, options=options)
    for worker, one in zip(view.workers, found, strict=True):
        await _share(store, worker, one.verdict, standing=worker.id in memos, ttl_s=options.memo_ttl_s)
    return found


async def sweep(
    client: httpx.AsyncClient,
    workers: Sequence[WorkerView],
    memos: Mapping[str, Memo] | None = None,
    *,
    now_s: float,
    options: SweepOptions | None = None,
) -> list[Swept]:
    """Read these workers, in their order. Who has no memos probes every one of them.

    ``now_s`` is Redis' clock; the loads are stamped with it.
    """
    options = options or SweepOptions()
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(worker: WorkerView) -> Swept:
        memo = (memos or {}).get(worker.id)
        stands = memo is not None and memo.incarnation == worker.incarnation and memo.until > now_s
        async with room:
            return await _read(client, worker, options, memo=stands, now_s=now_s)

    return list(await asyncio.gather(*map(one, workers)))


async def _read(
    client: httpx.AsyncClient, worker: WorkerView, options: SweepOptions, *, memo: bool, now_s: float
) -> Swept:
    deadline = asyncio.get_running_loop().time() + options.budget_s
    try:
        target = target_of(worker, options.environ)
    except MissingKeyError as error:
        return Swept(worker.id, None, str(error))
    reading = await read_load(
        client,
        target,
        await _gauges(client, target, worker, options, deadline),
        form=Form.SECTIONS,
        memo=memo,
        models=worker.models,
        deadline=deadline,
        sent_s=now_s,
    )
    return Swept(worker.id, reading.load, reading.reason, reading.verdict)


async def _gauges(
    client: httpx.AsyncClient, target: Target, worker: WorkerView, options: SweepOptions, deadline: float
) -> Gauges:
    runtime = worker.runtime
    if runtime is None:
        models = await check(client, target, deadline=deadline)
        runtime = (await detect(client, target, models.models_answer, deadline=deadline)).runtime
    return Gauges(runtime, worker.id, options.mappings)


async def _share(
    store: FleetStore, worker: WorkerView, verdict: ProbeVerdict | None, *, standing: bool, ttl_s: float
) -> None:
    if verdict is None:
        return
    if verdict.verdict is Verdict.ABSENT:
        await store.set_memo(worker.id, worker.incarnation, verdict.reason, ttl_s)
    elif verdict.verdict is Verdict.AVAILABLE and standing:
        await store.clear_memo(worker.id)


async def reset_memos(store: FleetStore) -> int:
    """Forget every absence memo, as when monitoring is set up anew. Returns how many workers were told."""
    view = await store.view()
    for worker in view.workers:
        await store.clear_memo(worker.id)
    return len(view.workers)
