"""What a person says of a worker: URL, runtime, models, weight, its key's variable, capacity hints.

What the worker says of itself belongs to ``load`` (numbers) and ``registry`` (state, models, incarnation).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from workers.errors import InvalidWorkerUrl


class Runtime(StrEnum):
    """The software that a worker runs; decides which metrics page is read and how."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    LMDEPLOY = "lmdeploy"
    TOKENSPEED = "tokenspeed"
    TGI = "tgi"
    LLAMACPP = "llamacpp"
    GENERIC = "generic"


def normalise_url(text: str) -> str:
    """The one spelling of a worker's base URL: no trailing slash, no ``/v1``, host in lower case.

    ``http://h:p``, ``http://h:p/``, ``http://h:p/v1`` and ``http://h:p/v1/`` are the same worker
    [BerriAI/litellm#3346]. A default port is dropped; any other path is kept (servers behind a proxy).

    Raises InvalidWorkerUrl when the text is not the http(s) URL of a server, or carries credentials, a
    query or a fragment (a key belongs into a variable or file, see ``api_key_env`` and ``api_key_file``).
    """
    try:
        parts = urlsplit(text.strip())
    except ValueError as error:
        raise InvalidWorkerUrl(f"{text!r} is not the URL of a worker; write http://HOST:PORT") from error
    odd = any(sign.isspace() or not sign.isprintable() for sign in text.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or odd:
        raise InvalidWorkerUrl(f"{text!r} is not the URL of a worker; write http://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise InvalidWorkerUrl("a worker's URL may not carry credentials; use --api-key-env NAME instead")
    if parts.query or parts.fragment:
        raise InvalidWorkerUrl(f"{text!r} has a query or a fragment; write only http://HOST:PORT[/PATH]")
    try:
        port = parts.port
    except ValueError as error:
        raise InvalidWorkerUrl(f"{text!r} has an impossible port") from error
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    default = {"http": 80, "https": 443}[parts.scheme]
    netloc = host if port in (None, default) else f"{host}:{port}"
    path = parts.path.rstrip("/")
    while path.endswith("/v1"):
        path = path[: -len("/v1")].rstrip("/")
    return f"{parts.scheme}://{netloc}{path}"


def worker_id(url: str) -> str:
    """The worker's name in keys, logs and metrics: its normalised URL without the scheme."""
    return normalise_url(url).split("://", 1)[1]


WorkerUrl = Annotated[str, AfterValidator(normalise_url)]


class WorkerSpec(BaseModel):
    """What a person says of a worker. Leaves the process: kept in Redis field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: WorkerUrl
    runtime: Runtime | None = Field(default=None, description="None: detected once per incarnation")
    models: tuple[str, ...] = Field(default=(), description="empty: what /v1/models says")
    weight: float = Field(default=1.0, gt=0, le=1000, description="static preference; 1 is usual")
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="name of the environment variable that holds the key; the key itself never enters Redis",
    )
    api_key_file: str | None = Field(
        default=None,
        pattern=r"^/[^\n\r]*[^/\n\r]$",
        description="absolute path, on the services' machines, of a file that holds the key",
    )
    max_running: int | None = Field(
        default=None, gt=0, description="requests it can run at once, if a person knows; None: learned"
    )

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("a worker has one key: give api_key_env or api_key_file, not both")
        return self

    @property
    def id(self) -> str:
        return worker_id(self.url)
