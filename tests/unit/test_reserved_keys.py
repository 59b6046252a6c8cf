"""What an operator says of `priority` and `user` is done to the body that is sent, and nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dispatcher.batches.ledger import Entry
from dispatcher.batches.parse import parse_line
from dispatcher.batches.plan import PlannedRequest
from dispatcher.exchange import Exchange
from dispatcher.reserved import ReservedKeys, with_changes
from dispatcher.service import Dispatcher
from dispatcher.settings import DispatcherSettings

ODD = (
    '{ "model" : "m",\t"x":1.10e2, "big":12345678901234567890123, "u":"\\u00e9 \u2028", '
    '"z": [ -0.0 , {"priority": 9}] }'
)


def applied(body, **policy):
    return with_changes(body.encode(), ReservedKeys(**policy).changes).decode()


def test_by_default_a_body_passes_as_it_is():
    body = '{"priority": 5, "user": "me"}'
    assert ReservedKeys().changes == {}
    assert applied(body) == body


@pytest.mark.parametrize("policy", [{}, {"priority": "drop"}, {"priority": "drop", "user": "drop"}], ids=str)
def test_a_body_without_the_key_is_the_same_bytes(policy):
    assert applied(ODD, **policy) == ODD


def test_a_key_that_is_dropped_is_not_sent_and_the_others_are_the_same_bytes():
    body = ODD[:-1] + ', "priority" : 3, "user":"me"}'
    sent = applied(body, priority="drop")
    assert sent == (
        '{"model":"m","x":1.10e2,"big":12345678901234567890123,"u":"\\u00e9 \u2028",'
        '"z":[ -0.0 , {"priority": 9}],"user":"me"}'
    )


def test_a_key_that_is_set_has_the_operator_s_value_in_every_body_in_its_place():
    policy = {"priority": "set", "priority_value": 7, "user": "set", "user_value": 'the "batch" team'}
    assert applied('{"priority":1,"model":"m"}', **policy) == (
        '{"priority":7,"model":"m","user":"the \\"batch\\" team"}'
    )
    assert applied("{}", **policy) == '{"priority":7,"user":"the \\"batch\\" team"}'


def test_a_body_that_says_already_what_is_set_is_the_same_bytes():
    body = '{"model": "m", "priority": 7}'
    assert applied(body, priority="set", priority_value=7) == body


def test_a_key_that_is_spelled_with_escapes_is_the_same_key():
    assert applied('{"pr\\u0069ority": 1, "model": "\\u00e9"}', priority="drop") == '{"model":"\\u00e9"}'
    body = '{"model": "\\u00e9"}'
    assert applied(body, priority="drop") == body


def test_a_user_is_not_set_to_nobody():
    with pytest.raises(ValidationError, match="user_value"):
        ReservedKeys(user="set")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["priority", "user", "model", "é", "x"]) | st.text(), values, max_size=6),
    st.sampled_from(["keep", "drop", "set"]),
    st.sampled_from(["keep", "drop", "set"]),
    st.booleans(),
)
def test_only_the_reserved_keys_ever_change(body, priority, user, ascii_only):
    source = json.dumps(body, ensure_ascii=ascii_only).encode()
    policy = ReservedKeys(priority=priority, priority_value=3, user=user, user_value="us")
    expected = dict(body)
    for key, rule, value in (("priority", priority, 3), ("user", user, "us")):
        if rule == "set":
            expected[key] = value
        elif rule == "drop":
            expected.pop(key, None)
    sent = with_changes(source, policy.changes)
    assert json.loads(sent) == expected
    if expected == body and list(expected) == list(body) and "keep" == priority == user:
        assert sent == source


def test_the_body_that_is_sent_is_the_changed_one_and_the_line_stays_as_it_is():
    source = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x","user":"me"}}'
    line = parse_line(1, source)
    entry = Entry("batch_1", "in_progress", *[0] * 9, "default", 0.0, 0.0, fields={})
    planned = PlannedRequest(1, 0, len(source), None, 1, None, 2, 0)
    bodies = [
        Exchange(entry, urgency=1, deadline_s=1.0, late_code="late", usually_hedge=False, reserved=changes)
        .request(planned, line, frozenset())
        .body
        for changes in (None, {"user": None}, {"user": "us"})
    ]
    assert bodies == [b'{"prompt":"x","user":"me"}', b'{"prompt":"x"}', b'{"prompt":"x","user":"us"}']
    assert line.body == bodies[0]


async def test_a_dispatcher_is_told_by_its_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREBAY_RESERVED_KEYS__PRIORITY", "drop")
    monkeypatch.setenv("FOREBAY_RESERVED_KEYS__USER", "set")
    monkeypatch.setenv("FOREBAY_RESERVED_KEYS__USER_VALUE", "us")
    dispatcher = Dispatcher(DispatcherSettings(storage=str(tmp_path)))
    assert dispatcher._shards.reserved == {"priority": None, "user": "us"}
    await dispatcher._close(None)
