"""Where the front door finds Redis and the batches' files: flags, `FOREBAY_*` variables, `forebay.toml`."""

from __future__ import annotations

from pydantic import Field, ValidationError, field_validator

from dispatcher.batches.intake import Limits
from dispatcher.settings import default_storage
from forebay.durations import parse_keep
from workers.errors import SettingsError
from workers.settings import ServiceSettings, explain


class FrontSettings(ServiceSettings):
    """What every command needs that speaks to a Redis."""

    storage: str = Field(
        default_factory=default_storage,
        description="where batches' files are: a folder or any fsspec URL; the dispatchers must see the same",
    )
    keep: str | None = Field(
        default=None,
        description="how long batches stay after their end unless it is said, as 30d; None: for ever",
    )
    most_queued_requests: int = Field(
        default=5_000_000, ge=1, description="requests that may wait in a queue before files are refused"
    )
    input: Limits = Field(default=Limits(), description="what an input file may hold")

    def keep_s(self, given: str | float | None) -> float | None:
        """How long a batch stays after its end, in seconds, None: for ever; ``given`` None: as configured.

        Raises SettingsError.
        """
        keep = self.keep if given is None else given
        return None if keep is None else parse_keep(keep)

    @field_validator("keep")
    @classmethod
    def _is_a_duration(cls, keep: str | None) -> str | None:
        if keep is not None:
            try:
                parse_keep(keep)
            except SettingsError as error:
                raise ValueError(str(error)) from error
        return keep


def front_settings(redis_url: str | None = None, storage: str | None = None) -> FrontSettings:
    """The settings, with what was given by flag. Raises SettingsError."""
    given = {"redis_url": redis_url, "storage": storage}
    try:
        return FrontSettings(**{name: value for name, value in given.items() if value})  # type: ignore[arg-type]  # both are text
    except ValidationError as error:
        raise explain(error) from error
