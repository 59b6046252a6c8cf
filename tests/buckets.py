"""moto's S3 server in a thread of the tests, which may be told to refuse for a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_numbers = itertools.count(1)
_BODY = "<Error><Code>{}</Code><Message>{}</Message></Error>"
_REFUSALS = {
    "slow": ("503 Service Unavailable", "SlowDown", "Please reduce your request rate."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
}


class _Quiet(WSGIRequestHandler):
    def log(self, *_args: Any) -> None:
        """Nobody reads it."""


class S3:
    """One server. `refused` counts the requests that it refused.

    All of a process share moto's memory: each has a `bucket` of its own.
    """

    def __init__(self) -> None:
        self.bucket = f"forebay-{next(_numbers)}"
        self.refused = 0
        self._refuses: tuple[str, frozenset[str]] | None = None
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def refusing(self, how: str, *methods: str) -> Iterator[None]:
        """Refuse requests of these HTTP methods: `slow` or `denied`."""
        self._refuses = (how, frozenset(methods))
        try:
            yield
        finally:
            self._refuses = None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        refuses = self._refuses
        if refuses is None or environ["REQUEST_METHOD"] not in refuses[1]:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        self.refused += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, message = _REFUSALS[refuses[0]]
        body = _BODY.format(code, message).encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def s3_for_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A server with an empty bucket, named by the environment as a user names theirs."""
    import s3fs

    server = S3()
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "a secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    # Whoever asked before asked another server: s3fs keeps its connections for as long as the process lives.
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(server.bucket)
    try:
        yield server
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.close()
