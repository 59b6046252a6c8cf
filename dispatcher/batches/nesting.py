"""How deep JSON is nested, told from its bytes: a bound that is the same whoever reads them.

Readers of JSON call themselves for each level, and fail at a depth that depends on who called them: what one
process took in, another could not read back. So what comes from outside is held to `DEEPEST` here, before it
is kept. Whether bytes are JSON at all is for who decodes them. Pure: bytes in, an answer out.
"""

import re

DEEPEST = 256
"""Levels that are read. Prompts and schemas have a dozen or two; engines give up at some hundred."""

_OPENING = frozenset(b"[{")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def nested_too_deep(raw: bytes, deepest: int = DEEPEST) -> bool:
    """Whether arrays and objects stand more than `deepest` in each other. Bytes that are not JSON may be any.

    Costs two searches for a byte, unless there are more brackets than levels.
    """
    if raw.count(b"[") + raw.count(b"{") <= deepest:
        return False
    level = 0
    for sign in _STRING.sub(b"", raw).translate(None, delete=_NO_BRACKETS):
        level += 1 if sign in _OPENING else -1
        if level > deepest:
            return True
    return False
