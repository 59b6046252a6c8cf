"""Forebay's front door. ``from forebay import Forebay`` gives the Python client.

The name is looked up when it is asked for: a simulated engine, which lives in this package too, shall not
pay for the client's imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.client import Forebay

__all__ = ["Forebay"]


def __getattr__(name: str) -> Any:
    if name != "Forebay":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forebay.client import Forebay  # noqa: PLC0415 - see the module's docstring

    return Forebay
