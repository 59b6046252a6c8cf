"""One run of one case, from fresh engines to what is told of it.

Belongs here: the order of things, and the three ways to drive a batch. What is started how: ``routers``; what
is made of it: ``record``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.peers import environments, record, routers, workload
from benchmarks.peers.engines import Fleet, running
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.processes import Usage, ended_children_cpu_s, started, watched
from benchmarks.peers.ready import free_ports, read_away, ready
from benchmarks.peers.record import Measured
from benchmarks.peers.scenarios import SCENARIOS, Scenario
from benchmarks.peers.systems import RETRIES, SYSTEMS, Case, Kind, System
from benchmarks.peers.traffic import Traffic, flowing
from benchmarks.peers.workload import Request

_LONGEST_S = 900.0
"""A run that takes longer is ended, and said to have been."""


@dataclass(slots=True)
class _Driven:
    """How one batch went. Times are Unix times; results are the lines of all its result files."""

    began_s: float
    ended_s: float
    cpu_s: float
    startup_cpu_s: float
    rss_mib: float
    results: list[bytes]
    command_s: float | None = None


class _Run:
    """All that one run has in hand."""

    def __init__(self, case: Case, folder: Path, fleet: Fleet, wanted: Sequence[Request]) -> None:
        self.case = case
        self.scenario: Scenario = SCENARIOS[case.scenario]
        self.system: System = SYSTEMS[case.system]
        self.folder = folder
        self.fleet = fleet
        self.wanted = wanted
        self.tokens = [request.tokens for request in wanted if request.tokens]
        self.after_s = self.scenario.trouble_after_s(self.tokens)
        self.source = folder / "in.jsonl"
        self.target = folder / "out.jsonl"

    async def drive(self) -> _Driven:
        """Run the batch. Raises Unavailable."""
        match self.system.kind:
            case Kind.FOREBAY:
                return await self._forebay()
            case Kind.ROUTER:
                return await self._routed()
            case Kind.CENTRAL if self.system.setting == "nobody":
                return await self._nobody()
            case Kind.CENTRAL:
                return await self._central()

    async def _forebay(self) -> _Driven:
        """`forebay run`, as a person calls it. What it says while it runs tells when its batch began."""
        workers = [word for url in self.fleet.urls for word in ("--worker", url)]
        command = [sys.executable, "-m", "forebay", "run", str(self.source), "-o", str(self.target), "--json"]
        settings = {
            "FOREBAY_SHARE": self.system.setting,
            "FOREBAY_REQUEST_TIMEOUT_S": str(self.scenario.timeout_s),
        }
        before_s, called_s = ended_children_cpu_s(), time.time()
        log = self.folder / "forebay.log"
        async with (
            self._trouble(),
            started([*command, *workers], log, settings, folder=self.folder) as process,
        ):
            async with watched(process.pid) as usage:
                began_s = await _published(process)
            left_s = time.time()
        cpu_s = ended_children_cpu_s() - before_s
        if process.returncode not in (0, 1) or not self.target.exists():
            raise Unavailable(f"forebay run ended with status {process.returncode}")
        startup_cpu_s = usage.cpu_s_at(began_s)
        errors = self.target.with_name("out.errors.jsonl")
        files = [path for path in (self.target, errors) if path.exists()]
        return _Driven(
            began_s=began_s,
            ended_s=max(path.stat().st_mtime for path in files),
            cpu_s=cpu_s - startup_cpu_s,
            startup_cpu_s=startup_cpu_s,
            rss_mib=usage.peak_mib,
            results=[line for path in files for line in path.read_bytes().splitlines()],
            command_s=left_s - called_s,
        )

    async def _routed(self) -> _Driven:
        assert self.system.package is not None, "a router comes in a package"
        async with self._router(self.system.package) as (url, usage):
            startup_cpu_s = usage.look()
            driven = await self._client([(url, self.case.window or len(self.wanted))])
            driven.cpu_s += usage.look() - startup_cpu_s
            driven.startup_cpu_s = startup_cpu_s
            driven.rss_mib += usage.peak_mib
            return driven

    async def _central(self) -> _Driven:
        engines = list(zip(self.fleet.urls, self.scenario.engines, strict=True))
        if self.system.setting == "longest-first":
            workload.write(self.source, workload.longest_first(self.wanted))
            engines.sort(key=lambda pair: pair[1].tokens_per_s, reverse=True)  # the longest to the fastest
        return await self._client([(url, engine.slots) for url, engine in engines])

    async def _nobody(self) -> _Driven:
        """As long as a batch would take at best, without one."""
        began_s = time.time()
        await asyncio.sleep(self.scenario.bound_s(self.tokens))
        return _Driven(began_s, time.time(), 0.0, 0.0, 0.0, [])

    async def _client(self, targets: Sequence[tuple[str, int]]) -> _Driven:
        """The plain client on these URLs, with so many requests in flight each."""
        command = [sys.executable, "-m", "benchmarks.peers.client", str(self.source), str(self.target)]
        command += [word for url, places in targets for word in ("--to", f"{url}={places}")]
        command += ["--timeout-s", str(self.scenario.timeout_s)]
        command += ["--retries", str(RETRIES if self.case.retries else 0)]
        async with self._trouble(), started(command, self.folder / "client.log") as process:
            told, _ = await process.communicate()
        if process.returncode != 0:
            raise Unavailable(f"the client ended with status {process.returncode}")
        report = msgspec.json.decode(told, type=_ClientReport)
        results = self.target.read_bytes().splitlines()
        return _Driven(report.began_s, report.ended_s, report.cpu_s, 0.0, report.rss_mib, results)

    @contextlib.asynccontextmanager
    async def _trouble(self) -> AsyncIterator[None]:
        async with self.fleet.trouble(self.after_s) as happened:
            yield
        if not happened.is_set():
            raise Unavailable("the batch ended before the trouble began")

    @contextlib.asynccontextmanager
    async def _router(self, package: str) -> AsyncIterator[tuple[str, Usage]]:
        """A router that answers, its workers known to it."""
        programs = await asyncio.to_thread(environments.environment, package) / "bin"
        ports = free_ports()
        config = self.folder / "config.yaml"
        start = routers.start(self.system, programs, self.fleet.urls, ports, config)
        if start.config is not None:
            config.write_text(start.config)
        url = f"http://127.0.0.1:{ports[0]}"
        log = self.folder / "router.log"
        async with started(start.command, log, start.environment) as process:
            drain = asyncio.create_task(read_away(process))
            try:
                async with watched(process.pid) as usage:
                    await ready(process, url, start.health)
                    yield url, usage
            finally:
                drain.cancel()


class _ClientReport(msgspec.Struct):
    began_s: float
    ended_s: float
    cpu_s: float
    rss_mib: float


class _Event(msgspec.Struct):
    event: str | None = None
    elapsed_s: float = 0.0


async def _published(process: asyncio.subprocess.Process) -> float:
    """Read what `forebay run --json` says, to its end; returns when it published its batch (Unix time)."""
    assert process.stdout is not None, "its output is a pipe"
    began_s = 0.0
    async for raw in process.stdout:
        event = msgspec.json.decode(raw, type=_Event)
        if event.event == "progress":
            began_s = time.time() - event.elapsed_s
    await process.wait()
    if not began_s:
        raise Unavailable("forebay run never began its batch")
    return began_s


async def measure(case: Case) -> Measured:
    """Run one case. Raises Unavailable, whose words say why it could not be measured."""
    scenario, system = SCENARIOS[case.scenario], SYSTEMS[case.system]
    wanted = workload.requests(scenario, case.requests, case.seed, foretold=case.foretold)
    with tempfile.TemporaryDirectory(prefix="forebay-peers-") as name:
        async with running(scenario, system.runtime) as fleet:
            run = _Run(case, Path(name), fleet, wanted)
            workload.write(run.source, wanted)
            driven, traffic = await _driven(run)
            asked = await fleet.asked()
    sent = [] if system.setting == "nobody" else wanted
    return Measured(
        bound_s=scenario.bound_s(run.tokens),
        elapsed_s=driven.ended_s - driven.began_s,
        cpu_s=driven.cpu_s,
        startup_cpu_s=driven.startup_cpu_s,
        rss_mib=driven.rss_mib,
        tally=record.tally(
            driven.results,
            {request.custom_id for request in sent},
            {request.custom_id for request in sent if not request.tokens},
        ),
        asked=asked,
        command_s=driven.command_s,
        interactive=traffic.during(driven.began_s, driven.ended_s),
    )


async def _driven(run: _Run) -> tuple[_Driven, Traffic]:
    async with flowing(run.scenario, run.fleet.urls, run.case.seed, run.folder) as traffic:
        try:
            async with asyncio.timeout(_LONGEST_S):
                driven = await run.drive()
        except TimeoutError as error:
            raise Unavailable(f"did not end within {_LONGEST_S:g} s") from error
        await traffic.stop()
    return driven, traffic
