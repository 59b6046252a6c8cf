"""Strategies as configuration: what is accepted, what is refused in which words, which one is used."""

import math

import pytest
from pydantic import ValidationError

from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import DEFAULTS, SchedulerPolicy, Strategies, Strategy, StrategySpec
from workers.errors import SettingsError


def need(cost_tokens=100, strategy=None):
    return Need("llama", 10, 10, cost_tokens, strategy=strategy)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": {"queue": 1, "latency": 1}}, "no scorer is named latency; there are queue, kv"),
        ({"weights": {"queue": -1}}, "greater than or equal to 0"),
        ({"weights": {"queue": math.inf}}, "finite"),
        ({"weights": {"queue": 0, "kv": 0}}, "at least one scorer needs a weight above 0"),
        ({"weights": {}}, "at least one scorer needs a weight above 0"),
        ({"weights": {"queue": 1}, "picker": "best"}, "no picker is named best; there are max-score"),
        ({"weights": {"queue": 1}, "temperature": 0}, "greater than 0"),
        ({"weights": {"queue": 1}, "colour": "red"}, "Extra inputs"),
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused_in_clear_words(fields, words):
    with pytest.raises(ValidationError, match=words):
        StrategySpec(**fields)


def test_a_policy_with_an_unknown_default_is_refused():
    with pytest.raises(ValidationError, match="no strategy is named fast; there are chat, batch"):
        SchedulerPolicy(default_strategy="fast")


def test_a_policy_whose_loads_die_before_they_are_stale_is_refused():
    with pytest.raises(ValidationError, match="dead_after_s must be above stale_after_s"):
        SchedulerPolicy(stale_after_s=5, dead_after_s=5)


def test_weights_are_parts_of_the_whole_and_a_weight_of_nothing_is_left_out():
    strategy = Strategy.of("long-context", DEFAULTS["long-context"])
    shares = {scorer.name: share for scorer, share in strategy.shares}
    assert shares == pytest.approx(
        {
            "queue": 2 / 15,
            "kv": 4 / 15,
            "inflight": 1 / 15,
            "load": 3 / 15,
            "speed": 4 / 15,
            "weight": 1 / 15,
        }
    )


def test_a_request_goes_by_the_strategy_it_names_and_else_by_the_default():
    strategies = Strategies(SchedulerPolicy(default_strategy="chat"))
    assert strategies.for_request(need()).name == "chat"
    assert strategies.for_request(need(strategy="batch")).name == "batch"


def test_a_long_request_goes_by_long_context_whatever_it_names():
    strategies = Strategies(SchedulerPolicy())
    assert strategies.for_request(need(8_192, "batch")).name == "batch"
    assert strategies.for_request(need(8_193, "batch")).name == "long-context"


def test_a_request_that_names_no_strategy_of_ours_is_told_which_there_are():
    with pytest.raises(
        SettingsError, match="no strategy is named quick; there are chat, batch, long-context"
    ):
        Strategies(SchedulerPolicy()).for_request(need(strategy="quick"))


def test_a_configured_strategy_stands_beside_the_defaults_or_replaces_one():
    policy = SchedulerPolicy(
        strategies={"kv-only": {"weights": {"kv": 1}}, "chat": {"weights": {"queue": 1}, "picker": "softmax"}}
    )
    strategies = Strategies(policy)
    assert [scorer.name for scorer, _ in strategies.for_request(need(strategy="kv-only")).shares] == ["kv"]
    assert strategies.for_request(need(strategy="chat")).picker_name == "softmax"
    assert strategies.for_request(need(strategy="batch")).picker_name == "max-score"
