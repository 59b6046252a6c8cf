"""The JSON about workers that scripts rely on."""

from __future__ import annotations

import msgspec

from forebay.cli import shapes
from tests.fleets import load, worker
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
