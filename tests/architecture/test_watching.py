"""Dashboard, alerts and autoscaler name metrics, labels and values that there are, and headings to read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dispatcher.batches.record import BatchStatus
from dispatcher.outcome import Label
from dispatcher.queues import QUEUES
from tests import promql
from tests.checkout import ROOT, code_of, rows
from tests.kustomize import only, render
from workers.breaker import BreakerState
from workers.fleet import WorkerState

DEPLOY = ROOT / "deploy"
ALERTS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
SCRAPES: dict[str, Any] = yaml.safe_load(
    (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
)
JOBS = {scrape["job_name"] for scrape in SCRAPES["scrape_configs"]}
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "forebay.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

FROM_THE_SCRAPE = {"job", "instance"}
VALUES: dict[tuple[str, str], set[str]] = {
    ("forebay_attempts_total", "outcome"): {label.value for label in Label},
    ("forebay_worker_breaker_state", "state"): {state.value for state in BreakerState},
    ("forebay_worker_info", "state"): {state.value for state in WorkerState},
    ("forebay_batches", "status"): {status.value for status in BatchStatus},
    ("forebay_queue_jobs", "queue"): set(QUEUES),
}


def known() -> dict[str, set[str]]:
    """What a scrape shows, with labels: the table of docs/protocol.md, which the code is held to."""
    found = {"up": set[str]()}
    for name, labels, _, meaning in rows(ROOT / "docs" / "protocol.md", below="Metrics"):
        metric = code_of(name)[0]
        if meaning.startswith("histogram"):
            found |= {f"{metric}_{part}": {*code_of(labels)} for part in ("sum", "count")}
            found[f"{metric}_bucket"] = {*code_of(labels), "le"}
        else:
            found[metric] = {*code_of(labels)}
    return found


METRICS = known()


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and what it says."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            [metric, label] = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[0]
            yield f"variable {variable['name']}", f"max by ({label}) ({metric})"
    [trigger] = only(render(DEPLOY / "kubernetes" / "overlays" / "managed"), "ScaledObject")["spec"][
        "triggers"
    ]
    yield "autoscaler", trigger["metadata"]["query"]


EXPRESSIONS = list(expressions())


@pytest.mark.parametrize(("where", "text"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_an_expression_names_metrics_labels_and_values_that_there_are(where: str, text: str):
    said = promql.read(text)
    assert said.metrics
    assert said.metrics <= METRICS.keys(), where
    for metric, label, value in said.selected:
        assert label in METRICS[metric] | FROM_THE_SCRAPE, (where, metric, label)
        if value in {"$worker", "forebay-.*"}:
            continue
        allowed = JOBS if label == "job" else VALUES[metric, label]
        assert set(value.split("|")) <= allowed, (where, metric, label)
    labels = set().union(*(METRICS[metric] for metric in said.metrics))
    assert said.grouped <= labels | FROM_THE_SCRAPE, where


def test_a_sum_of_limits_is_of_workers_that_get_requests():
    """The limit of a worker that is away, or whose breaker is open, is told still: nobody may fill it."""
    sums = [
        (where, text) for where, text in EXPRESSIONS if re.search(r"sum\([^{}]*forebay_worker_limit", text)
    ]
    assert {where for where, _ in sums} >= {"ForebayQueueGrows", "autoscaler", "Leases in use"}
    usable = {("forebay_worker_info", "state", "ready"), ("forebay_worker_breaker_state", "state", "closed")}
    for where, text in sums:
        assert usable <= set(promql.read(text).selected), where


def test_a_breaker_that_is_tried_now_and_then_counts_as_open():
    """A hanging worker's is half-open between its openings, none of which need last for five minutes."""
    for where, text in EXPRESSIONS:
        if where in {"ForebayBreakerOpen", "Breakers open"}:
            assert ("forebay_worker_breaker_state", "state", "closed") in promql.read(text).selected, where
            assert '(forebay_worker_breaker_state{state="closed"}) == 0' in text, where


def test_what_counts_or_divides_by_a_selection_says_zero_where_there_is_none():
    """`count` of nothing is no sample: a panel would go on showing the last number that there was."""
    stats = {panel["title"] for panel in PANELS if panel["type"] == "stat"}
    shares = [(where, text) for where, text in EXPRESSIONS if where in stats and "state=" in text]
    assert {where for where, _ in shares} == {"Ready workers", "Leases in use", "Breakers open"}
    for where, text in shares:
        assert " or 0 * count(" in text, where


@pytest.mark.parametrize(
    "text",
    ["sum(up", 'max(up{job="a)"', "maxx(up)", "sum(up) andd sum(up)[5x]", "sum by (job (up)", 'up{job~"a"}'],
)
def test_a_slip_of_the_pen_is_no_expression(text: str):
    with pytest.raises(AssertionError):
        promql.read(text)


def test_every_metric_of_ours_is_watched_somewhere():
    watched = set().union(*(promql.read(text).metrics for _, text in EXPRESSIONS))
    ours = {re.sub(r"_(sum|count|bucket)$", "", name) for name in METRICS if name.startswith("forebay_")}
    assert ours - {re.sub(r"_(sum|count|bucket)$", "", name) for name in watched} == set()


# -- alerts --------------------------------------------------------------------------------------------------


def headings() -> set[str]:
    page = re.sub(r"(?s)```.*?```", "", (ROOT / "docs" / "operations.md").read_text(encoding="utf-8"))
    found = re.findall(r"(?m)^#+ (.+)$", page)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_how_bad_it_is_and_what_to_read(rule: dict[str, Any]):
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, heading = rule["annotations"]["runbook"].partition("#")
    assert page == "docs/operations.md"
    assert heading in headings()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_what_an_alert_quotes_is_a_label_that_its_expression_leaves(rule: dict[str, Any]):
    said = promql.read(rule["expr"])
    texts = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= said.grouped


def test_alerts_have_names_of_their_own():
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    assert all(name.startswith("Forebay") for name in names)


# -- the dashboard -------------------------------------------------------------------------------------------


def test_panels_do_not_overlap_and_have_numbers_and_titles_of_their_own():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for key in ("id", "title"):
        found = [(panel["type"] == "row", panel[key]) for panel in DASHBOARD["panels"]]
        assert len(found) == len(set(found))


def test_every_panel_asks_the_data_source_that_is_chosen():
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "worker"}
    sources = [panel["datasource"] for panel in PANELS]
    sources += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_legends_are_made_of_labels_that_the_expression_leaves():
    for panel in PANELS:
        for target in panel["targets"]:
            quoted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert quoted <= promql.read(target["expr"]).grouped, panel["title"]
