"""What vLLM 0.32 answers about a prompt without generating: ``/tokenize`` and the render paths.

Belongs here: their bodies, whose keys were taken from vLLM's protocol modules. Routers ask for token ids so.
The ids stand for four characters each, as everywhere in the simulated engine; the same text has the same ids.
Of the sampling parameters vLLM sends those that differ from its defaults.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.simulator.calls import CHARS_PER_TOKEN, CHAT, COMPLETIONS, Call, read_call, texts
from forebay.simulator.reply import Reply, json_reply

if TYPE_CHECKING:
    from forebay.simulator.dialect import Dialect

PATHS = frozenset({"/tokenize", "/v1/chat/completions/render", "/v1/completions/render"})
_PASSED_ON = ("n", "temperature", "seed", "ignore_eos", "min_tokens")
_VOCABULARY = 32_000
_ONLY_AT_THE_END = 2
"""Of vLLM's three ways to hand an answer out."""


def prompt_reply(path: str, raw: bytes, dialect: Dialect) -> Reply | None:
    """The answer to a POST; None when the path is another's. Raises RefusedError, as generating would."""
    match path:
        case "/tokenize":
            return _tokenized(raw, dialect)
        case "/v1/chat/completions/render":
            call = read_call(CHAT, raw, dialect)
            body = msgspec.json.decode(raw)
            return json_reply(200, _rendered("chatcmpl", call, _ids(body["messages"]), body, dialect))
        case "/v1/completions/render":
            call = read_call(COMPLETIONS, raw, dialect)
            body = msgspec.json.decode(raw)
            prompts = [_ids(prompt) for prompt in _prompts(body["prompt"])]
            return json_reply(200, [_rendered("cmpl", call, ids, body, dialect) for ids in prompts])
        case _:
            return None


def _tokenized(raw: bytes, dialect: Dialect) -> Reply:
    path, field = (COMPLETIONS, "prompt") if b'"prompt"' in raw else (CHAT, "messages")
    read_call(path, raw, dialect)
    ids = _ids(msgspec.json.decode(raw)[field])
    told = {"count": len(ids), "max_model_len": dialect.max_model_len, "tokens": ids, "token_strs": None}
    return json_reply(200, told)


def _prompts(prompt: Any) -> list[Any]:
    one = not isinstance(prompt, list) or (prompt and all(isinstance(each, int) for each in prompt))
    return [prompt] if one else prompt


def _ids(prompt: object) -> list[int]:
    given = prompt if isinstance(prompt, list) else []
    if given and all(isinstance(each, int) for each in given):
        return given
    text = "".join(str(each) for each in texts(prompt))
    cut = (text[start : start + CHARS_PER_TOKEN] for start in range(0, len(text), CHARS_PER_TOKEN))
    return [zlib.crc32(each.encode(errors="replace")) % _VOCABULARY for each in cut] or [0]


def _rendered(
    kind: str, call: Call, ids: list[int], body: dict[str, Any], dialect: Dialect
) -> dict[str, object]:
    parameters = {
        "max_tokens": call.max_tokens,
        "output_kind": _ONLY_AT_THE_END,
        "skip_clone": True,
        **{name: body[name] for name in _PASSED_ON if body.get(name)},
    }
    return {
        "request_id": f"{kind}-{dialect.next_id():016x}",
        "token_ids": ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": parameters,
        "model": call.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": False,
        "stream_options": None,
        "cache_salt": body.get("cache_salt"),
        "priority": body.get("priority") or 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
