"""What the front door is told of input files, by variables and by `forebay.toml`."""

from __future__ import annotations

import pytest

from dispatcher.batches.intake import Limits
from forebay.settings import front_settings
from workers.errors import SettingsError


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    """The file that is read; it is empty unless a test writes it."""
    file = tmp_path / "forebay.toml"
    file.touch()
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    return file


def test_an_input_file_is_bounded_unless_it_is_said():
    assert front_settings().input == Limits()


def test_what_an_input_file_may_hold_stands_in_the_file_and_in_variables(config, monkeypatch):
    config.write_text("input = { max_lines = 5 }\n", encoding="utf-8")
    assert front_settings().input == Limits(max_lines=5)
    monkeypatch.setenv("FOREBAY_INPUT__MAX_LINE_BYTES", "1000")
    assert front_settings().input.max_line_bytes == 1000


@pytest.mark.parametrize("bad", ["{ max_lines = 0 }", "{ max_words = 1 }", "{ max_line_bytes = 4294967296 }"])
def test_what_makes_no_sense_is_refused_with_its_name(config, bad):
    config.write_text(f"input = {bad}\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"input\.max_"):
        front_settings()


def test_a_file_is_held_to_what_is_set(config, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from forebay.cli.main import app

    monkeypatch.chdir(tmp_path)
    config.write_text("input = { max_lines = 2 }\n", encoding="utf-8")
    line = '{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":"a"}}\n'
    (tmp_path / "in.jsonl").write_text("".join(line % number for number in range(3)), encoding="utf-8")
    words = ["run", "in.jsonl", "-o", "out.jsonl", "--worker", "http://127.0.0.1:9"]
    result = CliRunner().invoke(app, words, prog_name="forebay")
    assert (result.exit_code, "the file has more than 2 lines" in result.output) == (2, True)
