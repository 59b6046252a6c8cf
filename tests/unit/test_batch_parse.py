"""The contract of one line of a batch file."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batches import parse
from dispatcher.batches.parse import ALLOWED_URLS, BadLine, Line, parse_line
from dispatcher.batches.prompt import asked_tokens, measure, prompt_tokens


def written(**changes: Any) -> bytes:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    }
    return json.dumps(line | changes).encode()


def accepted(raw: bytes) -> Line:
    line = parse_line(2, raw)
    assert isinstance(line, Line), line
    return line


def refused(raw: bytes) -> BadLine:
    bad = parse_line(2, raw)
    assert isinstance(bad, BadLine), bad
    return bad


def test_a_body_is_kept_exactly_as_it_was_written() -> None:
    body = b'{ "model":"m" ,"seed": 1.50e0, "x":"\\u00e9\xc3\xa9", "big": 12345678901234567890123}'
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + body + b" }\r"
    assert accepted(raw).body == body


def test_a_line_says_what_routing_needs() -> None:
    body = {"model": "m", "prompt": "x" * 10, "max_tokens": 7}
    line = accepted(written(url="/v1/completions", body=body, forebay={"strategy": "chat"}, other=1))
    assert (line.number, line.custom_id, line.url, line.model) == (2, "a", "/v1/completions", "m")
    assert (line.prompt_chars, line.asked_tokens, line.strategy) == (10, 7, "chat")


def test_a_body_without_a_model_may_go_to_any_worker() -> None:
    assert accepted(written(body={"prompt": "x"})).model is None
    assert accepted(written(body={"prompt": "x", "model": None})).model is None


@pytest.mark.parametrize("url", sorted(ALLOWED_URLS))
def test_every_allowed_url_is_accepted_and_no_other_spelling_of_it(url: str) -> None:
    assert accepted(written(url=url)).url == url
    for other in (
        url[1:],
        url + "/",
        url.upper(),
        url + "#",
        "/" + url,
        url + "?",
        url + "\n",
        url[:4] + "./x",
    ):
        assert refused(written(url=other)).param == "url"


@pytest.mark.parametrize("stream", [True, 1, "true", {}])
def test_anything_that_an_engine_may_read_as_streaming_is_refused(stream: Any) -> None:
    assert refused(written(body={"stream": stream})).code == "stream_not_supported"


@pytest.mark.parametrize("stream", [False, None])
def test_a_stream_that_is_off_is_accepted(stream: Any) -> None:
    assert accepted(written(body={"stream": stream}))


@pytest.mark.parametrize("model", [7, "", "m" * 513, ["m"]])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    assert refused(written(body={"model": model})).param == "body.model"


@pytest.mark.parametrize(("options", "param"), [(7, "forebay"), ({"strategy": 1}, "forebay.strategy")])
def test_options_of_a_wrong_type_are_refused(options: Any, param: str) -> None:
    assert refused(written(forebay=options)).param == param


@pytest.mark.parametrize("length", [1, 512])
def test_a_custom_id_may_have_up_to_512_characters(length: int) -> None:
    assert accepted(written(custom_id="é" * length)).custom_id == "é" * length


@pytest.mark.parametrize("raw", [b"", b"  \t\r", b"\r"])
def test_a_blank_line_is_neither_good_nor_bad(raw: bytes) -> None:
    assert parse_line(3, raw) is None


def test_a_byte_order_mark_is_dropped_on_the_first_line_only() -> None:
    assert parse_line(1, b"\xef\xbb\xbf") is None
    assert isinstance(parse_line(1, b"\xef\xbb\xbf" + written()), Line)
    assert "byte order mark" in refused(b"\xef\xbb\xbf" + written()).message


@pytest.mark.parametrize("depth", [900, 1000, 5000, 200_000])
def test_a_line_nested_to_any_depth_is_read_or_refused_but_never_a_crash(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":' + nested + b"}}"
    assert parse_line(2, raw) is not None


def test_a_lone_half_of_a_surrogate_pair_is_refused() -> None:
    assert refused(written().replace(b"hello", b"\\ud800")).code == "invalid_json_line"


def test_a_message_never_grows_with_the_line() -> None:
    assert len(refused(written(method="x" * 100_000)).message) < 500


scalars = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=5), st.just('":'))


class Pairs(list[tuple[str, Any]]):
    """An object as it is written, in which a key may come twice."""


keys = st.sampled_from(["a", "b", "c:", 'd"', "e\\", "\\u003a"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(keys, inner), max_size=3).map(Pairs),
    max_leaves=8,
)


def spelt(value: Any, colon: str) -> str:
    if isinstance(value, Pairs):
        members = (f"{json.dumps(key)}{colon}{spelt(item, colon)}" for key, item in value)
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(spelt(item, colon) for item in value) + "]"
    return json.dumps(value)


def repeats(value: Any) -> bool:
    if isinstance(value, Pairs):
        return len({key for key, _ in value}) < len(value) or any(repeats(item) for _, item in value)
    return isinstance(value, list) and any(repeats(item) for item in value)


@given(values, st.sampled_from([":", " : ", "\t:\r"]), st.booleans())
def test_a_key_given_twice_at_any_depth_refuses_the_line_and_nothing_else_does(
    value: Any, colon: str, escaped: bool
) -> None:
    text = spelt(value, colon)
    if escaped:
        text = text.replace("c:", "c\\u003a")
    raw = written(body={"x": 0}).replace(b'"x": 0', b'"x":' + text.encode())
    found = parse_line(2, raw)
    assert isinstance(found, BadLine) == repeats(value)
    if isinstance(found, BadLine):
        assert found.code == "duplicate_key"


def test_a_duplicate_that_hides_behind_an_escaped_colon_is_found() -> None:
    # The lost value's colon is written as an escape, so both sides have equally many colons.
    raw = written().replace(b'"model": "m"', b'"k":"\\u003a","k":"\\u003a","model":"m"')
    assert refused(raw).param == "k"


@given(st.binary(max_size=200))
def test_no_bytes_at_all_crash_the_parser(raw: bytes) -> None:
    assert isinstance(parse_line(2, raw), BadLine | None)


def test_a_lines_last_bytes_are_checked_although_only_the_body_is_used() -> None:
    assert refused(written() + b"x").code == "invalid_json_line"
    assert refused(written().replace(b'"a"', b'"\xff"')).code == "invalid_json_line"


@pytest.mark.parametrize(
    ("body", "characters"),
    [
        ({"prompt": "abc"}, 3),
        ({"prompt": ["abc", "de"]}, 5),
        ({"prompt": [1, 2, 3]}, 12),
        ({"prompt": [[1, 2], [3]]}, 12),
        ({"input": "abc"}, 3),
        ({"instructions": "ab", "input": [{"role": "user", "content": "c"}]}, 3),
        (
            {
                "messages": [
                    {"content": "ab"},
                    {"content": [{"type": "text", "text": "cd"}, {"type": "image_url"}]},
                ]
            },
            4,
        ),
        ({"messages": [{"content": None}, {"content": 7}, "stray"]}, 5),
        ({"query": "ab", "documents": ["c", "d"]}, 4),
        ({"text_1": "ab", "text_2": ["c"]}, 3),
        ({}, 0),
        ({"messages": {}}, 0),
    ],
)
def test_a_prompts_characters_are_counted_wherever_an_api_puts_them(
    body: dict[str, Any], characters: int
) -> None:
    assert measure(body).characters == characters


def test_tokens_are_a_quarter_of_the_characters_rounded_up() -> None:
    assert [prompt_tokens(count) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 4, "max_tokens": 5}, 4),
        ({"max_output_tokens": 6}, 6),
        ({"max_tokens": None}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 2**40}, None),
    ],
)
def test_asked_tokens_are_a_number_that_makes_sense_or_none(body: dict[str, Any], tokens: int | None) -> None:
    assert asked_tokens(body) == tokens


def chat(system: str | None, user: str, model: str = "m") -> int:
    messages = [{"role": "system", "content": system}] if system else []
    return measure({"model": model, "messages": [*messages, {"role": "user", "content": user}]}).prefix_key


def test_requests_share_a_prefix_key_by_model_and_system_prompt() -> None:
    assert chat("s", "one") == chat("s", "two")
    assert chat("s", "one") != chat("t", "one")
    assert chat("s", "one") != chat("s", "one", model="n")


def test_without_a_system_prompt_the_first_256_characters_decide() -> None:
    assert chat(None, "x" * 256 + "one") == chat(None, "x" * 256 + "two")
    assert chat(None, "x" * 255 + "one") != chat(None, "x" * 255 + "two")


def test_a_prefix_key_is_the_same_in_every_process() -> None:
    assert chat("s", "one") == 10499756046313994569


def test_the_line_is_decoded_by_a_decoder_that_refuses_what_json_lacks() -> None:
    for raw in (b"[NaN]", b"[Infinity]", b"[1e400]", b'["\xff"]'):
        with pytest.raises(msgspec.DecodeError):
            parse._decode(raw)
