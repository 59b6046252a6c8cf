"""The command, see ``arguments``: it measures what is missing, one run after the other."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import traceback
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from benchmarks.peers import arguments, environments, page, record
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.record import Machine, Measured, Record
from benchmarks.peers.runs import measure
from benchmarks.peers.systems import SYSTEMS, Case, Kind, cases


def main() -> int:
    """Run the command. Interrupted or terminated, it ends what it started; the runs that are done stay."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _main()
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is missing", file=sys.stderr)
        return 130


def _main() -> int:
    parser = arguments.parser()
    told = parser.parse_args()
    try:
        wanted = cases(arguments.wish(told))
    except ValueError as error:
        parser.error(str(error))
    if told.page_only:
        _publish(told.json, told.page or arguments.PAGE)
        return 0
    missing = record.missing(wanted, record.read(told.json))
    if told.list:
        for case in wanted:
            print("to do " if case in missing else "done  ", case.key)
        return 0
    for number, case in enumerate(missing, 1):
        done = _run(case)
        record.add(told.json, done)
        print(f"{number}/{len(missing)} {case.key}: {page.said(done)}", flush=True)
    if told.page is not None:
        _publish(told.json, told.page)
    return 0


def _run(case: Case) -> Record:
    load_before = os.getloadavg()[0]
    measured: Measured | None = None
    why: str | None = None
    try:
        measured = asyncio.run(measure(case))
    except Unavailable as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - hours of other runs follow; this one is told of and done again
        traceback.print_exc()
        why = f"the comparison itself failed: {type(error).__name__}"
    return Record(
        case=case,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=_version(case),
        machine=Machine(
            cores=os.cpu_count() or 1,
            memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
            python=platform.python_version(),
            load_before=load_before,
            load_after=os.getloadavg()[0],
        ),
        measured=measured,
        why=why,
    )


def _version(case: Case) -> str | None:
    system = SYSTEMS[case.system]
    if system.kind is Kind.FOREBAY:
        return metadata.version("forebay")
    return environments.version(system.package) if system.package else metadata.version("aiohttp")


def _publish(runs: Path, target: Path) -> None:
    """Write the page, and beside it the runs that it is made of."""
    records = record.newest(record.read(runs))
    record.write(target.with_suffix(".jsonl"), records)
    target.write_text(page.text(records), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    sys.exit(main())
