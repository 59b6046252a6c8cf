"""Where the front door finds Redis and the batches' files: flags, `FOREBAY_*` variables, `forebay.toml`."""

from __future__ import annotations

from pydantic import Field, ValidationError

from dispatcher.batches.intake import Limits
from dispatcher.settings import default_storage
from workers.settings import ServiceSettings, explain


class FrontSettings(ServiceSettings):
    """What every command needs that speaks to a Redis."""

    storage: str = Field(
        default_factory=default_storage,
        description="where batches' files are: a folder or any fsspec URL; the dispatchers must see the same",
    )
    most_queued_requests: int = Field(
        default=5_000_000, ge=1, description="requests that may wait in a queue before files are refused"
    )
    limits: Limits = Field(default=Limits(), description="what an input file may hold")


def front_settings(redis_url: str | None = None, storage: str | None = None) -> FrontSettings:
    """The settings, with what was given by flag. Raises SettingsError."""
    given = {"redis_url": redis_url, "storage": storage}
    try:
        return FrontSettings(**{name: value for name, value in given.items() if value})  # type: ignore[arg-type]  # both are text
    except ValidationError as error:
        raise explain(error) from error
