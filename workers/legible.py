r"""Text that others wrote, made safe to show: on a terminal and in a log it can neither act nor pretend.

A custom_id, a model's name or a worker's reason may hold escape sequences, line feeds, or signs that turn the
direction of writing; shown as they are, they would move the cursor, forge a line, or hide what stands there.
They become escapes as Python and JSON write them: ``\x1b``, ``\u202e``. Nothing else is changed.
"""

from __future__ import annotations

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
_SEPARATORS = [0x2028, 0x2029]
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*_CONTROLS, *_SEPARATORS, *_DIRECTIONS, *_SURROGATES)
} | {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}
_ESCAPES_IN_LINES = {code: text for code, text in _ESCAPES.items() if code not in (0x09, 0x0A)}
_ESCAPES_IN_JSON = {
    code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_SEPARATORS, *_DIRECTIONS, *_SURROGATES)
}


def legible(text: str) -> str:
    """The text on one line, with nothing in it that acts."""
    return text.translate(_ESCAPES)


def legible_lines(text: str) -> str:
    """The same for text whose own line feeds and tabs are meant, as a traceback's."""
    return text.translate(_ESCAPES_IN_LINES)


def legible_json(text: str) -> str:
    """JSON that means the same and holds nothing that acts.

    What JSON itself must escape is taken to be escaped, and its line feeds to stand between tokens.
    """
    return text.translate(_ESCAPES_IN_JSON)
