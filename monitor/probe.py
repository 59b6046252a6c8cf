"""``GET /v1/loads``: one worker's own word on its load, and what an answer proves about the endpoint.

``judge`` is pure; ``probe`` asks. What follows from a verdict (memo, gauges) belongs to ``watch``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from monitor import lenient
from monitor.http import Answer, NoAnswer, Silence, Target, get
from workers.load import Load, LoadSource

if TYPE_CHECKING:
    import httpx

PATH = "/v1/loads"


class Verdict(StrEnum):
    """What an answer proves about the endpoint.

    available: it gave a load. absent: this incarnation definitively has no such endpoint. inconclusive: a
    moment's trouble, a missing key or an engine still starting; it proves nothing.
    """

    AVAILABLE = "available"
    ABSENT = "absent"
    INCONCLUSIVE = "inconclusive"


class Form(StrEnum):
    """The two ways to ask; some servers refuse the parameters."""

    SECTIONS = "?include=core,disagg,queues"
    PLAIN = ""


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """A verdict; ``reason`` is empty for ``available``.

    ``load`` is there when available; its stamps are on the worker's clock where it gave any, else the times
    given to ``judge``. ``sample_age_s`` is how old the sample was when the worker answered, by the worker's
    own clock; None when it stamped nothing: the sample is as old as the question.
    """

    verdict: Verdict
    reason: str = ""
    load: Load | None = None
    sample_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """A verdict and the form of the request that got it."""

    verdict: ProbeVerdict
    form: Form
    unreached: bool = False
    """There was no connection at all."""


_ABSENT_STATUSES = frozenset({404, 405, 410, 501})
_FORM_REFUSED = frozenset({400, 500})


async def probe(
    client: httpx.AsyncClient, target: Target, form: Form, *, deadline: float, sent_s: float
) -> Probed:
    """Ask once, or twice when the parameters may be what the server refuses.

    ``form`` is the one that worked for this incarnation, or SECTIONS. ``deadline`` is on the loop's clock;
    ``sent_s`` is wall-clock time, for a worker that stamps nothing.
    """
    answer = await get(client, target, PATH + form.value, deadline=deadline)
    if form is Form.SECTIONS and isinstance(answer, Answer) and answer.status in _FORM_REFUSED:
        plain = await get(client, target, PATH, deadline=deadline)
        if isinstance(plain, Answer) and plain.status not in _FORM_REFUSED:
            answer, form = plain, Form.PLAIN
    if isinstance(answer, NoAnswer):
        verdict = ProbeVerdict(Verdict.INCONCLUSIVE, answer.reason)
        return Probed(verdict, form, unreached=answer.silence is Silence.REFUSED)
    return Probed(judge(answer.status, answer.headers, answer.body, sent_s=sent_s), form)


def judge(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    sent_s: float = 0.0,
    received_s: float | None = None,
) -> ProbeVerdict:
    """What a complete HTTP answer says.

    ``sent_s`` stands in for the sample time of a worker that stamps nothing; ``received_s`` defaults to it.
    """
    if status in _ABSENT_STATUSES:
        return ProbeVerdict(Verdict.ABSENT, f"status {status}")
    if status == 204:
        return ProbeVerdict(Verdict.ABSENT, "status 204: no content")
    if status != 200:
        return ProbeVerdict(Verdict.INCONCLUSIVE, f"status {status}")
    try:
        answer = _decode(body)
    except (ValueError, RecursionError):
        return _not_json(headers, body)
    if not isinstance(answer, dict) or not isinstance(answer.get("loads"), list):
        return ProbeVerdict(Verdict.ABSENT, "200 without a list of loads")
    return _judge_ranks(answer, headers, sent_s, sent_s if received_s is None else received_s)


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Python servers print NaN and Infinity, which JSON has not; the standard library alone reads them.
        return json.loads(body, parse_constant=lambda _name: None)


def _not_json(headers: Mapping[str, str], body: bytes) -> ProbeVerdict:
    text = body.strip()
    if text.startswith((b"{", b"[")):
        return ProbeVerdict(Verdict.INCONCLUSIVE, "200 with a body that breaks off")
    declared_json = "json" in headers.get("content-type", "").lower()
    if not text and declared_json and headers.get("content-length") != "0":
        return ProbeVerdict(Verdict.INCONCLUSIVE, "200 with an empty body")
    return ProbeVerdict(Verdict.ABSENT, "200 with something that is no JSON")


def _judge_ranks(
    answer: Mapping[str, Any], headers: Mapping[str, str], sent_s: float, received_s: float
) -> ProbeVerdict:
    listed = [entry for entry in answer["loads"] if isinstance(entry, dict)]
    ranks = [_read_rank(entry) for entry in listed]
    speaking = [rank for rank in ranks if rank.speaks]
    if not speaking:
        return ProbeVerdict(Verdict.INCONCLUSIVE, "200, but no rank has said anything yet")
    # The load of several ranks is as old as its oldest part: the one rank whose scheduler froze shows here.
    stamps = [rank.timestamp for rank in speaking if rank.timestamp]
    sampled_s = min(stamps) if stamps else None
    load = Load(
        source=LoadSource.NATIVE,
        sampled_at=sent_s if sampled_s is None else sampled_s,
        received_at=received_s,
        rank_count=len(speaking),
        version=_text(answer.get("version")),
        disagg_mode=next((rank.disagg_mode for rank in speaking if rank.disagg_mode), None),
        **_reduce(speaking),
    )
    return ProbeVerdict(
        Verdict.AVAILABLE, load=load, sample_age_s=_sample_age(answer.get("timestamp"), headers, sampled_s)
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """One entry of ``loads``, read leniently."""

    running: int | None
    waiting: int | None
    timestamp: float | None
    disagg_mode: str | None
    starting: bool
    counts: tuple[int | None, ...]
    kv_usage: float | None
    gen_throughput: float | None
    cache_hit_rate: float | None
    generated: int | None

    @property
    def speaks(self) -> bool:
        return not self.starting and (self.running is not None or self.waiting is not None)


_COUNTS = {
    "waiting_uncached_tokens": "num_waiting_uncached_tokens",
    "used_tokens": "num_used_tokens",
    "capacity_tokens": "max_total_num_tokens",
    "max_running": "max_running_requests",
    "prompt_tokens_total": "total_prefill_uncached_tokens",
}
"""Summed over ranks: our name and SGLang's."""


def _read_rank(entry: Mapping[str, Any]) -> _Rank:
    waiting = lenient.count(entry.get("num_waiting_reqs"))
    running = _running(entry, waiting)
    timestamp = lenient.number(entry.get("timestamp"))
    counts = tuple(lenient.count(entry.get(name)) for name in _COUNTS.values())
    return _Rank(
        running=running,
        waiting=waiting,
        timestamp=timestamp,
        disagg_mode=_disagg_mode(entry),
        # SGLang's slot before its scheduler's first sample: stamped 0, and every count is 0.
        starting=timestamp == 0 and not running and not waiting and not any(counts),
        counts=counts,
        kv_usage=lenient.number(entry.get("token_usage")),
        gen_throughput=lenient.number(entry.get("gen_throughput")),
        cache_hit_rate=lenient.number(entry.get("cache_hit_rate")),
        generated=_generated(entry.get("decode_moments")),
    )


def _running(entry: Mapping[str, Any], waiting: int | None) -> int | None:
    if "num_running_reqs" in entry:
        return lenient.count(entry["num_running_reqs"])
    # TokenSpeed (and SGLang's older total) count the waiting ones in.
    everything = lenient.count(entry.get("num_reqs", entry.get("num_total_reqs")))
    return None if everything is None or waiting is None else max(0, everything - waiting)


def _generated(moments: object) -> int | None:
    # SGLang since 0.5.18: sums over all decode steps so far; the first is how many, the sixth the tokens they
    # gave. Without a step the sums are not kept, or say nothing yet.
    if not isinstance(moments, list) or len(moments) < 6 or not lenient.number(moments[0]):
        return None
    return lenient.count(moments[5])


def _disagg_mode(entry: Mapping[str, Any]) -> str | None:
    section = entry.get("disaggregation")
    mode = section.get("mode") if isinstance(section, dict) else None
    mode = mode or entry.get("disaggregation_mode") or entry.get("disagg_mode") or entry.get("mode")
    # SGLang prints the word "null" for a worker that is not disaggregated.
    return mode if isinstance(mode, str) and mode != "null" else None


def _reduce(ranks: Sequence[_Rank]) -> dict[str, Any]:
    usage_mean, usage_max = lenient.mean_and_max([rank.kv_usage for rank in ranks])
    hit_rate, _ = lenient.mean_and_max([rank.cache_hit_rate for rank in ranks])
    counts = {
        name: lenient.total([rank.counts[place] for rank in ranks]) for place, name in enumerate(_COUNTS)
    }
    return {
        **counts,
        "running": lenient.total([rank.running for rank in ranks]),
        "waiting": lenient.total([rank.waiting for rank in ranks]),
        "kv_usage_mean": usage_mean,
        "kv_usage_max": usage_max,
        "gen_throughput": lenient.total_rate([rank.gen_throughput for rank in ranks]),
        "cache_hit_rate": hit_rate,
        "generation_tokens_total": lenient.total([rank.generated for rank in ranks]),
    }


def _sample_age(answered: object, headers: Mapping[str, str], sampled_s: float | None) -> float | None:
    if sampled_s is None:
        return None
    answered_s = _answer_time(answered)
    if answered_s is None:
        answered_s = _date_header(headers.get("date", ""))
    return None if answered_s is None else max(0.0, answered_s - sampled_s)


def _answer_time(stamp: object) -> float | None:
    if not isinstance(stamp, str):
        return lenient.number(stamp)
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _date_header(text: str) -> float | None:
    # Whole seconds only, but the worker's own clock: good enough to see a scheduler that froze.
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
