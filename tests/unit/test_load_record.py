"""A load keeps what was said, and what was not said stays unknown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.load import Load, LoadSource

COUNTS = ("running", "waiting", "used_tokens", "capacity_tokens", "max_running", "generation_tokens_total")
REALS = ("kv_usage_max", "gen_throughput", "drain_rate", "token_rate", "capacity_rate")
FACTS = st.fixed_dictionaries(
    {"sampled_at": st.floats(0, 1e10), "received_at": st.floats(0, 1e10)},
    optional={
        **{name: st.none() | st.integers(0, 2**53) for name in COUNTS},
        **{name: st.none() | st.floats(0, 1e300) for name in REALS},
        "version": st.none() | st.text(min_size=1),
    },
)


@given(FACTS, st.sampled_from(list(LoadSource)))
def test_a_load_comes_back_from_redis_as_it_was(facts, source):
    load = Load(source=source, **facts)
    fields = load.to_hash()
    assert Load.from_hash(fields) == load
    assert all(isinstance(text, str) for text in fields.values())


@given(FACTS)
def test_the_unknown_has_no_field_and_zero_has_one(facts):
    load = Load(source=LoadSource.METRICS, **facts)
    known = {name for name, value in load.model_dump().items() if value is not None}
    assert set(load.to_hash()) == known


def test_what_a_newer_monitor_knows_of_a_load_besides_is_left_out():
    load = Load(source=LoadSource.METRICS, sampled_at=1.0, received_at=1.0, running=3)
    assert Load.from_hash({**load.to_hash(), "unheard_of": "7"}) == load


def test_no_hash_is_no_load():
    assert Load.from_hash({}) is None


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, "many"])
@pytest.mark.parametrize("name", ["running", "kv_usage_max", "drain_rate", "sampled_at"])
def test_impossible_numbers_are_refused(name, wrong):
    facts = {"source": LoadSource.NATIVE, "sampled_at": 1.0, "received_at": 1.0} | {name: wrong}
    with pytest.raises(ValidationError):
        Load(**facts)
