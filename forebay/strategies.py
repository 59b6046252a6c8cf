"""Which strategies a batch may name: Forebay's own, and those that are configured where it is submitted.

Dispatchers may run elsewhere; what they do not know, they answer with error lines. What a strategy is belongs
to ``dispatcher.scheduler.strategies``.
"""

from __future__ import annotations

from pydantic import ValidationError

from dispatcher.scheduler.strategies import DEFAULTS
from dispatcher.settings import DispatcherSettings
from workers.errors import SettingsError
from workers.settings import explain


def check_strategy(name: str | None) -> None:
    """Raise SettingsError unless it is a strategy's name; None names none, and is right.

    Reads the dispatcher's configuration when the name is not one of Forebay's own.
    """
    if name is None or name in DEFAULTS:
        return
    known = DEFAULTS | _configured()
    if name not in known:
        raise SettingsError(
            f"no strategy is named {name}; there are {', '.join(known)}. Others are configured below "
            "scheduler.strategies of the dispatcher, in the configuration here too"
        )


def _configured() -> dict[str, object]:
    try:
        return dict(DispatcherSettings().scheduler.strategies)
    except ValidationError as error:
        raise explain(error) from error
