"""How services are configured: flags, `FOREBAY_*` variables, then `forebay.toml`; unknown keys are errors.

Which settings there are is each service's subject. The file has shared keys at its top, a table for each
service, and one `[[worker]]` table for each worker that a person wants registered.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from workers.errors import SettingsError

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
SHARED_KEYS = frozenset({"redis_url", "storage", "log_level", "input", "most_queued_requests", "keep"})
SECTIONS = frozenset({"monitor", "dispatcher", "worker"})


def config_file() -> Path:
    """The file to read: `$FOREBAY_CONFIG`, else `forebay.toml` in the working folder, if any."""
    return Path(os.environ.get("FOREBAY_CONFIG", "forebay.toml"))


def read_config(path: Path) -> dict[str, Any]:
    """The file's content, empty when there is none. Raises SettingsError for bad TOML or an unknown key, and
    when there is no file where `$FOREBAY_CONFIG` says there is one.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if os.environ.get("FOREBAY_CONFIG") == str(path):
            raise SettingsError(f"{path}: there is no such file, which FOREBAY_CONFIG names") from error
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    unknown = sorted(content.keys() - SHARED_KEYS - SECTIONS)
    if unknown:
        known = ", ".join(sorted(SHARED_KEYS | SECTIONS))
        raise SettingsError(f"{path}: unknown key {', '.join(unknown)}; there are {known}")
    for name in sorted(SECTIONS - {"worker"}):
        if not isinstance(content.get(name, {}), dict):
            raise SettingsError(f"{path}: {name} is a table; write [{name}], with one bracket each side")
    return content


class ServiceSettings(BaseSettings):
    """What every service is told. A subclass names its table of the file in ``section``."""

    model_config = SettingsConfigDict(
        env_prefix="FOREBAY_",
        env_nested_delimiter="__",
        env_parse_none_str="none",
        frozen=True,
        extra="forbid",
    )
    section: ClassVar[str] = ""

    redis_url: str = Field(
        default=DEFAULT_REDIS_URL, description="redis://, rediss://, unix:// or redis+sentinel://"
    )
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic-settings' signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic-settings' signature
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        content = read_config(config_file())
        fields = settings_cls.model_fields
        shared = {name: content[name] for name in SHARED_KEYS & content.keys() if name in fields}
        file = InitSettingsSource(settings_cls, shared | content.get(cls.section, {}))
        return init_settings, env_settings, file


def explain(error: ValidationError) -> SettingsError:
    """What is wrong with the settings, for people: the key, and why."""
    lines = [
        f"{'.'.join(str(step) for step in item['loc']) or 'settings'}: {item['msg']}"
        for item in error.errors(include_url=False, include_input=False)
    ]
    return SettingsError("; ".join(lines))
