"""`forebay simulate-policy`: how fleets and lengths are written, what mistakes say, and what is printed."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.policy.engine import EngineSpec
from forebay.policy.texts import Drawing, read_engines, read_lengths
from forebay.policy.workload import Lengths
from workers.errors import SettingsError

FLEET = ("--fleet", "2xspeed=100,slots=8", "--fleet", "speed=400,slots=32")
LENGTHS = ("--lengths", "lognormal:median=64,sigma=0.5,count=200,seed=3")


@pytest.fixture
def simulate(monkeypatch, tmp_path):
    """Runs the command in an empty folder; gives its exit code and what it said."""
    monkeypatch.delenv("FOREBAY_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        result = CliRunner().invoke(app, ["simulate-policy", *map(str, words)], prog_name="forebay")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, result.output

    return run


def a_batch(path, ceilings):
    with path.open("wb") as file:
        for number, ceiling in enumerate(ceilings):
            body = {"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": ceiling}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(msgspec.json.encode(line) + b"\n")
    return path


def test_an_engine_is_written_as_speed_and_slots_with_a_count_before_it():
    assert read_engines("speed=100,slots=8") == [EngineSpec(100, 8)]
    assert read_engines("3xspeed=2.5,slots=1,prefill=8000") == [EngineSpec(2.5, 1, 8000)] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("speed=100", "slots missing"),
        ("", "unknown ; there are"),
        ("speed=0,slots=8", "speed is a number above 0"),
        ("speed=nan,slots=8", "speed is a number above 0"),
        ("speed=1,slots=0", "slots is a whole number above 0"),
        ("speed=1,slots=1.5", "slots is a whole number above 0"),
        ("speed=1,slots=1,prefill=-1", "prefill is a number 0 or more"),
        ("speed=1,slots=1,slots=2", "said twice"),
        ("speed=1,slots=1,colour=red", "unknown colour"),
        ("0xspeed=1,slots=1", "1 to 10,000 engines"),
        ("99999xspeed=1,slots=1", "1 to 10,000 engines"),
    ],
)
def test_a_bad_fleet_is_refused_by_name(text, says):
    with pytest.raises(SettingsError, match=says):
        read_engines(text)


def test_lengths_are_written_as_a_lognormal():
    assert read_lengths("lognormal:median=10,sigma=0,count=5,seed=2,most=99") == Drawing(
        Lengths(10, 0, 99), 5, 2
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("normal:median=1,sigma=1", "write lognormal:"),
        ("lognormal", "write lognormal:"),
        ("lognormal:median=1", "sigma missing"),
        ("lognormal:median=1,sigma=-1", "sigma is a number 0 or more"),
        ("lognormal:median=1,sigma=1,count=9999999", "1,000,000 at most"),
    ],
)
def test_bad_lengths_are_refused_by_name(text, says):
    with pytest.raises(SettingsError, match=says):
        read_lengths(text)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--fleet", "fast"), "unknown fast"),
        ((*FLEET, "--strategy", "swift"), "no strategy is named swift; there are chat, batch"),
        ((*FLEET, "--batch", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        ((*FLEET, "--policy", "nowhere.toml"), "nowhere.toml: there is no such file"),
        ((*FLEET, "--lengths", "short"), "write lognormal:"),
    ],
)
def test_a_mistake_is_named_and_ends_with_2(simulate, words, says):
    code, said = simulate(*words)
    assert (code, said.count("\n")) == (2, 1)
    assert says in said


def test_a_fleet_has_to_be_named(simulate):
    code, said = simulate(*LENGTHS)
    assert code == 2
    assert "--fleet" in said


def test_a_policy_that_makes_no_sense_is_refused(simulate, tmp_path):
    file = tmp_path / "try.toml"
    file.write_text("[dispatcher.scheduler.strategies.mine]\nweights = { luck = 1 }\n")
    code, said = simulate(*FLEET, "--policy", file)
    assert code == 2
    assert "no scorer is named luck" in said


def test_a_batch_with_a_bad_line_is_refused_with_its_number(simulate, tmp_path):
    batch = tmp_path / "bad.jsonl"
    batch.write_bytes(a_batch(batch, [8]).read_bytes() + b"{}\n")
    code, said = simulate(*FLEET, "--batch", batch)
    assert code == 2
    assert "line 2" in said


def test_a_batch_may_hold_what_submit_lets_it_hold(simulate, tmp_path, monkeypatch):
    batch = a_batch(tmp_path / "in.jsonl", [8, 8, 8])
    monkeypatch.setenv("FOREBAY_INPUT__MAX_LINES", "2")
    code, said = simulate(*FLEET, "--batch", batch)
    assert code == 2
    assert "more than 2" in said


def test_strategies_are_compared_on_the_same_requests(simulate):
    code, said = simulate(*FLEET, *LENGTHS, "--strategy", "batch", "--strategy", "chat", "--json")
    assert code == 0
    batch, chat = msgspec.json.decode(said)
    assert (batch["strategy"], chat["strategy"]) == ("batch", "chat")
    assert batch["requests"] == chat["requests"] == 200
    assert batch["lower_bound_s"] == chat["lower_bound_s"]
    assert [share["worker"] for share in batch["workers"]] == ["worker-0", "worker-1", "worker-2"]


def test_a_batch_file_gets_as_many_tokens_as_it_asks_for_unless_lengths_are_unknown(simulate, tmp_path):
    batch = a_batch(tmp_path / "in.jsonl", [100, 200, 2000])
    code, said = simulate(*FLEET, "--batch", batch, "--json")
    assert (code, msgspec.json.decode(said)[0]["tokens"]) == (0, 2300)
    code, said = simulate(*FLEET, "--batch", batch, "--lengths-unknown", "--json")
    assert code == 0
    assert 3 <= msgspec.json.decode(said)[0]["tokens"] < 2300


def test_a_strategy_of_a_policy_file_can_be_tried(simulate, tmp_path):
    file = tmp_path / "try.toml"
    file.write_text(
        '[dispatcher.scheduler.strategies.turns]\npicker = "round-robin"\nweights = { weight = 1 }\n'
    )
    code, said = simulate(*FLEET, *LENGTHS, "--policy", file, "--strategy", "turns")
    assert code == 0
    assert said.splitlines()[1].split()[0] == "turns"


def test_of_a_large_fleet_the_first_workers_and_the_spread_are_shown(simulate):
    code, said = simulate("--fleet", "20xspeed=100,slots=2", *LENGTHS)
    assert code == 0
    assert "worker-11" in said
    assert "worker-12" not in said
    assert "... and 8 more; slots busy from" in said
