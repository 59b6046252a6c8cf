"""The requests of one run, and how long their answers will be.

Belongs here: seeds to lines, pure but for writing them. A length that no ``max_tokens`` foretells is drawn by
the engine from the prompt; it is drawn here in the same way, for the bound and for the client that knows all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from bench_fleet import MEDIAN, MODEL

from benchmarks.peers.scenarios import Scenario
from forebay.simulator import answers
from forebay.simulator.calls import asked_for

_PATH = "/v1/chat/completions"
_QUESTION_WORDS = 40
_PREFIX_TOKENS = 1500
_TOO_LONG_TOKENS = 10_000
"""More than the 8192 that the engines' context holds."""
_CHARS = 4
"""To a token, as the engines count."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line. ``tokens``: of its answer; 0: it is refused, whoever sends it."""

    custom_id: str
    prompt: str
    max_tokens: int
    exact: bool
    tokens: int

    def line(self) -> bytes:
        """As a batch file has it."""
        body: dict[str, object] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
        }
        if self.exact:
            body["ignore_eos"] = True
        line = {"custom_id": self.custom_id, "method": "POST", "url": _PATH, "body": body}
        return msgspec.json.encode(line) + b"\n"


def requests(scenario: Scenario, count: int, seed: int, *, foretold: bool) -> list[Request]:
    """``count`` requests; those that fit no engine, if any, are the first of them."""
    bad = [_over_long(number, seed) for number in range(min(scenario.over_long, count))]
    good = [_good(scenario, number, seed, foretold=foretold) for number in range(len(bad), count)]
    return bad + good


def _good(scenario: Scenario, number: int, seed: int, *, foretold: bool) -> Request:
    prompt = _prefix(scenario, number, seed) + _question(number, seed)
    tokens = drawn(prompt, scenario)
    ceiling = tokens if foretold else scenario.most
    return Request(f"r{number}", prompt, ceiling, exact=foretold, tokens=tokens)


def _over_long(number: int, seed: int) -> Request:
    prompt = _filled(f"too long {number} of batch {seed} ", _TOO_LONG_TOKENS)
    return Request(f"r{number}", prompt, 64, exact=False, tokens=0)


def _prefix(scenario: Scenario, number: int, seed: int) -> str:
    if not scenario.prefixes:
        return ""
    return _filled(f"document {number * 7919 % scenario.prefixes} of batch {seed} ", _PREFIX_TOKENS)


def _question(number: int, seed: int) -> str:
    """Words whose beginning no two share: else policies that look for shared prefixes would find them."""
    digest = answers.fingerprint(seed, str(number).encode())
    return f"{digest.hex()}: {answers.words(digest, 0, _QUESTION_WORDS)}?"


def _filled(words: str, tokens: int) -> str:
    chars = tokens * _CHARS
    return (words * (chars // len(words) + 1))[:chars]


def drawn(prompt: str, scenario: Scenario) -> int:
    """The tokens of the answer to a chat of this one message, as an engine of the scenario draws them."""
    asked = answers.fingerprint(0, asked_for([{"role": "user", "content": prompt}]))
    return min(scenario.most, answers.drawn_length(asked, 0, median=MEDIAN, sigma=scenario.sigma))


def write(path: Path, wanted: Sequence[Request]) -> None:
    """Write a batch file."""
    with path.open("wb") as file:
        file.writelines(request.line() for request in wanted)


def longest_first(wanted: Sequence[Request]) -> list[Request]:
    """For a client that is told every length."""
    return sorted(wanted, key=lambda request: request.tokens, reverse=True)
