"""The table of outcomes, row by row, in the words of real engines."""

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.outcome import (
    CANCELLED,
    LEAST_DEFERRAL_S,
    Label,
    Outcome,
    RequestFate,
    classify,
    is_json_object,
    retry_after_s,
)
from dispatcher.reply import Failure, FailureKind, Reply
from workers.breaker import Verdict

NOW_S = 1_800_000_000.0
ANSWER = b'{"id":"x","choices":[{"message":{"content":"\xe2\x82\xac"}}]}'

# Bodies as the engines sent them: vLLM 0.32, SGLang 0.5.23, llama.cpp.
VLLM_FULL = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again'
    b' later or on a different instance.","type":"Service Unavailable","param":null,"code":503}}'
)
SGLANG_FULL = (
    b'{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}'
)
LLAMACPP_LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
VLLM_ENDING = (
    b'{"error":{"message":"cannot schedule new futures after shutdown",'
    b'"type":"InternalServerError","code":500}}'
)
VLLM_NO_MODEL = (
    b'{"error":{"message":"The model `nope` does not exist. Valid aliases: tiny-llama.",'
    b'"type":"NotFoundError","param":"model","code":404}}'
)
OPENAI_NO_MODEL = b'{"error":{"message":"No such thing","code":"model_not_found"}}'
VLLM_NO_ENDPOINT = b'{"detail":"Not Found"}'
LLAMACPP_NO_ENDPOINT = b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}'
LLAMACPP_NO_EMBEDDINGS = (
    b'{"error":{"code":501,"message":"This server does not support embeddings. Start it with `--embeddings`",'
    b'"type":"not_supported_error"}}'
)
SGLANG_TOO_LONG = (
    b'{"object":"error","message":"The input (6004 tokens) is longer than the model\'s context length'
    b' (2048 tokens).","type":"BadRequestError","param":null,"code":400}'
)


def reply(status, body=b"{}", retry_after=None):
    return Reply(status, body, 0.1, "application/json", retry_after)


def outcome(answer, *, remaining_s=100.0, own_timeout=True, earlier=()):
    return classify(answer, now_s=NOW_S, remaining_s=remaining_s, own_timeout=own_timeout, earlier=earlier)


def test_a_complete_object_is_the_answer():
    assert outcome(reply(200, ANSWER)) == Outcome(Label.OK, RequestFate.DONE, Verdict.SUCCESS)


def test_an_answer_that_holds_an_error_is_kept_as_it_came_and_counted_by_its_status():
    assert outcome(reply(200, b'{"error":{"code":400}}')).fate is RequestFate.DONE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b'{"id":',
        b'{"id":1} x',
        b"null",
        b"[]",
        b'"text"',
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b"{}\x00",
    ],
)
@pytest.mark.parametrize("status", [200, 204])
def test_a_success_without_a_json_object_is_retried_and_charged_to_the_worker(status, body):
    assert not is_json_object(body)
    assert outcome(reply(status, body)) == Outcome(
        Label.INVALID_REPLY, RequestFate.ELSEWHERE, Verdict.FAILURE
    )


@pytest.mark.parametrize(
    "answer",
    [
        *(reply(status) for status in (500, 502, 503, 504, 507, 599)),
        reply(500, VLLM_ENDING),
        reply(503, LLAMACPP_LOADING),
        reply(503, b"<html>Bad gateway</html>"),
        reply(503, b""),
        *(reply(status) for status in (301, 302, 307, 308)),
        *(reply(status) for status in (101, 600)),
        *(
            Failure(kind, 0.1)
            for kind in (
                FailureKind.CONNECT,
                FailureKind.CONNECT_TIMEOUT,
                FailureKind.BROKEN,
                FailureKind.CUT_OFF,
                FailureKind.PROTOCOL,
                FailureKind.TIMEOUT,
            )
        ),
    ],
)
def test_a_broken_worker_is_charged_and_the_request_goes_elsewhere(answer):
    seen = outcome(answer)
    assert (seen.fate, seen.verdict, seen.charged) == (RequestFate.ELSEWHERE, Verdict.FAILURE, True)
    assert seen.defer_s == 0
    assert not seen.halve_limit


@pytest.mark.parametrize(
    "answer",
    [
        reply(429),
        reply(429, retry_after="2"),
        reply(503, VLLM_FULL),
        reply(503, SGLANG_FULL),
        reply(503, b"Model is Overloaded"),
        reply(503, b'{"detail":"queue full"}'),
        reply(503, LLAMACPP_LOADING, retry_after="2"),
    ],
)
def test_a_full_worker_is_deferred_and_neither_it_nor_the_request_is_charged(answer):
    seen = outcome(answer)
    assert (seen.label, seen.fate, seen.verdict) == (Label.BUSY, RequestFate.WAIT, Verdict.NEUTRAL)
    assert not seen.charged
    assert seen.halve_limit
    assert 1 <= seen.defer_s <= 2


def test_only_a_503_is_read_for_words_of_a_full_queue():
    assert outcome(reply(500, VLLM_FULL)).label is Label.SERVER_ERROR


@pytest.mark.parametrize(
    ("text", "remaining_s", "defer_s"),
    [
        ("2", 100, 2),
        (" 2.5 ", 100, 2.5),
        (formatdate(NOW_S + 7, usegmt=True), 100, 7),
        (formatdate(NOW_S - 7, usegmt=True), 100, LEAST_DEFERRAL_S),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 100, 50),
        ("-5", 100, LEAST_DEFERRAL_S),
        ("1e12", 100, 50),
        ("inf", 100, 50),
        ("-inf", 100, LEAST_DEFERRAL_S),
        ("60", 100, 50),
        ("abc", 100, 1),
        ("nan", 100, 1),
        ("", 100, 1),
        ("Wed, 99 Foo 2099 99:99:99 GMT", 100, 1),
        ("Wed, 21 Oct 99999999999 07:28:00 GMT", 100, 1),
        ("2", 1, 0.5),
        ("2", 0, 0),
        ("2", -3, 0),
    ],
)
def test_retry_after_is_clamped_to_half_of_what_is_left_and_never_raises(text, remaining_s, defer_s):
    assert outcome(reply(429, retry_after=text), remaining_s=remaining_s).defer_s == pytest.approx(defer_s)


@given(st.text(), st.floats(-10, 1e6))
def test_any_retry_after_gives_a_deferral_that_is_possible(text, remaining_s):
    assert (
        0 <= outcome(reply(429, retry_after=text), remaining_s=remaining_s).defer_s <= max(remaining_s, 0) / 2
    )


def test_a_date_without_a_zone_is_read_or_passed_over_but_does_not_raise():
    assert retry_after_s("Wed, 21 Oct 2099 07:28:00 -0000", NOW_S) is not None


@pytest.mark.parametrize("status", [408, 425])
def test_a_worker_that_waited_too_long_for_the_request_is_not_charged(status):
    assert outcome(reply(status)) == Outcome(Label.REQUEST_TIMEOUT, RequestFate.ELSEWHERE, Verdict.NEUTRAL)


def test_a_time_out_is_the_workers_fault_unless_the_caller_chose_a_short_one():
    timeout = Failure(FailureKind.TIMEOUT, 5.0)
    assert outcome(timeout).verdict is Verdict.FAILURE
    assert outcome(timeout, own_timeout=False) == Outcome(
        Label.TIMEOUT, RequestFate.ELSEWHERE, Verdict.NEUTRAL
    )


@pytest.mark.parametrize(
    "answer",
    [
        *(reply(status) for status in (400, 402, 409, 410, 413, 415, 418, 422, 451)),
        reply(400, SGLANG_TOO_LONG),
    ],
)
def test_a_rejected_request_is_final_and_says_nothing_of_the_worker(answer):
    assert outcome(answer) == Outcome(Label.REJECTED, RequestFate.FINAL, Verdict.NEUTRAL)


def test_what_was_called_off_goes_elsewhere_charged_and_its_worker_hears_nothing():
    recalled = outcome(Failure(FailureKind.RECALLED, 60.0))
    assert recalled == Outcome(Label.RECALLED, RequestFate.ELSEWHERE, Verdict.NEUTRAL)
    assert recalled.charged


def test_want_of_connections_is_waited_out_uncharged_and_the_worker_hears_nothing():
    exhausted = outcome(Failure(FailureKind.EXHAUSTED, 0.1))
    assert exhausted == Outcome(Label.EXHAUSTED, RequestFate.WAIT, Verdict.NEUTRAL)
    assert not exhausted.charged


def test_what_no_other_worker_could_do_better_is_final():
    seen = outcome(Failure(FailureKind.TOO_LARGE, 0.1))
    assert (seen.fate, seen.verdict) == (RequestFate.FINAL, Verdict.NEUTRAL)


def test_a_worker_whose_url_is_none_fails_and_the_request_goes_elsewhere():
    seen = outcome(Failure(FailureKind.UNSENDABLE, 0.1))
    assert (seen.fate, seen.verdict, seen.charged) == (RequestFate.ELSEWHERE, Verdict.FAILURE, True)


@pytest.mark.parametrize("status", [401, 403])
def test_a_worker_that_does_not_let_us_in_is_unready_and_another_one_has_the_last_word(status):
    first = outcome(reply(status), earlier={Label.BUSY, Label.MODEL_NOT_FOUND})
    assert first == Outcome(
        Label.UNAUTHORIZED, RequestFate.ELSEWHERE, Verdict.NEUTRAL, unready_for_model=True
    )
    second = outcome(reply(status), earlier={Label.UNAUTHORIZED})
    assert (second.fate, second.unready_for_model) == (RequestFate.FINAL, True)


@pytest.mark.parametrize(
    "body", [VLLM_NO_MODEL, OPENAI_NO_MODEL, b'{"error":"model \'x\' not found"}', b"model not found"]
)
def test_a_model_that_is_not_there_has_the_worker_read_again_and_is_final_the_second_time(body):
    first = outcome(reply(404, body))
    assert first == Outcome(Label.MODEL_NOT_FOUND, RequestFate.ELSEWHERE, Verdict.NEUTRAL, reread_models=True)
    assert outcome(reply(404, body), earlier={Label.MODEL_NOT_FOUND}).fate is RequestFate.FINAL


@pytest.mark.parametrize(
    "answer",
    [
        reply(404, VLLM_NO_ENDPOINT),
        reply(404, LLAMACPP_NO_ENDPOINT),
        reply(404, b""),
        reply(405),
        reply(501, LLAMACPP_NO_EMBEDDINGS),
    ],
)
def test_an_endpoint_that_is_not_there_is_looked_for_on_one_other_worker(answer):
    first = outcome(answer)
    assert first == Outcome(Label.NO_ENDPOINT, RequestFate.ELSEWHERE, Verdict.NEUTRAL)
    assert outcome(answer, earlier={Label.NO_ENDPOINT}).fate is RequestFate.FINAL


def test_what_we_cancel_says_nothing_of_the_worker():
    assert (CANCELLED.fate, CANCELLED.verdict) == (RequestFate.CANCELLED, Verdict.NEUTRAL)


@given(st.integers(0, 1_000), st.binary(max_size=40), st.none() | st.text(max_size=8))
def test_every_answer_has_an_outcome(status, body, retry_after):
    seen = outcome(reply(status, body, retry_after))
    assert (seen.verdict is Verdict.SUCCESS) == (seen.fate is RequestFate.DONE)
    assert seen.halve_limit == (seen.fate is RequestFate.WAIT)


def test_every_failure_has_a_label_of_its_own():
    assert [outcome(Failure(kind, 0.1)).label.value for kind in FailureKind] == [
        kind.value for kind in FailureKind
    ]
