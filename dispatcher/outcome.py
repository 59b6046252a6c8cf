"""The table of outcomes: what an attempt's end means for the request and for the worker. Pure.

What came back is a ``reply``; whether and when to try again is ``retry``'s business, what a verdict does to a
worker's breaker, the breaker's.

============================================  =====================  ================================
what came back                                request                worker
============================================  =====================  ================================
2xx with a JSON object                        done                   success
2xx with anything else; lost connection; 5xx  elsewhere              failure
429; 503 that says the queue is full          wait, not charged      neutral, deferred, limit halved
408, 425                                      elsewhere              neutral
time-out                                      elsewhere              failure; neutral if the caller's
called off: its worker stands still, is gone  elsewhere              neutral: its breaker knows
exhausted: we may open no more connections    wait, not charged      neutral: it was not asked
401, 403                                      elsewhere, then final  neutral, unready for this model
404 naming the model                          elsewhere, then final  neutral, its models read again
404, 405, 501 otherwise: no such endpoint     elsewhere, then final  neutral
3xx, never followed: the URL is no engine's   elsewhere              failure
unsendable: its URL, or its key, is none      elsewhere              failure
400, 413, 422, other 4xx                      final                  neutral
reply too large                               final                  neutral
cancelled by us                               cancelled              neutral
============================================  =====================  ================================

"Then final": a second worker said the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

import msgspec

from dispatcher.batches.nesting import nested_too_deep
from dispatcher.reply import Failure, FailureKind, Reply
from workers.breaker import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection

DEFAULT_DEFERRAL_S = 1.0
"""How long a worker that is full, and does not say for how long, is left alone; a poll's interval."""
LEAST_DEFERRAL_S = 0.25
"""A full worker that asks for no time gets this much: it answers in a millisecond, and draws all else."""
DETAIL_LIMIT = 65_536
"""How much of an error's body is read for the words it says, in bytes."""


class RequestFate(StrEnum):
    """What becomes of the request.

    done: the reply is its answer. elsewhere: another attempt, on another worker if there is one. wait:
    another attempt when there is room; this one is not charged. final: the reply or failure is its
    answer, for good. cancelled: nobody waits for it any more.
    """

    DONE = "done"
    ELSEWHERE = "elsewhere"
    WAIT = "wait"
    FINAL = "final"
    CANCELLED = "cancelled"


class Label(StrEnum):
    """How an attempt ended, in one word: the metrics' label and the reason a breaker shows."""

    OK = "ok"
    INVALID_REPLY = "invalid_reply"
    SERVER_ERROR = "server_error"
    BUSY = "busy"
    REQUEST_TIMEOUT = "request_timeout"
    REJECTED = "rejected"
    UNAUTHORIZED = "unauthorized"
    MODEL_NOT_FOUND = "model_not_found"
    NO_ENDPOINT = "no_endpoint"
    REDIRECT = "redirect"
    CANCELLED = "cancelled"
    CONNECT = "connect"
    CONNECT_TIMEOUT = "connect_timeout"
    BROKEN = "broken"
    CUT_OFF = "cut_off"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    UNSENDABLE = "unsendable"
    RECALLED = "recalled"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended, classified."""

    label: Label
    fate: RequestFate
    verdict: Verdict
    """What the worker's breaker is told."""
    defer_s: float = 0.0
    """For how long the worker asked to be left alone; 0: it did not."""
    halve_limit: bool = False
    unready_for_model: bool = False
    """The worker refuses us this model: it is not ready for it, with the label as the reason."""
    reread_models: bool = False
    """The worker serves something else than is written of it."""

    @property
    def charged(self) -> bool:
        """Whether it counts as one of the request's attempts."""
        return self.fate is RequestFate.ELSEWHERE


CANCELLED = Outcome(Label.CANCELLED, RequestFate.CANCELLED, Verdict.NEUTRAL)
"""Whoever cancels an attempt reports this; there is nothing to classify."""


def classify(
    answer: Reply | Failure,
    *,
    now_s: float,
    remaining_s: float,
    own_timeout: bool = True,
    earlier: Collection[Label] = (),
) -> Outcome:
    """The outcome of an attempt that was not cancelled.

    ``now_s``: seconds since the epoch, against which a Retry-After date is read. ``remaining_s``: time
    until the request's deadline, half of which is the longest deferral. ``own_timeout``: the time-out was
    our choice, not a short one the caller asked for. ``earlier``: labels of the request's earlier
    attempts.
    """
    match answer:
        case Reply():
            return _of_reply(answer, now_s=now_s, remaining_s=remaining_s, earlier=earlier)
        case Failure():
            return _of_failure(answer.kind, own_timeout=own_timeout)
        case _:
            assert_never(answer)


def _of_failure(kind: FailureKind, *, own_timeout: bool) -> Outcome:
    label = Label(kind.value)
    match kind:
        case FailureKind.TIMEOUT:
            verdict = Verdict.FAILURE if own_timeout else Verdict.NEUTRAL
            return Outcome(label, RequestFate.ELSEWHERE, verdict)
        case FailureKind.RECALLED:
            return Outcome(label, RequestFate.ELSEWHERE, Verdict.NEUTRAL)
        case FailureKind.EXHAUSTED:
            return Outcome(label, RequestFate.WAIT, Verdict.NEUTRAL)
        case (
            FailureKind.CONNECT
            | FailureKind.CONNECT_TIMEOUT
            | FailureKind.BROKEN
            | FailureKind.CUT_OFF
            | FailureKind.PROTOCOL
            | FailureKind.UNSENDABLE
        ):
            return Outcome(label, RequestFate.ELSEWHERE, Verdict.FAILURE)
        case FailureKind.TOO_LARGE:
            return Outcome(label, RequestFate.FINAL, Verdict.NEUTRAL)
        case _:
            assert_never(kind)


def _of_reply(reply: Reply, *, now_s: float, remaining_s: float, earlier: Collection[Label]) -> Outcome:
    match reply.status:
        case status if 200 <= status < 300:
            if is_json_object(reply.body):
                return Outcome(Label.OK, RequestFate.DONE, Verdict.SUCCESS)
            return Outcome(Label.INVALID_REPLY, RequestFate.ELSEWHERE, Verdict.FAILURE)
        case status if 300 <= status < 400:
            return Outcome(Label.REDIRECT, RequestFate.ELSEWHERE, Verdict.FAILURE)
        case 429:
            return _busy(reply, now_s, remaining_s)
        case 503 if reply.retry_after is not None or says_busy(reply.body):
            return _busy(reply, now_s, remaining_s)
        case 408 | 425:
            return Outcome(Label.REQUEST_TIMEOUT, RequestFate.ELSEWHERE, Verdict.NEUTRAL)
        case 401 | 403:
            fate = _second_opinion(Label.UNAUTHORIZED, earlier)
            return Outcome(Label.UNAUTHORIZED, fate, Verdict.NEUTRAL, unready_for_model=True)
        case 404 if says_model_not_found(reply.body):
            fate = _second_opinion(Label.MODEL_NOT_FOUND, earlier)
            return Outcome(Label.MODEL_NOT_FOUND, fate, Verdict.NEUTRAL, reread_models=True)
        case 404 | 405 | 501:
            return Outcome(Label.NO_ENDPOINT, _second_opinion(Label.NO_ENDPOINT, earlier), Verdict.NEUTRAL)
        case status if 400 <= status < 500:
            return Outcome(Label.REJECTED, RequestFate.FINAL, Verdict.NEUTRAL)
        case status if 500 <= status < 600:
            return Outcome(Label.SERVER_ERROR, RequestFate.ELSEWHERE, Verdict.FAILURE)
        case _:  # 1xx is no answer, and above 599 is no HTTP
            return Outcome(Label.PROTOCOL, RequestFate.ELSEWHERE, Verdict.FAILURE)


def _second_opinion(label: Label, earlier: Collection[Label]) -> RequestFate:
    return RequestFate.FINAL if label in earlier else RequestFate.ELSEWHERE


def _busy(reply: Reply, now_s: float, remaining_s: float) -> Outcome:
    asked_s = None if reply.retry_after is None else retry_after_s(reply.retry_after, now_s)
    defer_s = DEFAULT_DEFERRAL_S if asked_s is None else asked_s
    defer_s = min(max(defer_s, LEAST_DEFERRAL_S), max(remaining_s, 0.0) / 2)
    return Outcome(Label.BUSY, RequestFate.WAIT, Verdict.NEUTRAL, defer_s=defer_s, halve_limit=True)


def retry_after_s(text: str, now_s: float) -> float | None:
    """Seconds that a Retry-After header asks for, as they stand: negative or huge ones too; None: not
    readable.

    The header holds seconds or a date (RFC 9110, 10.2.3); fractions are accepted.
    """
    text = text.strip()
    try:
        seconds = float(text)
    except ValueError:
        return _seconds_until(text, now_s)
    return None if math.isnan(seconds) else seconds


def _seconds_until(date: str, now_s: float) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() - now_s
    except (ValueError, TypeError, OverflowError, IndexError):  # what the parser raises, by kind of nonsense
        return None


class _AnyObject(msgspec.Struct):
    """Decoding into it checks that the text is one JSON object, and builds nothing."""


_object = msgspec.json.Decoder(_AnyObject)


def is_json_object(body: bytes) -> bool:
    """Whether the body is one complete JSON object in UTF-8, which every OpenAI answer is.

    One that is nested deeper than `nesting.DEEPEST` is none.
    """
    if nested_too_deep(body):  # nobody could be sure to read it back
        return False
    try:
        _object.decode(body)
        body.decode()  # the decoder skips over strings without looking into them
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


BUSY_WORDS = ("queue is full", "queue full", "currently busy", "cannot accept new requests", "overloaded")
"""How engines say that their queue is full, in lower case: SGLang, the same, vLLM twice, TGI."""


def says_busy(body: bytes) -> bool:
    """Whether an error's message says that the engine is full. Only asked of a 503."""
    message, _ = _said(body)
    return any(words in message for words in BUSY_WORDS)


def says_model_not_found(body: bytes) -> bool:
    """Whether an error is about the model (vLLM's and OpenAI's words). Only asked of a 404."""
    message, code = _said(body)
    if code == "model_not_found":
        return True
    return "model" in message and ("does not exist" in message or "not found" in message)


class _ErrorBody(msgspec.Struct):
    error: object = None
    message: object = None
    detail: object = None
    code: object = None


_error_body = msgspec.json.Decoder(_ErrorBody)


def _said(body: bytes) -> tuple[str, str]:
    """An error's message in lower case, and its code; the text itself when it is no JSON that we know."""
    try:
        error = _error_body.decode(body[:DETAIL_LIMIT])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:DETAIL_LIMIT].decode(errors="replace").lower(), ""
    match error.error:
        case dict() as inner:
            message, code = inner.get("message"), inner.get("code")
        case str() as text:
            message, code = text, error.code
        case _:
            message, code = error.message or error.detail, error.code
    return str(message or "").lower(), str(code or "")
