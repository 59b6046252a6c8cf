"""Strategies of `forebay.toml`: a dispatcher goes by them, and says in one line where one is wrong."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dispatcher.archive import Archive
from forebay.cli.main import app
from tests.acceptance.conftest import rows
from workers.spec import WorkerSpec, worker_id

pytestmark = pytest.mark.acceptance

FILE = """
[dispatcher.scheduler]
default_strategy = "favourite"

[dispatcher.scheduler.strategies.favourite]
weights = { weight = 3, kv = 1 }
picker = "max-score"

[dispatcher.scheduler.strategies.chat]
weights = { inflight = 2 }
picker = "round-robin"
"""


async def decisions(rig, batch):
    """The records of a batch's requests, once all of them are kept."""
    archive = Archive(rig.store.client)

    async def found():
        records = [of for [of] in await archive.of_requests(await archive.requests(batch))]
        return records if len(records) == 12 else None

    return await rig.until(found, "every decision is recorded")


async def test_a_dispatcher_goes_by_the_strategies_of_its_file(rig, tmp_path):
    file = tmp_path / "forebay.toml"
    file.write_text(FILE, encoding="utf-8")
    for weight in (1, 5):
        engine = await rig.engine(slots=16)
        await rig.store.register(WorkerSpec(url=engine.url, weight=weight), replace=True)
    rig.monitor()
    await rig.ready()
    rig.dispatcher("d1", config=file, explain_sample=1)
    batch = await rig.submit(rows(12), slots=16)
    assert (await rig.ended(batch))[0] == "completed"
    records = await decisions(rig, batch)
    assert {(record.strategy, record.picker) for record in records} == {("favourite", "max-score")}
    assert all(record.weights == {"weight": 0.75, "kv": 0.25} for record in records)
    favourite = worker_id(rig.engines[1].url)
    offered = [record for record in records if favourite in {one.worker for one in record.candidates}]
    assert {record.picked for record in offered} == {favourite}
    for strategy, seen in (("chat", ("chat", "round-robin")), ("batch", ("batch", "max-score"))):
        batch = await rig.submit(rows(12), slots=16, strategy=strategy)
        assert (await rig.ended(batch))[0] == "completed"
        assert {(record.strategy, record.picker) for record in await decisions(rig, batch)} == {seen}


STRATEGY = "[dispatcher.scheduler.strategies.mine]\n"
KEY = "scheduler.strategies.mine"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (STRATEGY + "weights = { latency = 1 }", (f"{KEY}.weights: ", "no scorer is named latency")),
        (STRATEGY + "weights = { kv = -1 }", (f"{KEY}.weights.kv: ", "greater than or equal to 0")),
        (STRATEGY + "weights = { kv = nan }", (f"{KEY}.weights.kv: ", "finite")),
        (STRATEGY + "weights = { kv = 1e308, queue = 1e308 }", (f"{KEY}.weights.kv: ", "less than or equal")),
        (STRATEGY + "weights = { kv = 0, queue = 0.0 }", (f"{KEY}.weights: ", "needs a weight above 0")),
        (STRATEGY + 'weights = { kv = 1 }\npicker = "best"', (f"{KEY}.picker: ", "no picker is named best")),
        (STRATEGY + "weights = { kv = 1 }\ncolour = 1", (f"{KEY}.colour: ", "not permitted")),
        (STRATEGY, (f"{KEY}.weights: ", "required")),
        ('[dispatcher.scheduler]\ndefault_strategy = "mine"', ("scheduler: ", "no strategy is named mine")),
    ],
)
def test_a_mistake_in_a_strategy_ends_the_dispatcher_with_one_line_that_names_the_key(
    tmp_path, monkeypatch, text, told
):
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    ended = CliRunner().invoke(
        app, ["dispatcher", "--redis", f"unix://{tmp_path}/nobody"], prog_name="forebay"
    )
    assert ended.exit_code == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("forebay dispatcher: ")
    assert all(part in line for part in told)
