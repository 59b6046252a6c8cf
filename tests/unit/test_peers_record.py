"""The comparison with peers: what is counted, kept, resumed and shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.peers import environments, page, record
from benchmarks.peers.record import Interactive, Machine, Measured, Record, Tally
from benchmarks.peers.systems import Case


def case(system: str = "smg/least_load", *, seed: int = 1, window: int | None = 128, **more: bool) -> Case:
    scenario = "interactive" if more.pop("beside", False) else "mixed"
    return Case(scenario, 100, foretold=False, seed=seed, system=system, window=window, **more)


def tally(**failures: int) -> Tally:
    return Tally(98, 0, failures, lost=0, doubled=0, p50_s=0.5, p99_s=2.0)


def measured(
    elapsed_s: float, *, bound_s: float = 10.0, beside_s: float | None = None, **failures: int
) -> Measured:
    return Measured(
        bound_s=bound_s,
        elapsed_s=elapsed_s,
        cpu_s=0.25,
        startup_cpu_s=1.0,
        rss_mib=123.4,
        tally=tally(**failures),
        asked=[],
        interactive=None if beside_s is None else Interactive(10, 0, 0.1, beside_s),
    )


def run(of: Case, told: Measured | None, *, why: str | None = None, load: float = 0.5) -> Record:
    machine = Machine(2, 24.0, "3.11.7", load, load)
    at = f"2026-11-{of.seed:02}T12:00:00+00:00"
    return Record(case=of, at=at, version="1.2", machine=machine, measured=told, why=why)


def result(name: str, status: int = 200, latency_s: float = 1.0) -> bytes:
    response = {"status_code": status, "body": {}}
    return msgspec.json.encode(
        {"custom_id": name, "response": response, "error": None, "latency_s": latency_s}
    )


def test_a_percentile_is_a_value_that_was_seen():
    values = [float(value) for value in range(1, 101)][::-1]
    assert record.percentile(values, 0.5) == 50.0
    assert record.percentile(values, 0.99) == 99.0
    assert record.percentile([7.0], 0.99) == 7.0
    assert record.percentile([1.0, 2.0], 0.0) == 1.0
    assert record.percentile([], 0.5) is None


def test_lines_are_counted_by_how_they_ended_and_latencies_are_those_of_answers():
    broken = b'{"custom_id": "d", "response": null, "error": "ClientOSError", "latency_s": 9.0}'
    told = record.tally(
        [result("a", latency_s=1.0), result("b", latency_s=3.0), result("c", 503, 9.0), broken],
        {"a", "b", "c", "d", "e"},
        set(),
    )
    assert (told.completed, told.lost, told.doubled) == (2, 1, 0)
    assert told.failures == {"503": 1, "ClientOSError": 1}
    assert told.failed == 3
    assert (told.p50_s, told.p99_s) == (1.0, 3.0)


def test_a_refusal_of_what_fits_no_engine_is_no_failure_and_any_other_end_of_it_is():
    told = record.tally([result("a", 400), result("b", 503), result("c", 400)], set("abc"), {"a", "b"})
    assert told.refused == 1
    assert told.failures == {"503": 1, "400": 1}


def test_a_line_with_two_results_is_doubled():
    told = record.tally([result("a"), result("a")], {"a"}, set())
    assert (told.completed, told.doubled, told.lost) == (1, 1, 0)


def test_forebays_own_result_lines_are_read_as_well():
    good = (
        b'{"id": "x", "custom_id": "a", "response": {"status_code": 200, "request_id": "r", "body": {}},'
        b' "error": null, "forebay": {"worker": "w", "attempts": 1, "queued_s": 5.0, "latency_s": 0.5}}'
    )
    failed = (
        b'{"id": "y", "custom_id": "b", "response": null, "error": {"code": "max_attempts", "message": "m"},'
        b' "forebay": {"worker": null, "attempts": 5, "queued_s": 5.0, "latency_s": null}}'
    )
    told = record.tally([good, failed], {"a", "b"}, set())
    assert told.p50_s == 0.5
    assert told.failures == {"max_attempts": 1}


def test_only_traffic_that_began_beside_the_batch_counts():
    told = record.during([(9.0, 50.0), (10.0, 1.0), (20.0, 2.0), (21.0, 50.0)], 3, 10.0, 20.0)
    assert told == Interactive(2, 3, 1.0, 2.0)


def test_what_was_written_is_read_again(tmp_path: Path):
    file = tmp_path / "deep" / "runs.jsonl"
    assert record.read(file) == []
    written = [run(case(), measured(12.0)), run(case(seed=2), None, why="did not answer")]
    for each in written:
        record.add(file, each)
    assert record.read(file) == written


def test_a_line_that_was_cut_is_forgotten_and_the_next_is_whole(tmp_path: Path):
    file = tmp_path / "runs.jsonl"
    record.add(file, run(case(), measured(12.0)))
    file.write_bytes(file.read_bytes() + b'{"case": {"scen')
    assert len(record.read(file)) == 1
    record.add(file, run(case(seed=2), measured(13.0)))
    assert [each.case.seed for each in record.read(file)] == [1, 2]


def test_a_run_that_was_measured_is_not_repeated_and_one_that_failed_is():
    done, failed, new = case(), case(seed=2), case(seed=3)
    records = [run(done, measured(12.0)), run(failed, None, why="did not answer")]
    assert record.missing([done, failed, new], records) == [failed, new]


def test_the_table_has_a_row_for_each_system_with_the_best_first():
    text = page.text(
        [
            run(case(seed=1), measured(15.0, **{"503": 2})),
            run(case(seed=2), measured(17.0)),
            run(case(seed=3), measured(16.0)),
            run(case("forebay/all", window=None), measured(11.0)),
        ]
    )
    rows = [line for line in text.splitlines() if line.startswith("| ") and "in flight" not in line]
    assert rows == [
        "| **Forebay** |  | 1.10 | 0.50 | 2.00 | 0 | 2.50 | 123 | 1 |",
        "| smg least_load | 128 | 1.60 (1.50 to 1.70) | 0.50 | 2.00 | 503: 2 | 2.50 | 123 | 3 |",
    ]
    assert "## mixed: 100 requests, lengths unknown in advance" in text


def test_who_loses_lines_stands_below_who_loses_none_however_fast():
    fast = run(case(), measured(10.0, **{"503": 50}))
    text = page.text([fast, run(case("litellm/least-busy"), measured(40.0))])
    rows = [
        line.split("|")[1].strip() for line in text.splitlines() if line.startswith(("| smg", "| litellm"))
    ]
    assert rows == ["litellm least-busy", "smg least_load"]


def test_a_run_that_could_not_be_measured_is_a_row_that_says_why():
    text = page.text([run(case(), None, why="could not be installed: status 1")])
    (row,) = [line for line in text.splitlines() if line.startswith("| smg")]
    assert row.startswith("| smg least_load | 128 | not measured: could not be installed: status 1 |")
    heads = next(line for line in text.splitlines() if "in flight" in line and line.startswith("|"))
    assert row.count("|") == heads.count("|")


def test_of_two_runs_of_a_case_the_last_counts():
    first, last, other = run(case(), measured(13.0)), run(case(), measured(12.0)), run(case(seed=2), None)
    assert record.newest([first, other, last]) == [last, other]
    assert record.newest([first, run(case(), None, why="no port")]) == [first]


def test_runs_that_are_published_read_as_they_were(tmp_path):
    runs = [run(case(), measured(12.0)), run(case(seed=2), None, why="no port")]
    record.write(tmp_path / "runs.jsonl", runs)
    assert record.read(tmp_path / "runs.jsonl") == runs


def test_the_published_page_says_what_its_runs_say():
    docs = environments.CHECKOUT / "docs"
    runs = record.read(docs / "benchmarks.jsonl")
    assert runs
    assert (docs / "benchmarks.md").read_text(encoding="utf-8") == page.text(runs)


def test_interactive_latency_has_a_column_where_there_was_such_traffic():
    beside = page.text([run(case(beside=True), measured(12.0, beside_s=3.25))])
    assert beside.count("interactive p99 s") == 1
    assert "| 3.25 |" in beside
    assert "interactive p99 s" not in page.text([run(case(), measured(12.0))])


def test_retries_and_windows_make_rows_of_their_own():
    text = page.text(
        [
            run(case(), measured(12.0)),
            run(case(retries=True), measured(12.0)),
            run(case(window=None), measured(12.0)),
        ]
    )
    assert "| smg least_load | 128 |" in text
    assert "| smg least_load, with retries | 128 |" in text
    assert "| smg least_load | unlimited |" in text


def test_the_page_says_when_on_what_and_with_which_versions():
    text = page.text(
        [run(case(), measured(12.0)), run(case("forebay/all", seed=3), measured(11.0), load=2.5)]
    )
    assert "Measured 2026-11-01 to 2026-11-03 on 2 cores, 24 GiB, Python 3.11.7." in text
    assert "0.5 to 2.5, median 1.5" in text
    assert "Versions: Forebay 1.2, smg 1.2." in text


def test_without_a_run_the_page_says_so():
    assert "Nothing has been measured yet." in page.text([])


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (measured(12.0, **{"503": 2}), "1.20 times the bound (12.0 s), failed 503: 2, 2.50 ms CPU a request"),
        (measured(12.0, beside_s=3.25), "interactive p99 3.25 s"),
    ],
)
def test_a_run_is_told_in_one_line(told: Measured, words: str):
    assert words in page.said(run(case(), told))
