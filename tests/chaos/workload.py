"""The lines of a batch, and what has to become of each. Pure: settled by a seed.

Every prompt is another, so that an answer tells which line it is for. Some lines every engine refuses for
good, some are no requests at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from forebay.simulator import answers
from forebay.simulator.calls import asked_for

MODEL = "sim-model"
LONGEST = 2048
"""Tokens of prompt and answer that the engines take."""
SEED = 0
"""The engines' own: one seed for all, so that a line's answer is the same wherever it is given."""
_ODD = ("plain", "ünïcode ☃", "line\u2028separator", 'quote "x"\t', "\\u0000 \\n")


@dataclass(frozen=True, slots=True)
class Answer:
    """Engines answer it with these words, of so many tokens."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Every engine refuses it with this status, for good."""

    status: int


@dataclass(frozen=True, slots=True)
class Invalid:
    """It is no request: it is refused at intake and must still have its line in the error file."""


@dataclass(frozen=True, slots=True)
class Given:
    """One line of the input: its number from 1, its bytes without line feed, and its end."""

    number: int
    custom_id: str
    data: bytes
    end: Answer | Refusal | Invalid


def lines(rng: Random, count: int) -> list[Given]:
    """So many lines, of short and long answers; one in a hundred is refused, one in a hundred invalid."""
    return [_line(rng, number) for number in range(1, count + 1)]


def input_file(given: Sequence[Given]) -> bytes:
    """The file that holds them."""
    return b"".join(line.data + b"\n" for line in given)


def _line(rng: Random, number: int) -> Given:
    custom_id = f"c{number}"
    lot = rng.random()
    if lot < 0.01:
        data = msgspec.json.encode({"custom_id": custom_id, "method": "GET", "url": "/v1/chat/completions"})
        return Given(number, custom_id, data, Invalid())
    tokens = max(2, min(200, round(rng.lognormvariate(3.0, 0.8))))
    text = f"{number}: " + rng.choice(_ODD) * 3 + ("word " * (2 * LONGEST) if lot < 0.02 else "")
    messages = [{"role": "user", "content": text}]
    body = msgspec.json.encode(
        {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
    )
    data = b'{"custom_id":"%b","method":"POST","url":"/v1/chat/completions","body":%b}' % (
        custom_id.encode(),
        body,
    )
    if lot < 0.02:
        return Given(number, custom_id, data, Refusal(400))
    words = answers.words(answers.fingerprint(SEED, asked_for(messages)), 0, tokens)
    return Given(number, custom_id, data, Answer(words, tokens))
