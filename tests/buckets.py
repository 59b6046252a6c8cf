"""moto's S3 server in a thread of the tests, which may be told to refuse for a while."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_numbers = itertools.count(1)
_BODY = "<Error><Code>{}</Code><Message>{}</Message></Error>"
_KEPT = "<Error><Key>{}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
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
        self._keeps = False
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

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Delete nothing, as a bucket without that permission: 200, with an error for each key."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self._keeps and environ["REQUEST_METHOD"] == "POST" and environ["QUERY_STRING"] == "delete":
            return self._kept(environ, start_response)
        refuses = self._refuses
        if refuses is None or environ["REQUEST_METHOD"] not in refuses[1]:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        _body(environ)
        status, code, message = _REFUSALS[refuses[0]]
        return self._refusal(status, _BODY.format(code, message), start_response)

    def _kept(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        errors = [_KEPT.format(key) for key in re.findall("<Key>(.*?)</Key>", _body(environ).decode())]
        return self._refusal("200 OK", f"<DeleteResult>{''.join(errors)}</DeleteResult>", start_response)

    def _refusal(self, status: str, text: str, start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.refused += 1
        body = text.encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


def _body(environ: dict[str, Any]) -> bytes:
    """All that was sent, which has to be read also when it is of no interest."""
    data: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return data


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
