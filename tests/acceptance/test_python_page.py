"""docs/python.md: its examples run, in their order, and say what they promise."""

from __future__ import annotations

import asyncio
import re

import pytest

from dispatcher.batches.errors import StorageError
from forebay import errors as front
from tests.acceptance.conftest import ROOT, rows
from tests.checkout import code_of
from tests.checkout import rows as table
from workers import errors as shared

pytestmark = pytest.mark.acceptance

PAGE = ROOT / "docs" / "python.md"
BLOCKS = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"))


def run_page(redis_url: str, storage: str) -> dict[str, object]:
    """Runs the page as one program, with its addresses exchanged for those of the test."""
    program = "\n".join(BLOCKS)
    for written, real in (("redis://redis:6379/0", redis_url), ("/srv/forebay", storage)):
        assert program.count(written) == 1
        program = program.replace(written, real)
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(program, str(PAGE), "exec"), names)
    return names


async def test_the_examples_of_the_page_run_and_say_what_they_promise(rig, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows(20)), encoding="utf-8")
    await rig.ready_engine(slots=8)
    rig.dispatcher("d1", watch_interval_s=0.1, explain_sample=1)
    names = await asyncio.to_thread(run_page, rig.redis_url, rig.storage.url)
    said = capsys.readouterr().out.splitlines()
    assert f"{names['batch'].id} in_progress 20" in said
    assert "1 missing_required_parameter method is missing" in said
    assert "completed 20 0" in said
    assert "2 of 2, " in "\n".join(said)
    assert sum(re.match(r"c\d+ \w", line) is not None for line in said) == 20
    assert "answers.jsonl None" in said
    assert f"retried: {names['again'].request_counts.total} True" in said
    assert names["lost"] == []
    assert names["answer"].ok
    assert len(names["explained"].attempts) == 1
    assert len((tmp_path / "answers.jsonl").read_bytes().splitlines()) == 20
    assert not (tmp_path / "failed.jsonl").exists()


def test_the_errors_of_the_page_stand_where_it_says():
    homes = {"forebay.errors": front, "workers.errors": shared}
    for row in table(PAGE, below="What is raised"):
        [home] = code_of(row[1])
        for name in code_of(row[0]):
            found = StorageError if home == "dispatcher.batches.errors" else getattr(homes[home], name)
            assert found.__name__ == name
            assert issubclass(found, Exception)
