"""One line of a batch file: bytes in, a request or the reason why it is refused out.

The Batch contract of one line lives here and nowhere else. What needs more than one line (line ends, lengths,
duplicate ids) belongs to `intake`; what a body's prompt weighs to `prompt`. Pure: no I/O.

Only what routing and safety need is looked at. The body is kept as the bytes that were written and is never
serialised again, so an engine receives exactly what the user wrote.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from dispatcher.batches.nesting import DEEPEST, nested_too_deep
from dispatcher.batches.prompt import asked_tokens, measure

LONGEST_CUSTOM_ID = 512
LONGEST_MODEL = 512
LONGEST_STRATEGY = 128

GENERATING_URLS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Urls whose answers are generated token by token; the others cost their prompt only."""

ALLOWED_URLS = GENERATING_URLS | {
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/pooling",
    "/v1/classify",
}
"""The only paths that a line can reach. Compared whole: no host, no query, no dots, no other spelling."""

_TOO_DEEP = f"the line is nested deeper than {DEEPEST} levels"
_BOM = b"\xef\xbb\xbf"
_REQUIRED = ("custom_id", "method", "url", "body")
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Line(msgspec.Struct, frozen=True, gc=False):
    """An accepted request. A msgspec struct, since a million are made in one pass and it costs a tenth.

    `number` counts from 1, blank lines included. `body` is a slice of the line, byte for byte. `model` is
    None when the body names none: any worker may take it. `prompt_chars` estimates the prompt's characters,
    `asked_tokens` is None when the body sets no ceiling. `prefix_key` is an unsigned 64-bit hash.
    `strategy` is the line's own wish (`"forebay": {"strategy": ...}`), None when it has none.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    model: str | None
    prompt_chars: int
    asked_tokens: int | None
    prefix_key: int
    strategy: str | None

    @property
    def generates(self) -> bool:
        """Whether the answer is generated token by token."""
        return self.url in GENERATING_URLS


@dataclass(frozen=True, slots=True)
class BadLine:
    """A refused line: `code` for programs, `message` for people.

    `param` is the key at fault, None when it is the whole line.
    `custom_id` is the line's own id as far as it could be read, else None.
    """

    number: int
    code: str
    message: str
    param: str | None = None
    custom_id: str | None = None


class _Refusal(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class _Body(msgspec.Struct):
    body: msgspec.Raw


class _Identity(msgspec.Struct):
    custom_id: str


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_identity = msgspec.json.Decoder(_Identity).decode
_decode_text = msgspec.json.Decoder(str).decode
_LEADING_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')


def parse_line(number: int, raw: bytes) -> Line | BadLine | None:
    """Read line `number` (from 1) without its line feed; None when it is blank.

    A trailing carriage return is tolerated, a byte order mark only at the start of line 1.
    """
    if number == 1:
        raw = raw.removeprefix(_BOM)
    if not raw or raw.isspace():
        return None
    try:
        return _accept(number, raw)
    except _Refusal as refusal:
        return BadLine(number, refusal.code, refusal.message, refusal.param, read_custom_id(raw))
    except RecursionError:  # within our bound, but whoever called us left too little of the interpreter's
        return BadLine(number, "invalid_json_line", _TOO_DEEP, None, read_custom_id(raw))


def too_long(number: int, limit_bytes: int) -> BadLine:
    """Refuse a line of which nothing was kept, because it is longer than the limit."""
    return BadLine(number, "line_too_long", f"the line is longer than {limit_bytes} bytes")


def read_custom_id(raw: bytes) -> str | None:
    """Find the custom_id of a line that need not be good; None when it has none that is valid.

    In a line that is not JSON to its end, only a custom_id that comes first is believed.
    """
    custom_id: str | None
    try:
        custom_id = _decode_identity(raw.removeprefix(_BOM)).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        custom_id = _leading_custom_id(raw)
    return custom_id if custom_id and len(custom_id) <= LONGEST_CUSTOM_ID else None


def _leading_custom_id(raw: bytes) -> str | None:
    # As escapes, 512 characters take up to 12 bytes each; a longer one would be refused in any case.
    found = _LEADING_ID.match(raw, 0, 64 + 12 * LONGEST_CUSTOM_ID)
    if found is None:
        return None
    try:
        return _decode_text(found[1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _accept(number: int, raw: bytes) -> Line:
    if nested_too_deep(raw):
        raise _Refusal("invalid_json_line", _TOO_DEEP)
    line = _json_object(raw)
    for key in _REQUIRED:
        if key not in line:
            raise _Refusal("missing_required_parameter", f"{key} is missing", key)
    custom_id = _custom_id(line["custom_id"])
    _check_route(line["method"], line["url"])
    body = _body(line["body"])
    _check_repeated_keys(raw, line)
    prompt = measure(body)
    return Line(
        number=number,
        custom_id=custom_id,
        url=line["url"],
        body=bytes(_decode_body(raw).body),
        model=body.get("model"),
        prompt_chars=prompt.characters,
        asked_tokens=asked_tokens(body),
        prefix_key=prompt.prefix_key,
        strategy=_strategy(line.get("forebay")),
    )


def _json_object(raw: bytes) -> dict[str, Any]:
    """Decode all of the line, unknown keys too: only a full decode finds NaN, bad UTF-8 and huge numbers."""
    try:
        line = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Refusal("invalid_json_line", f"the line is not valid JSON: {_why(raw, error)}") from None
    if type(line) is not dict:
        raise _Refusal("invalid_json_line", "the line is JSON but not an object")
    return line


def _why(raw: bytes, error: Exception) -> str:
    reason = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
    if raw.startswith(_BOM):
        return "it starts with a byte order mark, which only the first line may have"
    if "invalid character" in reason and (b"NaN" in raw or b"Infinity" in raw):
        return f"{reason}; JSON has no NaN and no Infinity"
    return reason[:1].lower() + reason[1:]


def _custom_id(value: Any) -> str:
    if type(value) is not str:
        raise _Refusal("invalid_custom_id", "custom_id must be a string", "custom_id")
    if not 1 <= len(value) <= LONGEST_CUSTOM_ID:
        expected = f"custom_id must have 1 to {LONGEST_CUSTOM_ID} characters, not {len(value)}"
        raise _Refusal("invalid_custom_id", expected, "custom_id")
    return value


def _check_route(method: Any, url: Any) -> None:
    if method != "POST":
        raise _Refusal("invalid_method", f'method must be "POST", not {_shown(method)}', "method")
    if type(url) is not str or url not in ALLOWED_URLS:
        allowed = ", ".join(sorted(ALLOWED_URLS))
        raise _Refusal("invalid_url", f"url must be one of {allowed}, not {_shown(url)}", "url")


def _body(body: Any) -> dict[str, Any]:
    if type(body) is not dict:
        raise _Refusal("invalid_body", "body must be a JSON object", "body")
    # Engines read 1 and "true" as true as well, and an answer in pieces is no line of a result file.
    if (stream := body.get("stream")) is not False and stream is not None:
        raise _Refusal("stream_not_supported", "body.stream must be false or absent", "body.stream")
    model = body.get("model")
    if model is not None and (type(model) is not str or not 1 <= len(model) <= LONGEST_MODEL):
        expected = f"body.model must be a string of 1 to {LONGEST_MODEL} characters"
        raise _Refusal("invalid_model", expected, "body.model")
    return body


def _strategy(options: Any) -> str | None:
    if options is None:
        return None
    if type(options) is not dict:
        raise _Refusal("invalid_options", "forebay must be an object", "forebay")
    strategy = options.get("strategy")
    if strategy is not None and (type(strategy) is not str or len(strategy) > LONGEST_STRATEGY):
        expected = f"forebay.strategy must be a string of at most {LONGEST_STRATEGY} characters"
        raise _Refusal("invalid_options", expected, "forebay.strategy")
    return strategy


def _check_repeated_keys(raw: bytes, line: dict[str, Any]) -> None:
    """Refuse an object that gives one key twice: readers disagree on which value counts.

    Every key is followed by one colon and a decoded object has each key once, so written out again it has
    fewer colons than its source exactly when a key was repeated. A colon spelt as an escape is the only other
    cause, and sends the line down the slow way too.
    """
    # A single byte is sought much faster than five, and many lines have no escape at all.
    may_escape_a_colon = b"\\" in raw and b"\\u003" in raw
    if not may_escape_a_colon and raw.count(b":") == _encode(line).count(b":"):
        return
    # The standard library, since only its hook sees an object's pairs before they become a dict.
    json.loads(raw, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # A million keys must not take a million looks at a million.
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise _Refusal(
            "duplicate_key", f"the key {_shown(repeated)} is given twice in one object", repeated[:64]
        )
    return found


def _shown(value: Any) -> str:
    text = _encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
