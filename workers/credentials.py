"""A worker's key: read where its record says, at every use, so that a key may be changed in place.

Only the *name* of a variable or file is ever stored; the key itself is never stored, logged or put into a
reason. How it is sent belongs to whoever asks the worker.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from workers.errors import GiveUp


class MissingKeyError(GiveUp):
    """The record names a key that this process does not have: no such variable or file, or no key in it.

    What holds signs that no header can carry is no key.
    """


def read_key(variable: str | None, file: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The worker's key; None when its record names none. Raises MissingKeyError, whose text is for people."""
    if file is not None:
        return _from_file(file)
    if variable is None:
        return None
    key = environ.get(variable, "").strip()
    if not key:
        raise MissingKeyError(f"environment variable {variable} is not set for this process")
    return _sendable(key, f"environment variable {variable}")


def key_if_there(
    variable: str | None, file: str | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The same, and None when the key is missing or none: the worker's refusal then says so."""
    try:
        return read_key(variable, file, environ)
    except MissingKeyError:
        return None


def _from_file(file: str) -> str:
    try:
        key = Path(file).read_text(encoding="utf-8-sig").strip()  # some editors begin a file with a BOM
    except (OSError, UnicodeDecodeError) as error:
        raise MissingKeyError(f"key file {file} cannot be read: {type(error).__name__}") from error
    if not key:
        raise MissingKeyError(f"key file {file} is empty")
    return _sendable(key, f"key file {file}")


def _sendable(key: str, source: str) -> str:
    """The key, if a header can carry it; `source` is where it was read."""
    if not (key.isascii() and key.isprintable()):
        raise MissingKeyError(f"{source} holds more than a key: a sign that is not printable ASCII")
    return key
