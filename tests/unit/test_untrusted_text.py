"""What others named (lines, models, files, workers' reasons) is shown, and never acts on who looks at it."""

from __future__ import annotations

import io
import json
import sys

import pytest
import structlog
from rich.console import Console

from dispatcher.batches.intake import Intake, Problem
from dispatcher.batches.parse import BadLine
from dispatcher.batches.record import BatchRecord, RequestCounts
from forebay.cli import batches, workers
from forebay.cli.explain import _show
from forebay.cli.failures import complain, said
from forebay.cli.options import print_json
from forebay.cli.plain import PlainWatcher
from forebay.cli.tables import fleet_table
from forebay.errors import RefusedInput
from forebay.explanations import Explained
from tests.fleets import NOW_S, worker
from workers import logs
from workers.errors import InvalidWorkerUrl
from workers.legible import legible, legible_json, legible_lines
from workers.spec import normalise_url

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\rforebay: all well\n\u202egnp\u2066\x00\x7f"


def harmless(text: str) -> bool:
    """Whether a terminal would only show it. Line feeds and spaces lay our own output out."""
    return all(sign.isprintable() or sign in "\n " for sign in text) and "forebay: all well\n" not in text


def test_the_evil_text_is_evil() -> None:
    assert not harmless(EVIL)


def test_signs_that_act_become_escapes_and_all_others_stay() -> None:
    assert legible(EVIL) == (r"\x1b]0;owned\x07\x1b[2J\x9b31m\rforebay: all well\n\u202egnp\u2066\x00\x7f")
    assert legible("Größe ☃ 数 👩‍🔬 a\\b") == "Größe ☃ 数 👩‍🔬 a\\b"
    assert legible_lines("one\n\ttwo\r") == "one\n\ttwo\\r"


def test_legible_json_means_the_same() -> None:
    text = json.dumps({EVIL: [EVIL]}, ensure_ascii=False)
    assert json.loads(legible_json(text)) == {EVIL: [EVIL]}
    assert harmless(legible_json(text))


def test_json_on_a_terminal_does_not_act(capsys) -> None:
    for indented in (True, False):
        print_json({"custom_id": EVIL}, indented=indented)
        printed = capsys.readouterr().out
        assert harmless(printed)
        assert json.loads(printed) == {"custom_id": EVIL}


def test_complaints_do_not_act(capsys) -> None:
    complain(f"{EVIL}")
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\r" not in error
    bad = BadLine(3, "invalid_url", f"url is {EVIL}")
    intake = Intake(1, 1, (bad,), Problem("invalid_lines", "1 of 2 lines are refused"), None)
    assert harmless(said(RefusedInput("in.jsonl", intake)))


def printed_by(table) -> str:
    out = io.StringIO()
    Console(file=out, width=400).print(table)
    return out.getvalue()


def test_tables_do_not_act() -> None:
    view = worker(f"gpu{EVIL}", reason=EVIL, version=EVIL, models=frozenset({EVIL}))
    assert harmless(printed_by(fleet_table([view], NOW_S)))
    assert harmless(printed_by(workers._details(view, None, now_s=NOW_S)))
    record = BatchRecord(
        id="batch_1", created_at=1, request_counts=RequestCounts(), metadata={"input_name": EVIL}
    )
    assert harmless(printed_by(batches.batch_table([record])))


def test_what_is_waited_for_does_not_act() -> None:
    said_lines: list[str] = []
    PlainWatcher(said_lines.append).waiting([worker("a:1", reason=EVIL)])
    assert said_lines
    assert all(map(harmless, said_lines))


def test_an_explanation_does_not_act(capsys) -> None:
    from tests.unit import test_cli_explain

    record = test_cli_explain.record(custom_id=EVIL, worker=f"a{EVIL}", refusals={"b:1": EVIL})
    _show(Explained((record,), (EVIL,)))
    assert harmless(capsys.readouterr().out)


@pytest.mark.parametrize(
    "url", ["http://gpu\x1b[31m:8000", "http://gpu:8000/\u202e", "http://gpu\x00:1", "http://[gpu"]
)
def test_a_worker_s_url_is_printable(url: str) -> None:
    with pytest.raises(InvalidWorkerUrl):
        normalise_url(url)


# -- logs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def log(monkeypatch):
    """Configures logging into memory; gives a logger and what it wrote."""
    written = io.StringIO()

    def configured(form):
        monkeypatch.setattr(sys, "stderr", written)
        logs.configure(level="debug", form=form)
        return structlog.get_logger(), written

    yield configured
    structlog.reset_defaults()


def test_a_log_in_text_holds_a_line_for_each_event_and_nothing_that_acts(log) -> None:
    logger, written = log("text")
    logger.warning("seen", job=EVIL, error=EVIL)
    [line] = written.getvalue().splitlines()
    assert harmless(line)
    assert r"\x1b[2J" in line


def test_a_traceback_in_a_log_keeps_its_lines_and_shows_no_variable(log) -> None:
    logger, written = log("text")

    def fails(secret):
        raise ValueError(EVIL * len(secret[:1]))

    try:
        fails("my-secret" + "-prompt")
    except ValueError:
        logger.exception("a job failed")
    text = written.getvalue()
    assert len(text.splitlines()) > 3
    assert "\x1b" not in text
    assert "my-secret-prompt" not in text


def test_a_log_in_json_is_one_object_a_line(log) -> None:
    logger, written = log("json")
    logger.warning("seen", job=EVIL)
    [line] = written.getvalue().splitlines()
    assert json.loads(line)["job"] == EVIL
