# ruff: noqa: INP001 - a script run by name, part of no package
"""Writes ``demo.jsonl`` beside itself: 500 requests of uneven lengths, the same ones every time.

Answer lengths are lognormal, as in real batches: many short ones and a few that are ten times as long.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec

REQUESTS = 500
MODEL = "demo-model"
MEDIAN_TOKENS, SIGMA, LEAST_TOKENS, MOST_TOKENS = 110, 0.8, 8, 480
SYSTEMS = (
    "You answer questions about rivers, dams and turbines in plain words.",
    "You summarise what you are given in a few sentences.",
    "You translate what you are given into simple English.",
)
SUBJECTS = ("a forebay", "a spillway", "a penstock", "a Francis turbine", "a fish ladder", "a surge tank")
TASKS = ("Explain {} to a child.", "How is {} maintained?", "Write a short story about {}.", "Describe {}.")
FILLER = "The water stands still for a moment before it falls, and the operators watch its level. "


def lines(rng: random.Random) -> list[bytes]:
    """All lines of the file, with their line feeds."""
    return [msgspec.json.encode(_request(number, rng)) + b"\n" for number in range(1, REQUESTS + 1)]


def _request(number: int, rng: random.Random) -> dict[str, object]:
    wish = rng.choice(TASKS).format(rng.choice(SUBJECTS))
    context = FILLER * rng.randint(0, 6)
    tokens = round(rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))
    return {
        "custom_id": f"demo-{number:03}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": rng.choice(SYSTEMS)},
                {"role": "user", "content": f"{context}{wish}"},
            ],
            "max_tokens": min(max(tokens, LEAST_TOKENS), MOST_TOKENS),
        },
    }


if __name__ == "__main__":
    Path(__file__).with_name("demo.jsonl").write_bytes(b"".join(lines(random.Random(2026))))
