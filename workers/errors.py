"""The errors that the rooms share. Errors of one subject only stand with their subject.

::

    ForebayError
    +-- TryAgain                    the same step may succeed later
    |   +-- StoreUnavailable        Redis did not answer, or answered that it cannot now
    +-- GiveUp                      a person has to change something
    |   +-- SettingsError           a flag, variable or file says something impossible
    |   +-- UnknownWorker           no worker of that name or URL is registered
    |   +-- InvalidWorkerUrl        not an http(s) URL of a server
    +-- Fenced                      somebody newer holds what we held: drop the work, silently
"""

from __future__ import annotations


class ForebayError(Exception):
    """Root of everything that Forebay raises on purpose."""


class TryAgain(ForebayError):
    """The same step may succeed later."""


class StoreUnavailable(TryAgain):
    """Redis did not answer, or answered that it cannot now (loading, out of memory, read-only)."""


class GiveUp(ForebayError):
    """A person has to change something before this can work."""


class SettingsError(GiveUp):
    """A flag, an environment variable or ``forebay.toml`` says something impossible."""


class UnknownWorker(GiveUp):
    """No worker of that id or URL is registered."""


class InvalidWorkerUrl(GiveUp, ValueError):
    """The text is not the http(s) URL of a server."""


class Fenced(ForebayError):
    """Somebody newer holds what we held; the caller drops its work without a trace."""
