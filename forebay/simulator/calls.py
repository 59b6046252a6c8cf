"""An inference request read and checked: body bytes in, a ``Call`` or the runtime's refusal out.

Belongs here: which fields are looked at, in which order, and how prompts are measured. Does not belong here:
the words of a refusal (the dialects) and the length of an answer (``answers``).
"""

from __future__ import annotations

import json  # only where msgspec has failed: both runtimes' errors tell the place at which decoding broke
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from forebay.simulator.dialect import Dialect
    from forebay.simulator.reply import Reply

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

PROMPT_FIELD = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}

CHARS_PER_TOKEN = 4
_MOST_CHOICES = 128
_ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
_DECODER = msgspec.json.Decoder()


class RefusedError(Exception):
    """The request is answered at once, with ``reply``, and never reaches the batch."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


@dataclass(frozen=True, slots=True)
class Call:
    """A request that may run.

    ``prompts`` holds the token count of every prompt; each gets ``n`` answers of at most ``max_tokens``
    tokens, or of exactly as many when ``exact``. ``model`` is the name to answer with. ``asked`` is what the
    answer is made from: the same for the same request, however whoever passed it on has written its JSON.
    """

    path: str
    model: str
    asked: bytes
    prompts: tuple[int, ...]
    n: int
    max_tokens: int
    exact: bool

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


def read_call(path: str, raw: bytes, dialect: Dialect) -> Call:
    """Read the body of a POST on an inference path. Raises RefusedError with the runtime's answer."""
    try:
        return _read(path, raw, dialect)
    except RecursionError as error:
        raise RefusedError(dialect.bad_request("body", "The body is nested too deeply.")) from error


def _read(path: str, raw: bytes, dialect: Dialect) -> Call:
    body = _decode(path, raw, dialect)
    prompt = _required(path, body, dialect)
    if body.get("stream"):
        raise RefusedError(dialect.bad_request("stream", "Streaming is not supported by this engine."))
    model = dialect.model_for(body.get("model"))
    if path == CHAT:
        _check_messages(path, prompt, dialect)
    ceiling = _asked_tokens(body, dialect)
    prompts = _prompt_tokens(path, prompt)
    room = min(_room(tokens, ceiling, dialect) for tokens in prompts) if path != EMBEDDINGS else 1
    exact = ceiling is not None and bool(body.get("ignore_eos") or body.get("min_tokens"))
    asked = asked_for(prompt, body.get("seed"))
    return Call(path, model, asked, prompts, _choices(body, dialect), room, exact)


def asked_for(prompt: object, seed: object = None) -> bytes:
    """What tells a request from others: its prompt, given as its JSON has it, and its seed.

    Of messages the texts count and not what surrounds them, which routers on the way add to and reorder.
    """
    return msgspec.json.encode([texts(prompt), seed])


def texts(prompt: object) -> list[object]:
    """The texts of messages, of prompts or of one prompt; token ids stand as they are."""
    return [_said(each) for each in prompt] if isinstance(prompt, list) else [_said(prompt)]


def _said(entry: object) -> object:
    """An entry's text; token ids, a list of them or one, are their own text."""
    ids = entry if isinstance(entry, list) else [entry]
    return entry if ids and all(isinstance(each, int) for each in ids) else _text(entry)


def prompt_head(raw: bytes, limit: int = 80) -> str:
    """The first characters of a request's last prompt, to tell requests apart; "" where there is none."""
    try:
        return _text(_last_prompt(_DECODER.decode(raw)))[:limit]
    except (msgspec.DecodeError, RecursionError):
        return ""


def _last_prompt(body: object) -> object:
    if not isinstance(body, dict):
        return ""
    prompts = body.get("messages") or body.get("prompt") or body.get("input")
    return prompts[-1] if isinstance(prompts, list) and prompts else prompts


def _decode(path: str, raw: bytes, dialect: Dialect) -> dict[str, Any]:
    if not raw:
        raise RefusedError(dialect.missing_body(path))
    try:
        body = _DECODER.decode(raw)
    except msgspec.DecodeError:
        body = _decode_leniently(path, raw, dialect)
    if not isinstance(body, dict):
        raise RefusedError(dialect.no_object(path, body))
    return body


def _decode_leniently(path: str, raw: bytes, dialect: Dialect) -> object:
    try:
        body = json.loads(raw)  # takes NaN, as the runtimes do
        msgspec.json.encode(body)  # and lone surrogates, which no answer could repeat
    except json.JSONDecodeError as error:
        raise RefusedError(dialect.malformed(path, error)) from error
    except UnicodeError as error:
        broken = json.JSONDecodeError("Invalid text encoding", "", 0)
        raise RefusedError(dialect.malformed(path, broken)) from error
    return body


def _required(path: str, body: dict[str, Any], dialect: Dialect) -> Any:
    field = PROMPT_FIELD[path]
    if body.get(field) is None:
        raise RefusedError(dialect.missing_field(path, body, field))
    return body[field]


def _check_messages(path: str, messages: object, dialect: Dialect) -> None:
    if not isinstance(messages, list):
        raise RefusedError(dialect.no_list(path, "messages", messages))
    if not messages:
        raise RefusedError(dialect.empty_messages())
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise RefusedError(dialect.bad_role(path, index, message))


def _asked_tokens(body: dict[str, Any], dialect: Dialect) -> int | None:
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and not temperature >= 0:
        raise RefusedError(dialect.bad_temperature(float(temperature)))
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    if asked is None:
        return None
    if not isinstance(asked, int) or isinstance(asked, bool):
        raise RefusedError(dialect.bad_request("max_tokens", "max_tokens must be an integer."))
    if asked < dialect.fewest_tokens:
        raise RefusedError(dialect.too_few_tokens(asked))
    return max(1, asked)


def _choices(body: dict[str, Any], dialect: Dialect) -> int:
    n = body.get("n")
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _MOST_CHOICES:
        raise RefusedError(dialect.bad_request("n", f"n must be between 1 and {_MOST_CHOICES}, got {n}."))
    return n


def _room(prompt_tokens: int, asked: int | None, dialect: Dialect) -> int:
    """How many tokens the answer to one prompt may get."""
    limit = dialect.max_model_len
    if prompt_tokens >= limit:
        raise RefusedError(dialect.prompt_too_long(prompt_tokens))
    if asked is not None and (refusal := dialect.refuse_length(prompt_tokens, asked)) is not None:
        raise RefusedError(refusal)
    room = limit - prompt_tokens
    return room if asked is None else min(asked, room)


def _prompt_tokens(path: str, prompt: object) -> tuple[int, ...]:
    if path == CHAT and isinstance(prompt, list):
        return (_tokens(sum(len(_text(message)) for message in prompt)),)
    if not isinstance(prompt, list):
        return (_tokens(len(_text(prompt))),)
    if prompt and all(isinstance(each, int) for each in prompt):
        return (len(prompt),)  # one prompt, given as token ids
    return tuple(_entry_tokens(each) for each in prompt) or (1,)


def _entry_tokens(entry: object) -> int:
    return max(1, len(entry)) if isinstance(entry, list) else _tokens(len(_text(entry)))


def _tokens(chars: int) -> int:
    return max(1, math.ceil(chars / CHARS_PER_TOKEN))


def _text(content: object) -> str:
    """The text of a prompt, a message, or an array of content parts; other parts count as nothing."""
    match content:
        case str():
            return content
        case {"content": inner}:
            return _text(inner)
        case {"text": str(text)}:
            return text
        case list():
            return "".join(map(_text, content))
        case _:
            return ""
