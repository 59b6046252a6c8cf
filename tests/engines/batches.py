"""Batch files for real engines, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.engines.servers import MODEL


def chat(custom_id: str, text: str, max_tokens: int) -> dict[str, Any]:
    """A line whose answer has exactly so many tokens, whatever the model would like to say."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write a batch file."""
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def assert_whole(results: Iterable[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]]) -> None:
    """Every line has one result, a 200, and it is the answer to that line: as many tokens as it asked for."""
    answered = sorted(
        (result["custom_id"], result["response"]["status_code"], _said(result)) for result in results
    )
    assert answered == sorted((line["custom_id"], 200, line["body"]["max_tokens"]) for line in lines)


def _said(result: Mapping[str, Any]) -> int:
    tokens: int = result["response"]["body"]["usage"]["completion_tokens"]
    return tokens
