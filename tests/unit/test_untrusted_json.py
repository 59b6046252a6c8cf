"""JSON that means harm: it is refused or passed on as text, at the same depth for whoever reads it."""

from __future__ import annotations

import io
import json
import sys
import threading
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batches.intake import Limits, take_in
from dispatcher.batches.nesting import DEEPEST, nested_too_deep
from dispatcher.batches.parse import BadLine, Line, parse_line
from dispatcher.batches.parts import Entry, PartWriter, first_entries
from dispatcher.batches.results import Usage, result_line
from dispatcher.batches.storage import Storage
from dispatcher.inline import _decoded
from dispatcher.inline_request import LONGEST_REQUEST, InlineRequestError, read_request
from dispatcher.outcome import Label, classify, is_json_object
from dispatcher.reply import Reply
from monitor.detect import _fields
from monitor.http import Answer
from monitor.probe import judge
from monitor.readiness import _entries

HUGE = 100_000


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def line(body: bytes) -> bytes:
    return b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + body + b"}"


def below(frames: int, call):
    """What a call gives that has so many callers above it."""
    return call() if frames == 0 else below(frames - 1, call)


# -- depth ---------------------------------------------------------------------------------------------------


def depth(value) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


documents = st.recursive(
    st.one_of(st.none(), st.integers(), st.text('[]{}"\\', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text('[{"\\'), inner, max_size=3)
    ),
)


@given(documents, st.integers(0, 6))
def test_depth_is_that_of_arrays_and_objects_whatever_strings_hold(value, deepest: int) -> None:
    assert nested_too_deep(json.dumps(value).encode(), deepest) == (depth(value) > deepest)


@given(st.binary(max_size=100).map(lambda data: data + b'"[[' * 3))
def test_bytes_that_are_no_json_have_some_depth_too(data: bytes) -> None:
    assert nested_too_deep(data, 1) in (True, False)


def test_an_unclosed_string_of_backslashes_is_passed_in_one_go() -> None:
    assert nested_too_deep(b"[" * 300 + b'"' + b"\\" * 2_000_001) is True
    assert nested_too_deep(b'"' + b"\\[" * 2_000_000) is False


def test_a_line_is_read_up_to_a_depth_that_does_not_depend_on_who_reads_it() -> None:
    inside = line(b'{"x":' + nested(DEEPEST - 2) + b"}")
    outside = line(b'{"x":' + nested(DEEPEST - 1) + b"}")
    for frames in (0, 400):
        assert isinstance(below(frames, lambda: parse_line(2, inside)), Line)
        refused = below(frames, lambda: parse_line(2, outside))
        assert isinstance(refused, BadLine)
        assert (refused.message, refused.custom_id) == ("the line is nested deeper than 256 levels", "a")


def test_a_line_is_refused_rather_than_crash_a_caller_with_no_room_left() -> None:
    refused = None

    def deep() -> None:
        nonlocal refused
        try:
            deep()
        except RecursionError:
            if refused is None:
                sys.setrecursionlimit(1050)  # room to look, not to decode
                try:
                    refused = parse_line(2, line(b'{"x":' + nested(200) + b"}"))
                finally:
                    sys.setrecursionlimit(1000)

    limit = sys.getrecursionlimit()
    thread = threading.Thread(target=deep)  # its stack is its own
    sys.setrecursionlimit(1000)
    try:
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
    assert isinstance(refused, BadLine)
    assert refused.code == "invalid_json_line"


@pytest.mark.parametrize("status", [200, 400, 404, 503])
@pytest.mark.parametrize("body", [nested(HUGE), b'{"a":' + nested(HUGE) + b"}", b'{"error":' + b"[" * HUGE])
def test_an_answer_of_any_depth_has_an_outcome(status: int, body: bytes) -> None:
    outcome = classify(Reply(status, body, 0.1), now_s=0.0, remaining_s=60.0)
    assert (outcome.label is Label.INVALID_REPLY) == (status == 200)


def test_an_answer_is_json_up_to_that_depth() -> None:
    assert is_json_object(b'{"a":' + nested(DEEPEST - 1) + b"}")
    assert not is_json_object(b'{"a":' + nested(DEEPEST) + b"}")


@pytest.mark.parametrize("levels", [DEEPEST, DEEPEST + 1, 950, HUGE])
def test_a_result_of_any_depth_is_read_back_by_whoever_asks(levels: int, tmp_path) -> None:
    files = Storage(str(tmp_path)).files("batch_1")
    writer = PartWriter(files, 0, "1")
    body = nested(levels)
    kept = result_line("a", record_id="r", request_id="r", status_code=400, body=body, detail=None)
    writer.add(Entry(1, False, Usage(None, None), kept))
    writer.flush()
    [entry] = below(400, lambda: list(first_entries(files)))
    found = below(400, lambda: msgspec.json.decode(entry.record))["response"]["body"]
    assert found == body.decode() if levels > DEEPEST else depth(found) == levels


@pytest.mark.parametrize("levels", [DEEPEST, HUGE])
def test_an_inline_answer_can_always_be_written_as_an_rq_result(levels: int) -> None:
    answer = below(400, lambda: _decoded(nested(levels)))
    assert isinstance(answer, str) == (levels > DEEPEST)
    assert below(400, lambda: json.dumps({"body": answer}))


def test_a_worker_that_nests_without_end_tells_the_monitor_nothing() -> None:
    body = b'{"data":' + nested(HUGE) + b',"loads":[]}'
    assert judge(200, {}, body).reason == "200 with a body that breaks off"
    assert _entries(body) == []
    assert _fields(Answer(200, {}, body)) == {}


# -- keys, numbers, sizes ------------------------------------------------------------------------------------


def test_a_repeated_key_among_very_many_is_found_in_one_pass() -> None:
    keys = b",".join(b'"k%d":1' % number for number in range(200_000))  # the square of it: minutes
    refused = parse_line(2, line(b"{" + keys + b',"k199999":1}'))
    assert isinstance(refused, BadLine)
    assert (refused.code, refused.param) == ("duplicate_key", "k199999")


@pytest.mark.parametrize("number", [b"1" * 5000, b"-" + b"9" * 100_000, b"1e400", b"-1E+99999"])
def test_a_number_that_nobody_could_hold_refuses_the_line(number: bytes) -> None:
    refused = parse_line(2, line(b'{"escaped":"\\u003a","n":' + number + b"}"))
    assert isinstance(refused, BadLine)
    assert refused.code == "invalid_json_line"


@pytest.mark.parametrize(
    "body", [b'"\x00"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\\ud83d"', b"\x1f\x8b\x08\x00"]
)
def test_what_no_json_text_may_hold_refuses_the_line(body: bytes) -> None:
    assert isinstance(parse_line(2, line(b'{"x":' + body + b"}")), BadLine)


def test_a_strategy_has_a_bounded_name() -> None:
    raw = line(b"{}")[:-1] + b',"forebay":{"strategy":"' + b"s" * 129 + b'"}}'
    refused = parse_line(2, raw)
    assert isinstance(refused, BadLine)
    assert refused.param == "forebay.strategy"


class Endless(io.RawIOBase):
    """A source of so many bytes that notes how far it was read."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.given = 0

    def read(self, size: int = -1, /) -> bytes:
        some = min(size, self.left)
        self.left -= some
        self.given += some
        return bytes(some)


def test_a_file_over_the_limit_is_read_no_further_and_never_held(tmp_path) -> None:
    source = Endless(2**40)
    tracemalloc.start()
    try:
        taken = take_in(
            source,
            Storage(str(tmp_path)).files("batch_1"),
            bad_lines="skip",
            limits=Limits(max_bytes=40 * 1024**2),
            slots=1,
            mean_completion_tokens={},
        )
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken.problem is not None
    assert taken.problem.code == "file_too_large"
    assert source.given <= 41 * 1024**2
    assert most < 40 * 1024**2  # one line of at most 16 MiB, and what is being read


# -- inline requests: anybody may have written the job -------------------------------------------------------


def chain(levels: int):
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("body", "url", "why"),
    [
        ({"x": float("nan")}, "/v1/completions", "cannot be sent as JSON"),
        ({"x": float("-inf")}, "/v1/completions", "cannot be sent as JSON"),
        ({"x": "\ud800"}, "/v1/completions", "cannot be sent as JSON"),
        ({"x": 10**5000}, "/v1/completions", "cannot be sent as JSON"),
        ({"x": object()}, "/v1/completions", "cannot be sent as JSON"),
        ({"x": chain(HUGE)}, "/v1/completions", "nested too deep"),
        ({"x": chain(300)}, "/v1/completions", "nested deeper than 256"),
        ({"x": "x" * LONGEST_REQUEST}, "/v1/completions", "longer than 16777216 bytes"),
        ([], "/v1/completions", "body must be a JSON object"),
        ({}, "/v1/../admin", "url must be one of"),
        ({}, ["/v1/completions"], "url must be one of"),
        ({}, "http://elsewhere/v1/completions", "url must be one of"),
        ({"stream": True}, "/v1/completions", "stream"),
    ],
)
def test_a_request_that_no_line_may_make_is_refused_with_the_reason(body, url, why: str) -> None:
    with pytest.raises(InlineRequestError, match=why) as refused:
        read_request(body, url)
    assert len(str(refused.value)) < 500


def test_a_request_is_sent_as_it_was_given() -> None:
    assert msgspec.json.decode(read_request({"x": ["é\u2028", 1.5, 2**70]}, "/v1/completions").body) == {
        "x": ["é\u2028", 1.5, 2**70]
    }
