"""Connections to Redis or Valkey: made here only, so that pools, time-outs and errors are the same.

Two colours: the services speak asyncio; RQ's own bookkeeping is synchronous and runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    ClusterDownError,
    DataError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from workers.errors import SettingsError, StoreUnavailable
from workers.sentinel import is_sentinel_url, master_pool, sync_master_pool

AsyncRedis = redis.asyncio.Redis
SyncRedis = redis.Redis
Refused = ResponseError
"""The server's word that what was asked does not fit: a key is of another type, mostly. It will not pass."""

SOCKET_TIMEOUT_S = 10.0
_IN_NETLOC = re.compile(r"(//[^:/@]*):[^?#]*@")
"""To the last @: a password may hold others, or a slash, with which the URL is impossible and told of."""
_IN_QUERY = re.compile(r"([?&][^=&]*password=)[^&#]*", re.IGNORECASE)
_POOL_SIZE = 64
_WAIT_FOR_CONNECTION_S = 20.0
_PASSING = (OutOfMemoryError, ReadOnlyError, MasterDownError, TryAgainError, ClusterDownError)
_PASSING_WORDS = re.compile(
    r"(?:^|of pipeline caused error: [('\"]*|-)(BUSY|NOREPLICAS|MISCONF|LOADING|UNKILLABLE|READONLY|OOM) "
)
"""Errors of a server that cannot now: redis-py strips the first word of those that it has a class for, puts
words before those of a pipeline's step, and Redis 6.2 before those of a script's.
"""


def public_url(url: str) -> str:
    """The URL without its passwords, for messages and logs."""
    return _IN_QUERY.sub(r"\1***", _IN_NETLOC.sub(r"\1:***@", url))


def connect(url: str) -> AsyncRedis:
    """An asyncio client that decodes to str. No I/O yet. Raises SettingsError for an impossible URL."""
    with _refusing(url):
        make = master_pool if is_sentinel_url(url) else redis.asyncio.BlockingConnectionPool.from_url
        pool = make(
            url,
            max_connections=_POOL_SIZE,
            timeout=_WAIT_FOR_CONNECTION_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            # redis-py 8 recurses without end when a health check meets a server that wants a password.
            health_check_interval=0,
            decode_responses=True,
            retry=redis.asyncio.retry.Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.02), 3),
        )
    return redis.asyncio.Redis.from_pool(pool)


def connect_sync(url: str) -> SyncRedis:
    """A synchronous client that returns bytes, as RQ wants it. No I/O yet.

    Its socket time-out is longer than RQ's longest blocking pop. Raises SettingsError for an impossible URL.
    """
    with _refusing(url):
        make = sync_master_pool if is_sentinel_url(url) else redis.BlockingConnectionPool.from_url
        pool = make(
            url,
            max_connections=_POOL_SIZE,
            timeout=_WAIT_FOR_CONNECTION_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            health_check_interval=30,
            retry=Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.02), 3),
        )
    return redis.Redis.from_pool(pool)


@contextlib.contextmanager
def _refusing(url: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        message = (
            f"{public_url(url)!r} is not a Redis URL (redis://, rediss://, unix:// or redis+sentinel://)"
        )
        detail = f": {error}" if is_sentinel_url(url) else ""
        raise SettingsError(message + detail) from error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn what redis-py raises into our errors: what may pass becomes StoreUnavailable, the rest stays.

    A cancellation that redis-py lost on the way is raised here, see `heed_cancellation`.
    """
    try:
        yield
        heed_cancellation()
    except (ResponseError, DataError) as error:
        if isinstance(error, _PASSING) or _PASSING_WORDS.search(str(error)):
            raise StoreUnavailable(f"Redis cannot now: {error}") from error
        raise
    except RedisError as error:
        raise StoreUnavailable(f"Redis does not answer: {error}") from error
    except (OSError, TimeoutError) as error:
        raise StoreUnavailable(f"Redis does not answer: {error}") from error


def heed_cancellation() -> None:
    """Raise CancelledError if somebody cancelled the running task and nothing raised it since.

    redis-py writes under ``asyncio.wait_for``, which before Python 3.12 drops a cancellation that arrives
    together with the result [python/cpython#86296]; a loop around it would then run for ever.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return  # a thread without a loop: RQ's bookkeeping
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def text_fields(fields: Mapping[Any, Any]) -> dict[str, str]:
    """A hash as our decoding client returns it; redis-py's types cannot tell that it decodes."""
    return {str(name): str(value) for name, value in fields.items()}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What matters of the server behind a URL. None: it would not say."""

    version: str | None
    maxmemory_policy: str | None

    @property
    def warning(self) -> str | None:
        """Why this server may lose what we store, or None."""
        if self.maxmemory_policy in (None, "noeviction"):
            return None
        return f"maxmemory-policy is {self.maxmemory_policy}: Redis may drop our keys; set it to noeviction"


async def server_facts(client: AsyncRedis) -> ServerFacts:
    """Ask the server for its version and eviction policy; raises StoreUnavailable when it does not answer."""
    with translated():
        await client.ping()
        version = policy = None
        with contextlib.suppress(ResponseError):
            info = await client.info("server")
            version = str(info.get("valkey_version") or info.get("redis_version") or "") or None
        with contextlib.suppress(ResponseError, RedisConnectionError):
            policy = (await client.config_get("maxmemory-policy")).get("maxmemory-policy")
        return ServerFacts(version=version, maxmemory_policy=policy)
