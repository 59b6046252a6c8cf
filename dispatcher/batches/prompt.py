"""What a request's body says of its length and of its beginning: the estimate that planning and routing use.

No tokenizer is loaded: a token is taken as four characters. Pure: decoded JSON in, numbers out. Whether a
body is acceptable is `parse`'s subject; this module takes any object and counts what it recognises.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

CHARACTERS_PER_TOKEN = 4
PREFIX_CHARACTERS = 256
_PREFIX_TOKENS = PREFIX_CHARACTERS // CHARACTERS_PER_TOKEN
_SYSTEM_ROLES = frozenset({"system", "developer"})
_ASKED_KEYS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_TEXT_KEYS = ("instructions", "messages", "prompt", "input", "query", "text_1", "documents", "text_2")
# messages -> message -> content -> part -> text is five deep; anything deeper is no prompt.
_DEEPEST = 6
_MOST_TOKENS = 2**31 - 1


class Prompt(NamedTuple):
    """A prompt's size, and the key that requests with the same beginning share."""

    characters: int
    prefix_key: int


def measure(body: Mapping[str, Any]) -> Prompt:
    """Count the prompt's characters and hash its beginning.

    Token ids count as four characters each. The prefix key is an unsigned 64-bit hash, the same in every
    process, of the model and of the system prompt, or of the first 256 characters when there is none.
    """
    characters = 0
    first: Any = None
    for key in _TEXT_KEYS:
        value = body.get(key)
        if value:
            characters += _characters(value, _DEEPEST)
            first = value if first is None else first
    beginning = _system_prompt(body) or _beginning(first, _DEEPEST)[:PREFIX_CHARACTERS]
    return Prompt(characters, hash64(f"{body.get('model')}\0{beginning}"))


def prompt_tokens(characters: int) -> int:
    """Estimate tokens from characters, rounded up."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def asked_tokens(body: Mapping[str, Any]) -> int | None:
    """Read the most completion tokens that the request allows itself; None when it names no usable number."""
    for key in _ASKED_KEYS:
        value = body.get(key)
        if type(value) is int and 0 <= value <= _MOST_TOKENS:
            return value
    return None


def hash64(text: str) -> int:
    """Hash to an unsigned 64-bit number that is the same in every process and on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _characters(value: Any, depth: int) -> int:
    if type(value) is str:
        return len(value)
    if depth == 0:
        return 0
    if type(value) is dict:
        return _characters(value.get("content") or value.get("text"), depth - 1)
    if type(value) is list:
        if value and type(value[0]) is int:
            return CHARACTERS_PER_TOKEN * len(value)
        return sum([_characters(item, depth - 1) for item in value])
    return 0


def _system_prompt(body: Mapping[str, Any]) -> str:
    instructions = body.get("instructions")
    if type(instructions) is str and instructions:
        return instructions
    messages = body.get("messages") or body.get("input")
    first = messages[0] if type(messages) is list and messages else None
    if type(first) is dict and first.get("role") in _SYSTEM_ROLES:
        return _beginning(first, _DEEPEST)
    return ""


def _beginning(value: Any, depth: int) -> str:
    """Find the first text in what may be a string, an object with content or text, or a list of these."""
    if type(value) is str:
        return value
    if depth == 0:
        return ""
    if type(value) is dict:
        return _beginning(value.get("content") or value.get("text"), depth - 1)
    if type(value) is list and value:
        if type(value[0]) is int:
            return repr(value[:_PREFIX_TOKENS])
        return next(filter(None, (_beginning(item, depth - 1) for item in value)), "")
    return ""
