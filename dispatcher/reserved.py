"""Reserved keys of a batch line's body, and what becomes of them when the request is sent. Pure.

`priority` and `user` speak to an engine's scheduler and to whoever counts by user: what a line asks for there
is the operator's to allow. All other keys of a body are the author's, and are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

Changes: TypeAlias = Mapping[str, int | str | None]
"""What is done to bodies, by key: set to this value; None: taken out. Other keys stay."""
Policy: TypeAlias = Literal["keep", "drop", "set"]

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class ReservedKeys(BaseModel):
    """The operator's policy for each key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    priority: Policy = Field(default="keep", description="keep what a line says, drop it, or set one value")
    priority_value: int = Field(
        default=0, description="the value, where it is set: in the body of every line"
    )
    user: Policy = Field(default="keep", description="the same")
    user_value: str | None = Field(default=None, min_length=1, max_length=512, description="the same")

    @model_validator(mode="after")
    def _a_user_that_is_set_has_a_name(self) -> Self:
        if self.user == "set" and self.user_value is None:
            raise ValueError("user = set needs a user_value")
        return self

    @property
    def changes(self) -> Changes:
        """What the policy does to bodies."""
        policies = {"priority": (self.priority, self.priority_value), "user": (self.user, self.user_value)}
        return {
            key: value if policy == "set" else None
            for key, (policy, value) in policies.items()
            if policy != "keep"
        }


def with_changes(body: bytes, changes: Changes) -> bytes:
    """Make the changes to a body, which is a JSON object with each key once.

    A body to which nothing changes is the same bytes. In another the values of all other keys are the same
    bytes in the same order; only space between them goes.
    """
    if not changes or not _may_change(body, changes):
        return body
    members = _decode(body)
    changed = {**members, **{key: _raw(value) for key, value in changes.items() if value is not None}}
    for key, value in changes.items():
        if value is None:
            changed.pop(key, None)
    return body if changed == members else _encode(changed)


def _may_change(body: bytes, changes: Changes) -> bool:
    """Whether it is worth decoding: most bodies have no reserved key. One may be spelled with escapes."""
    return b"\\u" in body or any(
        value is not None or f'"{key}"'.encode() in body for key, value in changes.items()
    )


def _raw(value: int | str) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
