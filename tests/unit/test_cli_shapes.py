"""The JSON about workers that scripts rely on."""

from __future__ import annotations

import msgspec

from forebay.cli import shapes
from forebay.cli.workers import _as_json, _details, _loads_table
from monitor.sweep import Swept
from tests.fleets import idle_load, load, worker
from workers.breaker import BreakerState
from workers.spec import Runtime
from workers.store import Memo


def test_a_worker_has_the_promised_keys():
    view = worker(
        "gpu-1:8000",
        runtime=Runtime.SGLANG,
        load=load(running=3, rank_count=2),
        breaker=BreakerState.OPEN,
        breaker_trips=2,
        breaker_open_until=5.0,
        breaker_reason="503",
    )
    shape = msgspec.json.decode(msgspec.json.encode(shapes.worker(view, Memo("404", 1, 9.0))))
    assert shape["id"] == "gpu-1:8000"
    assert shape["runtime"] == "sglang"
    assert shape["models"] == ["llama"]
    assert shape["load"]["running"] == 3
    assert shape["load"]["rank_count"] == 2
    assert shape["breaker"] == {"state": "open", "trips": 2, "open_until": 5.0, "reason": "503"}
    assert shape["memo"] == {"reason": "404", "until": 9.0}
    assert {"url", "state", "reason", "incarnation", "max_model_len", "limit", "leases"} <= shape.keys()


def test_what_a_worker_has_not_said_is_null_and_never_zero():
    shape = shapes.worker(worker(load=load(running=0)), None)
    assert shape["load"]["running"] == 0
    assert shape["load"]["waiting"] is None
    assert shape["load"]["gen_throughput"] is None
    assert shape["memo"] is None
    assert shapes.worker(worker(load=None), None)["load"] is None


def test_an_unknown_load_is_minus_one_and_an_idle_one_is_zero():
    swept = [
        Swept("a:1", None, "metrics: status 500"),
        Swept("b:1", load(running=3)),
        Swept("c:1", idle_load()),
        Swept("d:1", load(running=3, waiting=2, kv_usage_max=0.5)),
    ]
    shown = [_as_json(one) for one in swept]
    assert [one["load"] for one in shown] == [-1, -1, 0, 5]
    assert [one["running"] for one in shown] == [-1, 3, 0, 3]
    assert [one["kv_usage_max"] for one in shown] == [-1, -1, 0.0, 0.5]
    assert shown[0]["source"] == "none"
    assert _loads_table(swept).row_count == 4


def test_a_worker_for_people_says_why_its_limit_is_what_it_is_and_since_when():
    view = worker(
        load=load(running=0), limit=9, limit_reason="shrink: 4 waiting, 8 running", limit_since=1_000_000.0
    )
    table = _details(view, Memo("status 404", 1, 1_000_060.0), now_s=1_000_030.0)
    rows = {
        str(name): str(value)
        for name, value in zip(*(column._cells for column in table.columns), strict=True)
    }
    assert rows["limit"] == "9"
    assert rows["limit_reason"] == "shrink: 4 waiting, 8 running"
    assert rows["limit_since"] == "30 s ago"
    assert rows["memo.reason"] == "status 404"
    assert rows["memo.until"] == "in 30 s"
    assert rows["load.waiting"] == "-"
