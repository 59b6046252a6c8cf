"""The invariant, line by line: every accepted line ended as exactly one line of one file, and a right one.

Pure: bytes of files in, findings out. Who reads the files, and when, is ``campaign``'s subject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import msgspec

from dispatcher.batches.results import record_id
from tests.chaos.workload import Answer, Given, Invalid, Refusal

_UNANSWERED: Mapping[str, frozenset[str]] = {
    "completed": frozenset(),
    "expired": frozenset({"batch_expired"}),
    "cancelled": frozenset({"batch_cancelled", "batch_expired"}),
}
"""How a batch may end, and the errors that its lines may then have instead of an answer."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A batch that has ended: what was given, and what there is of it now. None: there is no such file."""

    given: Sequence[Given]
    record: Mapping[str, Any]
    output: bytes | None
    errors: bytes | None
    cancel_asked: bool = False
    """Whether somebody wanted it cancelled, with or without success."""
    may_expire: bool = False
    """Whether its deadline was near."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Lines checked, and what is not as it must be; all empty is good."""

    lines: int
    lost: list[str] = field(default_factory=list)
    """custom_ids that stand in no file."""
    doubled: list[str] = field(default_factory=list)
    """custom_ids that stand in the files more than once."""
    wrong: list[str] = field(default_factory=list)
    """Everything else, in words."""

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)


def check(ended: Ended) -> Findings:
    """Hold the files and the record of a batch that has ended against what was given."""
    output, output_wrong = _read("output", ended.output)
    errors, errors_wrong = _read("errors", ended.errors)
    times = Counter(str(line.get("custom_id")) for line in output + errors)
    names = [line.custom_id for line in ended.given]
    return Findings(
        lines=len(names),
        lost=[name for name in names if not times[name]],
        doubled=[name for name, count in times.items() if count > 1],
        wrong=[
            *output_wrong,
            *errors_wrong,
            *(f"{name}: no line of the input" for name in times.keys() - set(names)),
            *_order("output", output, ended.given),
            *_order("errors", errors, ended.given),
            *_lines(ended, output, errors),
            *_record(ended, output, errors),
        ],
    )


def _read(name: str, data: bytes | None) -> tuple[list[dict[str, Any]], list[str]]:
    if data is None:
        return [], []
    if not data.endswith(b"\n"):
        return [], [f"{name}: empty, or its last line is cut off"]
    read: list[dict[str, Any]] = []
    wrong = []
    for number, line in enumerate(data[:-1].split(b"\n"), 1):
        try:
            read.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            wrong.append(f"{name}, line {number}: {error}")
    return read, wrong


def _order(name: str, found: Sequence[Mapping[str, Any]], given: Sequence[Given]) -> Iterator[str]:
    numbers = {line.custom_id: line.number for line in given}
    order = [numbers.get(str(line.get("custom_id")), 0) for line in found]
    if order != sorted(order):
        yield f"{name}: not in the order of the input"


def _lines(
    ended: Ended, output: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    given = {line.custom_id: line for line in ended.given}
    batch_id, status = str(ended.record["id"]), str(ended.record["status"])
    for good, found in ((True, output), (False, errors)):
        for result in found:
            line = given.get(str(result.get("custom_id")))
            if line is None:
                continue
            if result.get("id") != record_id(batch_id, line.number):
                yield f"{line.custom_id}: its id is {result.get('id')}"
            why = _good(line, result) if good else _bad(line, result, status)
            if why:
                yield f"{line.custom_id}: {why}"


def _good(line: Given, result: Mapping[str, Any]) -> str | None:
    """Why a line of the output file is not what the line must get; None: it is."""
    response = result.get("response") or {}
    if result.get("error") is not None or response.get("status_code") != 200:
        return f"in the output with status {response.get('status_code')}, error {result.get('error')}"
    if not isinstance(line.end, Answer):
        return "answered, and is none to be answered"
    body = response["body"]
    text = body["choices"][0]["message"]["content"]
    if (text, body["usage"]["completion_tokens"]) != (line.end.text, line.end.tokens):
        return f"has the answer of another: {text[:60]!r}"
    if not (result.get("forebay") or {}).get("worker"):
        return "answered by no worker"
    return None


def _bad(line: Given, result: Mapping[str, Any], status: str) -> str | None:
    """Why a line of the error file is not what the line may get; None: it is."""
    response, error, code = result.get("response"), result.get("error"), _code(result)
    if (response is None) == (error is None):
        return f"response {response and response.get('status_code')} with error {error}"
    match line.end:
        case Invalid():
            return None if code == "invalid_line" else f"invalid, and ended with {code}"
        case Refusal(wanted) if response is not None:
            return None if response["status_code"] == wanted else f"refused with {response['status_code']}"
        case Answer() | Refusal():
            if code in _UNANSWERED.get(status, ()):
                return None
            what = response["status_code"] if response else error
            return f"in the errors of a batch that is {status}: {what}"
        case _:
            assert_never(line.end)


def _code(result: Mapping[str, Any]) -> str | None:
    return (result.get("error") or {}).get("code")


def _record(
    ended: Ended, output: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    record = ended.record
    if record["status"] not in _UNANSWERED:
        yield f"the batch is {record['status']}"
    if record["status"] == "expired" and not ended.may_expire:
        yield "expired long before its deadline"
    if record["status"] == "expired" and not any(_code(line) == "batch_expired" for line in errors):
        yield "expired, and no line of it is"
    if record["status"] == "cancelled" and not ended.cancel_asked:
        yield "cancelled, and nobody asked for it"
    counts = {"total": len(ended.given), "completed": len(output), "failed": len(errors)}
    if record["request_counts"] != counts:
        yield f"the record counts {record['request_counts']}, there are {counts}"
    for name, found in (("output_file_id", ended.output), ("error_file_id", ended.errors)):
        if (record[name] is None) != (found is None):
            yield f"{name} is {record[name]}, and the file is {'not ' * (found is None)}there"
    written = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    told = (record["usage"] or {}).get("output_tokens", 0)
    if told != written:
        yield f"the record tells {told} tokens, the answers {written}"
