"""Redis under Sentinel: what its URL says, and pools whose connections go to whoever is the master now.

``redis+sentinel://[user:password@]host[:26379][,host...]/service[/db]``, or ``rediss+sentinel://`` for TLS.
User and password are the master's; those of the sentinels, if they want any, are the query's
``sentinel_username`` and ``sentinel_password``. Time-outs and retries are ``connection``'s subject.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_PORT = 26379
_OF_SENTINELS = {"sentinel_username": "username", "sentinel_password": "password"}
_OF_TLS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})
_ASKING = {"socket_timeout": 2.0, "socket_connect_timeout": 1.0}
"""A sentinel that does not answer so soon is passed over for the next one, at once."""


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """Where the sentinels are, which service they watch, and what its master wants to hear.

    ``sentinels`` are hosts and ports. Options are keyword arguments of connections: the master's, with its
    password, and the sentinels'.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    master_options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)


def is_sentinel_url(url: str) -> bool:
    """Whether the URL's scheme is one of Sentinel's."""
    return url.partition("://")[0].lower() in _SCHEMES


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Read the URL. Raises ValueError for one that is incomplete or says what is not known."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("a Sentinel URL names its service: redis+sentinel://host:26379/service/0")
    options = _query(parts)
    tls: dict[str, Any] = {name: value for name, value in options.items() if name in _OF_TLS}
    if parts.scheme.lower() == "rediss+sentinel":
        tls["ssl"] = True
    asking = {_OF_SENTINELS[name]: value for name, value in options.items() if name in _OF_SENTINELS}
    return SentinelUrl(
        sentinels=tuple(_address(host) for host in hosts.split(",")),
        service=unquote(service),
        master_options={"db": int(database or 0), **_credentials(credentials), **tls},
        sentinel_options={**_ASKING, **asking, **tls},
    )


def _query(parts: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    unknown = sorted(options.keys() - _OF_SENTINELS.keys() - _OF_TLS)
    if unknown:
        raise ValueError(f"unknown options of a Sentinel URL: {', '.join(unknown)}")
    return options


def _address(host: str) -> tuple[str, int]:
    seen = urlsplit(f"//{host}")  # it knows about brackets, and checks the port
    if not seen.hostname:
        raise ValueError("a Sentinel URL names each sentinel as host:port, with commas between them")
    return seen.hostname, seen.port or _PORT


def _credentials(text: str) -> dict[str, str]:
    username, _, password = text.partition(":")
    given = {"username": unquote(username), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


class _ToMaster:
    """For asyncio connections: whenever one is made anew, also between two tries, the sentinels are asked.

    redis-py's own ask only when a connection leaves its pool. One whose master stands still would be tried
    there again and again, long after another became the master.
    """

    connection_pool: Any
    _reader: Any

    async def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        if self._reader is None:
            self.host, self.port = await self.connection_pool.get_master_address()
        await super().connect_check_health(*args, **kwargs)  # type: ignore[misc]  # of the class beside this


class _Connection(_ToMaster, redis.asyncio.sentinel.SentinelManagedConnection):
    pass


class _TlsConnection(_ToMaster, redis.asyncio.sentinel.SentinelManagedSSLConnection):
    pass


class _SyncToMaster:
    """The same for synchronous connections."""

    connection_pool: Any
    _sock: Any

    def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        if self._sock is None:
            self.host, self.port = self.connection_pool.get_master_address()
        super().connect_check_health(*args, **kwargs)  # type: ignore[misc]  # of the class beside this


class _SyncConnection(_SyncToMaster, redis.sentinel.SentinelManagedConnection):
    pass


class _SyncTlsConnection(_SyncToMaster, redis.sentinel.SentinelManagedSSLConnection):
    pass


class MasterPool(redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """Asyncio connections to the master, at most so many; whoever wants more waits."""

    async def aclose(self) -> None:
        """Close the connections to the sentinels too."""
        await super().aclose()
        await self.sentinel_manager.aclose()


class SyncMasterPool(redis.sentinel.SentinelConnectionPool, redis.BlockingConnectionPool):
    """The same for synchronous clients."""

    def close(self) -> None:
        """Close the connections to the sentinels too."""
        super().close()
        self.sentinel_manager.close()


def master_pool(url: str, **options: Any) -> MasterPool:
    """An asyncio pool; ``options`` are those of a blocking pool. Raises ValueError."""
    seen = parse_sentinel_url(url)
    asking = seen.sentinel_options | {"retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}
    manager = redis.asyncio.sentinel.Sentinel(seen.sentinels, sentinel_kwargs=asking)
    kind = _TlsConnection if "ssl" in seen.master_options else _Connection
    return MasterPool(seen.service, manager, connection_class=kind, **(options | seen.master_options))


def sync_master_pool(url: str, **options: Any) -> SyncMasterPool:
    """A synchronous pool; ``options`` are those of a blocking pool. Raises ValueError."""
    seen = parse_sentinel_url(url)
    asking = seen.sentinel_options | {"retry": Retry(NoBackoff(), 0)}
    manager = redis.sentinel.Sentinel(seen.sentinels, sentinel_kwargs=asking)
    kind = _SyncTlsConnection if "ssl" in seen.master_options else _SyncConnection
    return SyncMasterPool(seen.service, manager, connection_class=kind, **(options | seen.master_options))
