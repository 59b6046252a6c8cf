"""docs/protocol.md is true: every key, job, metric, status and code stands there, and no other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from prometheus_client.metrics_core import Metric

from dispatcher import exporter as dispatcher_exporter
from dispatcher import jobs, queues
from dispatcher.batches import storage
from dispatcher.batches.parse import ALLOWED_URLS
from dispatcher.batches.record import MOVES, BatchOptions, BatchRecord
from dispatcher.outcome import Label
from dispatcher.retry import GiveUpCode
from dispatcher.survey import Survey
from forebay.cli.failures import ExitCode
from monitor.exporter import FleetCollector, PollTimes, own_registry
from tests.checkout import ROOT, code_of, rows
from tests.fleets import idle_load, view, worker
from workers import keys
from workers.load import Load
from workers.store import Memo

PAGE = ROOT / "docs" / "protocol.md"


def column(heading: str, number: int = 0) -> list[str]:
    return [code for row in rows(PAGE, below=heading) for code in code_of(row[number])]


def test_every_redis_key_stands_there_with_type_meaning_and_lifetime():
    written = {
        re.sub(r"\{\w+\}", "{}", code_of(key)[0]): (kind, meaning, lifetime)
        for key, kind, meaning, lifetime in rows(PAGE, below="Redis keys")
    }
    assert written == {keys.PREFIX + key.pattern: (key.type, key.meaning, key.lifetime) for key in keys.ALL}


def test_every_field_of_a_load_stands_there():
    fields = next(row[1] for row in rows(PAGE, below="Fields of a worker") if ":load`" in row[0])
    assert set(Load.model_fields) <= set(code_of(fields))


def test_every_job_stands_there_with_its_arguments():
    written = {code_of(row[0])[0]: code_of(row[1])[0] for row in rows(PAGE, below="Jobs")}
    defined = {path: _arguments(path) for path in (jobs.RUN_SHARD, jobs.FINALISE_BATCH, jobs.RUN_REQUEST)}
    assert written == defined
    assert ", ".join(f"`{name}`" for name in queues.QUEUES) in PAGE.read_text(encoding="utf-8")


def _arguments(path: str) -> str:
    found = inspect.signature(getattr(jobs, path.rpartition(".")[2])).parameters.values()
    keyword = [argument.name for argument in found if argument.kind is argument.KEYWORD_ONLY]
    plain = [argument.name for argument in found if argument.kind is not argument.KEYWORD_ONLY]
    return ", ".join([*plain, *(["*", *keyword] if keyword else [])])


def test_every_file_of_a_batch_stands_there():
    names = {path.removeprefix("batches/<batch>/").partition("/")[0] for path in column("Files")}
    assert names == {
        storage.INPUT, storage.PLAN, storage.SHARDS, storage.RECORD, storage.PARTS, storage.OUTPUT,
        storage.ERRORS,
    }  # fmt: skip


def test_every_url_that_a_line_may_name_stands_there():
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("### An input line") : text.index("### A result line")]
    assert set(re.findall(r"`(/v1/[\w/]+)`", section)) == set(ALLOWED_URLS)


def test_every_error_code_of_a_line_stands_there():
    from dispatcher import finaliser, shard

    assert set(column("A result line")) == {
        "invalid_line", *GiveUpCode, shard.LATE, shard.STOPPED, shard.POISON, finaliser._CANCELLED,
    }  # fmt: skip


def test_every_field_and_every_move_of_a_batch_stands_there():
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("### The batch record") : text.index("## Metrics")]
    prose = set(code_of(section.partition("| status")[0]))
    assert prose == set(BatchRecord.model_fields) | set(BatchOptions.model_fields)
    written = {code_of(row[0])[0]: set(code_of(row[1])) for row in rows(PAGE, below="The batch record")}
    assert written == {status.value: {move.value for move in moves} for status, moves in MOVES.items()}


def test_every_metric_stands_there_with_its_labels_and_its_service():
    both = ("monitor", "dispatcher")
    written = {
        (each, code_of(name)[0]): set(code_of(labels))
        for name, labels, service, _ in rows(PAGE, below="Metrics")
        for each in (both if service == "both" else (service,))
    }
    emitted = {
        (service, name): labels
        for service, metrics in (("monitor", _of_monitor()), ("dispatcher", _of_dispatcher()))
        for name, labels in _families(metrics).items()
    }
    assert written == emitted


def test_every_outcome_stands_there():
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("Values of `outcome`") : text.index("## Exit codes")]
    assert re.findall(r"(?m)^\| `(\w+)` \|", table) == [label.value for label in Label]


def test_every_exit_code_stands_there():
    assert [int(row[0]) for row in rows(PAGE, below="Exit codes")] == [code.value for code in ExitCode]


def _of_monitor() -> list[Metric]:
    registry = own_registry()
    PollTimes(registry).observe("native", 0.1)
    seen = view(worker("a", load=idle_load(token_rate=1.0)))
    memo = Memo("404", 1, 0.0)
    return [*registry.collect(), *FleetCollector(seen, {"a": memo}).collect()]


def _of_dispatcher() -> list[Metric]:
    placement: Any = SimpleNamespace(
        in_flight=1, waiting=1, without_worker=None, hedging=SimpleNamespace(made=1), workers=set()
    )
    looked = Survey(jobs={"low": 1}, batches={"in_progress": 1}, lines_left=1, in_trouble=0)
    exporter = dispatcher_exporter.Exporter(placement, lambda: looked)
    seen: Any = SimpleNamespace(
        held=SimpleNamespace(worker_id="a"), outcome=SimpleNamespace(label=Label.OK), elapsed_s=1.0
    )
    exporter.saw(seen)
    return list(exporter.registry.collect())


def _families(metrics: Iterable[Metric]) -> dict[str, set[str]]:
    """Names as a scrape shows them, with the labels of their samples."""
    suffix = {"counter": "_total", "info": "_info"}
    found: dict[str, set[str]] = {}
    for metric in metrics:
        labels = {name for sample in metric.samples for name in sample.labels}
        found[metric.name + suffix.get(metric.type, "")] = labels - {"le"}
    return found
