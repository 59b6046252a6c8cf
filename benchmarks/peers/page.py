"""The records as a page of Markdown: what was measured, on what, and what to make of it. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.peers.record import Measured, Record
from benchmarks.peers.scenarios import SCENARIOS
from benchmarks.peers.systems import RETRIES, SYSTEMS, Case, Kind

_HEADS = ("", "in flight", "time over the bound", "p50 s", "p99 s", "failed", "CPU ms", "MiB", "runs")
_BESIDE = "interactive p99 s"

_INTRODUCTION = """# Forebay beside its peers

The same batch over the same simulated engines, fresh for each run, through Forebay and through what
people use instead. Made by `make peers`; [the runs](benchmarks.jsonl), one a line, are its only source.

*Time over the bound*: from the start of the batch, every service up and answering, to its results on
disk, over the lower bound (total work over total capacity, or the longest answer alone on the fastest
engine; where capacity is lost, what is left of it). The median over the seeds, then the range. *In
flight*: the window of the client in front of a router; Forebay has none to guess. *p50*, *p99*: how long
one request took, from its sending to its answer, waiting in an engine's queue included; for Forebay
without the time that a request waits in the dispatcher. *Failed*: lines of the batch that ended without
an answer, in all runs, and as what. *CPU*: of everything but the engines, for one request; for Forebay
that is Redis, monitor, dispatcher and the command. *MiB*: the most resident memory at once of the same.
Rows that lost lines stand below those that lost none, for it is easy to be early with half the work.
"""

_CAVEATS = f"""## What to make of it

- **Simulated engines.** They write at one speed however full they are, and their batch slows nobody. Real
  ones do not behave so simply. What is measured is who keeps them full.
- **The window decides as much as the router.** Routers hold no queue that knows the engines' slots: how
  many requests are in flight is the client's guess. The mixed fleet has 64 slots. At 128, routers that send
  equal counts to all put 32 on each, which happens to fill the largest engine exactly: no other window is
  as kind to them. 64 starves the largest engine unless a router weighs the engines well; 256 and unlimited
  bury the small ones under what they cannot give back. Another fleet has another lucky window.
- **Forebay has no window**, and no unlucky one. It reads the engines' slots from what they tell and keeps
  the rest of the batch in its own queue, which no router offers.
- **Routers are made for interactive traffic**, where requests come one by one and cannot wait at the
  client. A batch is not what their policies were built for, and none of them promises a lower bound.
- **Interactive traffic goes past the routers**, to the engines themselves. One that carries both would count
  it, where here it sees it only if it asks engines for their load.
- **A client that does not retry** sees what the table says it sees. One that meets a worker which refuses
  at once feeds it the rest of the batch. Rows *with retries* are the same client with up to {RETRIES} more
  tries of what failed, waiting 0.5 s, then twice as long each time, at random below that. Routers retry by
  themselves as they do by default.
- **Prompts are short** where nothing else is said, and no two share a beginning worth caching: what
  cache-aware policies are for shows in the scenario with shared prefixes only. The bound there counts no
  reading of prompts.
- **vllm-router meets vLLM engines only, sglang-router SGLang only**, which they are made for; the others a
  mix of both. The power of two choices of both asks workers for `/get_load`, which neither vLLM 0.32 nor
  SGLang 0.5.23 serves any more; they go by the requests that they have sent themselves. vllm-router's
  cache_aware has every worker render every prompt. smg reads the load of both runtimes (`/v1/loads`,
  `/metrics`), every 10 s by default and every second for least_load here. litellm asks engines for nothing.
- **CPU at this rate is mostly waking up.** A hundred requests a second leave a dispatcher idle nine times in
  ten; each answer then costs a pass of its own, with two scripts in Redis, 2 to 3 ms of its CPU. With 1,500
  requests a second passes serve many at once, and a request takes 0.6 ms (`benchmarks/throughput.py`).
- **Two cores for all.** Engines, router and client share the machine, so that what uses much CPU slows
  itself down: litellm's times are as much about its CPU as about its choices.
- **The client that knows the slots** has a number that nobody has before measuring every engine. It is the
  practical optimum without length predictions; *longest first*, told every length and speed in advance, is
  the optimum with them.
- **Start-up is left out.** `forebay run` starts its own Redis, monitor and dispatcher and takes seconds for
  it; routers were running before. CPU for starting is left out of both. Forebay also keeps results durable
  while it runs, which the plain client does not.
- **How often.** The mixed fleet was run with three seeds, but for one each of smg cache_aware and litellm
  least-busy with all in flight, which take four and seven minutes; smg least_requests is an extra. The other
  scenarios were run once, with 1,000 requests and 128 in flight, not by everybody.
- **Not all in quiet.** Tests of the project ran on the same two cores, at low priority, beside most of the
  runs of routers with 64, 256 and all in flight (not beside Forebay's, nor those with 128). Two seeds run so
  took 1.64 and 1.96 where one alone took 1.65 (smg least_load, 64), and 1.69 and 1.75 where one alone took
  1.60 (sglang-router cache_aware, 256). Their CPU may be too high, litellm's most.
- Single rows of a shared machine move by up to a quarter between seeds: look at the ranges.
"""


def text(records: Sequence[Record]) -> str:
    """The whole page, of one record for each case."""
    groups: dict[tuple[str, int, bool], list[Record]] = {}
    for record in records:
        case = record.case
        groups.setdefault((case.scenario, case.requests, case.foretold), []).append(record)
    order = list(SCENARIOS)
    ordered = sorted(groups, key=lambda group: (order.index(group[0]), -group[1], group[2]))
    parts = [_INTRODUCTION, measured_on(records)]
    parts += [_section(group, groups[group]) for group in ordered]
    return "\n".join([*parts, _CAVEATS])


def measured_on(records: Sequence[Record]) -> str:
    """When, on what, with which versions."""
    if not records:
        return "Nothing has been measured yet.\n"
    days = sorted(record.at[:10] for record in records)
    when = " to ".join(dict.fromkeys([days[0], days[-1]]))
    machines = sorted({_machine(record) for record in records})
    loads = [record.machine.load_before for record in records]
    versions = sorted({f"{_program(record.case)} {record.version}" for record in records if record.version})
    measured = (
        f"Measured {when} on {'; '.join(machines)}. Load average before a run: {min(loads):.1f} to "
        f"{max(loads):.1f}, median {statistics.median(loads):.1f}."
    )
    return "\n".join([measured, "", f"Versions: {', '.join(versions)}.", ""])


def _machine(record: Record) -> str:
    machine = record.machine
    return f"{machine.cores} cores, {machine.memory_gib:.0f} GiB, Python {machine.python}"


def _program(case: Case) -> str:
    system = SYSTEMS[case.system]
    if system.kind is Kind.CENTRAL:
        return "aiohttp"
    return system.package or "Forebay"


def _section(group: tuple[str, int, bool], records: Sequence[Record]) -> str:
    scenario, count, foretold = group
    known = "foretold by `max_tokens`" if foretold else "unknown in advance"
    rows: dict[tuple[str, int | None, bool], list[Record]] = {}
    for record in records:
        rows.setdefault((record.case.system, record.case.window, record.case.retries), []).append(record)
    beside = any(record.measured is not None and record.measured.interactive for record in records)
    heads = [*_HEADS, _BESIDE] if beside else list(_HEADS)
    lines = [_line(heads), "|---" * len(heads) + "|"]
    ranked = sorted(rows.values(), key=_rank)
    lines += [_line(_row(each, beside=beside)) for each in ranked]
    title = f"## {scenario}: {count:,} requests, lengths {known}"
    return "\n".join([title, "", f"The batch runs on {SCENARIOS[scenario].what}.", "", *lines, ""])


def _rank(records: Sequence[Record]) -> tuple[bool, bool, float]:
    """Those that answer every line first, among them the fastest."""
    runs = [record.measured for record in records if record.measured is not None]
    failed = any(run.tally.failed for run in runs)
    return (not runs, failed, statistics.median(run.ratio for run in runs) if runs else 0.0)


def _row(records: Sequence[Record], *, beside: bool) -> list[str]:
    case = records[0].case
    name = [_name(case), _window(case)]
    runs = [record.measured for record in records if record.measured is not None]
    if not runs:
        width = len(_HEADS) + beside - len(name)
        return [*name, f"not measured: {records[-1].why}", *[""] * (width - 1)]
    told = [*name, *_figures(runs, case.requests)]
    return [*told, _interactive(runs)] if beside else told


def _name(case: Case) -> str:
    system = SYSTEMS[case.system]
    names = {
        "forebay/all": "**Forebay**",
        "forebay/spare": "**Forebay**, `share=spare`",
        "central/first-come": "client that knows all slots, first come first served",
        "central/longest-first": "client that knows all slots and lengths, longest first",
        "central/nobody": "no batch",
    }
    name = names.get(case.system, f"{system.package} {system.setting}")
    return f"{name}, with retries" if case.retries else name


def _window(case: Case) -> str:
    if not SYSTEMS[case.system].windowed:
        return ""
    return "unlimited" if case.window is None else str(case.window)


def _figures(runs: Sequence[Measured], requests: int) -> list[str]:
    if not any(run.tally.completed for run in runs):
        return ["", "", "", _failed(runs), "", "", str(len(runs))]
    return [
        _ratio(runs),
        _median(run.tally.p50_s for run in runs),
        _median(run.tally.p99_s for run in runs),
        _failed(runs),
        _median(run.cpu_s / requests * 1000 for run in runs),
        f"{max(run.rss_mib for run in runs):.0f}",
        str(len(runs)),
    ]


def _ratio(runs: Sequence[Measured]) -> str:
    ratios = [run.ratio for run in runs]
    middle = f"{statistics.median(ratios):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})"


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else ""


def _failed(runs: Sequence[Measured]) -> str:
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.tally.failures)
        counts.update({"lost": run.tally.lost, "doubled": run.tally.doubled})
    told = [f"{ending}: {count:,}" for ending, count in counts.most_common() if count]
    return "; ".join(told) or "0"


def _interactive(runs: Sequence[Measured]) -> str:
    return _median(run.interactive.p99_s for run in runs if run.interactive is not None)


def said(record: Record) -> str:
    """One run in one line, for whoever watches."""
    run = record.measured
    if run is None:
        return f"not measured: {record.why}"
    parts = [f"{run.ratio:.2f} times the bound ({run.elapsed_s:.1f} s)", f"failed {_failed([run])}"]
    parts.append(f"{run.cpu_s / record.case.requests * 1000:.2f} ms CPU a request")
    if run.interactive is not None and run.interactive.p99_s is not None:
        parts.append(f"interactive p99 {run.interactive.p99_s:.2f} s")
    return ", ".join(parts)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
