"""The door to workers: what goes out, what comes back, and what becomes of all that can go wrong.

The wire is tried on real sockets, with a server that does as it is told; httpx' transports with a mock.
"""

import asyncio
import errno
import gzip
import inspect
import os
import socket
import tracemalloc

import aiohttp
import httpx
import pytest

from dispatcher.batches.parse import ALLOWED_URLS
from dispatcher.reply import Failure, FailureKind, Reply
from dispatcher.send import Sender, ThroughHttpx, kind_of, make_transport
from dispatcher.wire import ERRORS, WireError, kind_in
from forebay.simulator.server import accept_no_more

CHAT = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Worker:
    """A server that does to each request what the test says: ``on_request(transport, number from 1)``."""

    def __init__(self, on_request):
        self.on_request = on_request
        self.requests = []
        self.connections = 0
        self.lost = 0
        self.open = set()
        self.changed = asyncio.Condition()

    async def start(self):
        self.server = await asyncio.get_running_loop().create_server(lambda: _Served(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self):
        await accept_no_more(self.server)
        self.server.close()
        for transport in self.open:
            transport.abort()
        await self.until(lambda: not self.open)  # the server itself does not wait for them on Python 3.11

    async def until(self, holds):
        async with self.changed:
            await self.changed.wait_for(holds)


class _Served(asyncio.Protocol):
    def __init__(self, worker):
        self.worker = worker
        self.received = b""

    def connection_made(self, transport):
        self.transport = transport
        self.worker.connections += 1
        self.worker.open.add(transport)

    def data_received(self, data):
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0) if end else 0
        if end and len(body) >= length:
            self.received = b""
            self.worker.requests.append((head, body))
            self.worker.on_request(self.transport, len(self.worker.requests))
            self._tell()

    def connection_lost(self, exc):
        self.worker.lost += 1
        self.worker.open.discard(self.transport)
        self._tell()

    def _tell(self):
        async def tell():
            async with self.worker.changed:
                self.worker.changed.notify_all()

        self.worker.telling = asyncio.get_running_loop().create_task(tell())


def says(*parts, then=None):
    """Answers with ``parts``; then closes or resets."""

    def on_request(transport, _number):
        for part in parts:
            transport.write(part)
        if then == "close":
            transport.close()
        if then == "reset":
            linger = b"\1\0\0\0\0\0\0\0"
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()

    return on_request


@pytest.fixture
async def serve():
    workers = []

    async def start(on_request):
        workers.append(await Worker(on_request).start())
        return workers[-1]

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
async def sender():
    opened = Sender(make_transport(idle_s=3600))  # so that no connection is closed for resting
    yield opened
    await opened.aclose()


async def send(
    sender, url, *, path=CHAT, body=b'{"model":"m"}', api_key=None, timeout_s=20.0, request_id="r-1"
):
    return await sender.send(url, path, body, api_key=api_key, timeout_s=timeout_s, request_id=request_id)


# -- what goes out and comes back --


async def test_a_request_is_posted_as_it_is_with_length_host_and_key(serve, sender):
    worker = await serve(says(OK))
    body = '{"prompt":"\u20ac"}'.encode()
    await send(sender, worker.url, body=body, api_key="secret", request_id="line-7")
    head, received = worker.requests[0]
    lines = head.decode().split("\r\n")
    assert received == body
    assert lines[0] == f"POST {CHAT} HTTP/1.1"
    assert sorted(lines[1:]) == [
        "Accept: application/json",
        "Authorization: Bearer secret",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        f"Host: {worker.url.removeprefix('http://')}",
        "User-Agent: forebay",
        "X-Request-Id: line-7",
    ]


async def test_without_a_key_none_is_sent(serve, sender):
    worker = await serve(says(OK))
    await send(sender, worker.url)
    assert b"uthorization" not in worker.requests[0][0]


async def test_a_worker_behind_a_path_is_asked_below_that_path(serve, sender):
    worker = await serve(says(OK))
    await send(sender, f"{worker.url}/team-a")
    assert worker.requests[0][0].startswith(b"POST /team-a/v1/chat/completions HTTP/1.1\r\n")


async def test_the_reply_comes_back_whole_and_untouched(serve, sender):
    worker = await serve(
        says(
            b"HTTP/1.1 429 Too Many\r\nretry-after: 2\r\nCONTENT-TYPE: text/plain\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n\xff{\r\n",
            b"1\r\n}\r\n0\r\n\r\n",
        )
    )
    reply = await send(sender, worker.url)
    assert isinstance(reply, Reply)
    assert (reply.status, reply.body, reply.retry_after, reply.content_type) == (
        429,
        b"\xff{}",
        "2",
        "text/plain",
    )
    assert reply.elapsed_s > 0


async def test_what_is_said_before_the_reply_is_passed_over(serve, sender):
    worker = await serve(
        says(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nretry-after: 9\r\n\r\n", OK)
    )
    reply = await send(sender, worker.url)
    assert (reply.status, reply.body, reply.retry_after) == (200, b"{}", None)


async def test_a_reply_that_ends_with_its_connection_is_whole(serve, sender):
    worker = await serve(says(b"HTTP/1.0 200 OK\r\n\r\n{}", then="close"))
    assert (await send(sender, worker.url)).body == b"{}"


async def test_a_redirect_is_an_answer_and_is_not_followed(serve, sender):
    other = await serve(says(OK))
    away = f"HTTP/1.1 307 Away\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n".encode()
    worker = await serve(says(away))
    assert (await send(sender, worker.url, api_key="secret")).status == 307
    assert other.connections == 0


async def test_a_proxy_of_the_environment_is_not_used(serve, sender, monkeypatch):
    proxy, worker = await serve(says(OK)), await serve(says(OK))
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("http_proxy", proxy.url)
    assert isinstance(await send(sender, worker.url), Reply)
    assert proxy.connections == 0


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/v1/chat/completions/", "/v1/../admin", "", CHAT + "?a=b"]
)
async def test_only_inference_endpoints_can_be_reached(sender, path):
    with pytest.raises(ValueError, match="not an inference endpoint"):
        await send(sender, "http://127.0.0.1:1", path=path)


async def test_every_path_that_a_batch_may_name_can_be_reached(serve, sender):
    worker = await serve(says(OK))
    for path in ALLOWED_URLS:
        assert isinstance(await send(sender, worker.url, path=path), Reply)


# -- connections --


async def test_a_connection_is_used_again_and_two_at_once_need_two(serve, sender):
    worker = await serve(says(OK))
    for _ in range(3):
        await send(sender, worker.url)
    assert worker.connections == 1
    await asyncio.gather(send(sender, worker.url), send(sender, worker.url))
    assert worker.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        OK.replace(b"200 OK\r\n", b"200 OK\r\nConnection: close\r\n"),
    ],
)
async def test_a_connection_that_is_to_close_is_not_used_again(serve, sender, answer):
    worker = await serve(says(answer))
    for count in (1, 2):
        assert (await send(sender, worker.url)).body == b"{}"
        assert worker.connections == count


async def test_a_resting_connection_is_closed_before_the_worker_does(serve):
    worker = await serve(says(OK))
    sender = Sender(make_transport(idle_s=0.05))
    await send(sender, worker.url)
    await worker.until(lambda: worker.lost == 1)
    assert isinstance(await send(sender, worker.url), Reply)
    assert worker.connections == 2
    await sender.aclose()


async def test_a_connection_that_the_worker_closed_while_it_rested_fails_no_request(serve, sender):
    transports = []

    def on_request(transport, _number):
        transports.append(transport)
        transport.write(OK)

    worker = await serve(on_request)
    await send(sender, worker.url)
    transports[0].close()
    await worker.until(lambda: worker.lost == 1)
    assert isinstance(await send(sender, worker.url), Reply)
    assert worker.connections == 2


@pytest.mark.parametrize(
    "begun", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_cancelling_closes_the_connection_so_that_the_engine_stops(serve, sender, begun):
    worker = await serve(says(begun))
    task = asyncio.create_task(send(sender, worker.url))
    await worker.until(lambda: worker.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await worker.until(lambda: worker.lost == 1)


async def test_a_request_whose_time_is_over_fails_and_closes_its_connection(serve, sender):
    worker = await serve(says())
    failure = await send(sender, worker.url, timeout_s=0.05)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.TIMEOUT
    await worker.until(lambda: worker.lost == 1)


@pytest.mark.parametrize(
    ("begun", "kind"),
    [(b"", FailureKind.BROKEN), (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", FailureKind.CUT_OFF)],
)
async def test_closing_the_sender_ends_what_is_in_flight(serve, begun, kind):
    worker = await serve(says(begun))
    sender = Sender(make_transport())
    task = asyncio.create_task(send(sender, worker.url))
    await worker.until(lambda: worker.requests)
    await sender.aclose()
    failure = await task
    assert failure.kind in (kind, FailureKind.BROKEN)  # the reply's head may not have been read yet
    await worker.until(lambda: worker.lost == 1)


# -- what can go wrong --


@pytest.mark.parametrize(
    ("on_request", "kind"),
    [
        (says(then="reset"), FailureKind.BROKEN),
        (says(then="close"), FailureKind.BROKEN),
        (says(b"HTTP/1.1 200 OK\r\nConte", then="close"), FailureKind.BROKEN),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", then="close"), FailureKind.CUT_OFF),
        (
            says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", then="close"),
            FailureKind.CUT_OFF,
        ),
        (
            says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", then="close"),
            FailureKind.CUT_OFF,
        ),
        (says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{"), FailureKind.PROTOCOL),
        (says(b"SSH-2.0-OpenSSH_9.6\r\n"), FailureKind.PROTOCOL),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), FailureKind.PROTOCOL),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"), FailureKind.PROTOCOL),
    ],
)
async def test_a_reply_that_does_not_come_whole_is_a_failure_with_its_own_name(
    serve, sender, on_request, kind
):
    worker = await serve(on_request)
    failure = await send(sender, worker.url, api_key="secret")
    assert isinstance(failure, Failure)
    assert failure.kind is kind
    assert "secret" not in failure.detail
    await worker.until(lambda: worker.lost == 1)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "then"),
    [
        (CHUNKED, b"zz\r\n{"),
        (CHUNKED + b"1\r\n{\r\n", b"HTTP/1.1 502 Bad Gateway\r\n\r\n"),
        (CHUNKED + b"1\r\n{\r\n", b"1\r\n}xx"),
    ],
)
async def test_a_reply_that_goes_on_with_nonsense_ends_at_once(serve, sender, begun, then):
    going = []

    def on_request(transport, number):
        if number > 1:  # the connection has served one request already, and serves its second so
            transport.write(begun)
            going.append(transport)
        else:
            transport.write(OK)

    worker = await serve(on_request)
    await send(sender, worker.url)
    task = asyncio.create_task(send(sender, worker.url))
    await worker.until(lambda: len(worker.requests) == 2)
    for _ in range(5):
        await asyncio.sleep(0)  # the head is read before what follows, as when they come apart
    going[0].write(then)
    failure = await task
    assert isinstance(failure, Failure)
    assert failure.kind in (FailureKind.CUT_OFF, FailureKind.PROTOCOL)  # when both came at once
    await worker.until(lambda: worker.lost == 1)


async def test_a_reply_above_what_we_keep_is_refused_however_it_is_framed(serve):
    sender = Sender(make_transport(max_body_bytes=3))
    for framing in (b"Content-Length: 4\r\n\r\n{  }", b"Transfer-Encoding: chunked\r\n\r\n4\r\n{  }\r\n"):
        worker = await serve(says(b"HTTP/1.1 200 OK\r\n" + framing))
        assert (await send(sender, worker.url)).kind is FailureKind.TOO_LARGE
        await worker.until(lambda worker=worker: worker.lost == 1)
    await sender.aclose()


async def test_a_packed_reply_is_held_to_the_same_bound_and_never_unpacked_beyond_it(serve):
    packed = gzip.compress(bytes(64 * 1024 * 1024))  # 64 KiB on the wire
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    worker = await serve(says(head + packed))
    sender = Sender(make_transport(max_body_bytes=1024))
    tracemalloc.start()
    try:
        assert (await send(sender, worker.url)).kind is FailureKind.TOO_LARGE
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 32 * 1024 * 1024
    await sender.aclose()


async def test_a_reply_that_never_ends_is_ended_at_the_bound(serve):
    def floods(transport, _number):
        async def flood():
            while not transport.is_closing():
                transport.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
                await asyncio.sleep(0)

        transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        flooding.append(asyncio.create_task(flood()))

    flooding = []
    worker = await serve(floods)
    sender = Sender(make_transport(max_body_bytes=1024 * 1024))
    assert (await send(sender, worker.url)).kind is FailureKind.TOO_LARGE
    await worker.until(lambda: worker.lost == 1)
    await asyncio.wait(flooding)
    await sender.aclose()


async def test_a_port_where_nobody_listens_refuses_the_connection(sender):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        failure = await send(sender, f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert failure.kind is FailureKind.CONNECT


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".example"])
async def test_a_name_that_nobody_knows_is_no_connection(sender, host):
    assert (await send(sender, f"http://{host}:8000")).kind is FailureKind.CONNECT


async def test_tls_with_a_server_that_does_not_speak_it_is_no_connection(sender):
    async def answer_in_plain(_reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer_in_plain, "127.0.0.1", 0) as server:
        failure = await send(sender, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert failure.kind is FailureKind.CONNECT


async def test_a_connection_that_does_not_come_about_in_time_is_told_from_a_slow_answer(serve):
    silent = await serve(says())
    sender = Sender(make_transport(connect_timeout_s=0.05))
    failure = await send(
        sender, silent.url.replace("http:", "https:")
    )  # its side of the handshake never comes
    assert failure.kind is FailureKind.CONNECT_TIMEOUT
    await sender.aclose()


@pytest.mark.parametrize(
    "fault",
    [
        {"api_key": "a\r\nX-Evil: 1"},
        {"api_key": "a\nb"},
        {"api_key": "caf\u00e9"},
        {"request_id": "a\0b"},
        {"url": "http://127.0.0.1:99999"},
        {"url": "ftp://127.0.0.1"},
        {"url": "127.0.0.1:80"},
        {"url": "http://127.0.0.1/a b"},
        {"url": "http://127.0.0.1/a\r\nb"},
    ],
)
async def test_a_request_that_cannot_be_written_is_not_sent(sender, fault):
    failure = await send(sender, **({"url": "http://127.0.0.1:1"} | fault))
    assert failure.kind is FailureKind.UNSENDABLE


# -- aiohttp's own errors --

AIOHTTP_ERRORS = sorted(
    {
        error
        for module in (aiohttp, aiohttp.client_exceptions)
        for _, error in inspect.getmembers(module, inspect.isclass)
        if issubclass(error, Exception) and error.__module__.startswith("aiohttp.")
    },
    key=lambda error: error.__name__,
)
OF_OTHER_PROTOCOLS = {
    "BadContentDispositionHeader",  # multipart bodies
    "BadContentDispositionParam",
    "EofStream",  # reading a stream piece by piece
    "WSMessageTypeError",  # web sockets
    "WebSocketError",
}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("error", AIOHTTP_ERRORS)
def test_every_error_of_aiohttp_that_a_post_may_end_with_has_a_kind(error, begun):
    unmade = error.__new__(error)  # its class says it all, and each is made of something else
    if error.__name__ in OF_OTHER_PROTOCOLS:
        with pytest.raises(LookupError):
            kind_in(ERRORS, unmade, begun=begun)
    else:
        assert isinstance(kind_in(ERRORS, unmade, begun=begun), FailureKind)


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (aiohttp.ConnectionTimeoutError, FailureKind.CONNECT_TIMEOUT, FailureKind.CONNECT_TIMEOUT),
        (aiohttp.SocketTimeoutError, FailureKind.TIMEOUT, FailureKind.TIMEOUT),
        (aiohttp.ClientConnectorDNSError, FailureKind.CONNECT, FailureKind.CONNECT),
        (aiohttp.ClientConnectorCertificateError, FailureKind.CONNECT, FailureKind.CONNECT),
        (aiohttp.ServerDisconnectedError, FailureKind.BROKEN, FailureKind.CUT_OFF),
        (aiohttp.ClientOSError, FailureKind.BROKEN, FailureKind.CUT_OFF),
        (aiohttp.ClientPayloadError, FailureKind.CUT_OFF, FailureKind.CUT_OFF),
        (aiohttp.ClientResponseError, FailureKind.PROTOCOL, FailureKind.PROTOCOL),
        (aiohttp.InvalidURL, FailureKind.UNSENDABLE, FailureKind.UNSENDABLE),
    ],
)
def test_an_error_of_aiohttp_is_named_by_what_it_says_and_how_far_the_exchange_had_come(error, before, after):
    unmade = error.__new__(error)
    assert kind_in(ERRORS, unmade, begun=False) is before
    assert kind_in(ERRORS, unmade, begun=True) is after


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_want_of_connections_is_ours_and_no_fault_of_the_worker(number):
    there_are_none = aiohttp.ClientConnectorError(None, OSError(number, os.strerror(number)))
    assert kind_in(ERRORS, there_are_none, begun=False) is FailureKind.EXHAUSTED


def test_aiohttp_has_the_errors_that_this_was_written_for():
    assert len(AIOHTTP_ERRORS) == 35
    assert {error.__name__ for error in AIOHTTP_ERRORS} >= OF_OTHER_PROTOCOLS


# -- any httpx transport in the wire's place --

HTTPX_ERRORS = sorted(
    (error for _, error in inspect.getmembers(httpx, inspect.isclass) if issubclass(error, Exception)),
    key=lambda error: error.__name__,
)


def raised(error):
    match error.__name__:
        case "HTTPStatusError":
            return error("", request=httpx.Request("POST", "http://a"), response=httpx.Response(500))
        case "StreamConsumed" | "StreamClosed" | "RequestNotRead" | "ResponseNotRead":
            return error()
        case _:
            return error("")


@pytest.mark.parametrize("error", HTTPX_ERRORS)
async def test_every_error_of_httpx_becomes_a_failure(error):
    def handler(_request):
        raise raised(error)

    failure = await send(Sender(httpx.MockTransport(handler)), "http://a:1")
    assert isinstance(failure, Failure)
    assert failure.detail == error.__name__


def test_httpx_has_the_errors_that_this_was_written_for():
    assert len(HTTPX_ERRORS) == 28


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (httpx.ConnectTimeout(""), FailureKind.CONNECT_TIMEOUT, FailureKind.CONNECT_TIMEOUT),
        (httpx.ReadTimeout(""), FailureKind.TIMEOUT, FailureKind.TIMEOUT),
        (httpx.ConnectError(""), FailureKind.CONNECT, FailureKind.CONNECT),
        (httpx.ReadError(""), FailureKind.BROKEN, FailureKind.CUT_OFF),
        (httpx.RemoteProtocolError(""), FailureKind.BROKEN, FailureKind.CUT_OFF),
        (httpx.DecodingError(""), FailureKind.PROTOCOL, FailureKind.PROTOCOL),
        (httpx.UnsupportedProtocol(""), FailureKind.UNSENDABLE, FailureKind.UNSENDABLE),
        (ConnectionResetError(), FailureKind.BROKEN, FailureKind.CUT_OFF),
        (ConnectionRefusedError(), FailureKind.CONNECT, FailureKind.CONNECT),
        (socket.gaierror(), FailureKind.CONNECT, FailureKind.CONNECT),
        (TimeoutError(), FailureKind.TIMEOUT, FailureKind.TIMEOUT),
    ],
)
def test_an_error_is_named_by_how_far_the_exchange_had_come(error, before, after):
    assert kind_of(error, begun=False) is before
    assert kind_of(error, begun=True) is after


async def test_a_mistake_of_ours_does_not_pass_for_a_workers():
    def handler(_request):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        await send(Sender(httpx.MockTransport(handler)), "http://a:1")
    with pytest.raises(LookupError):
        kind_of(KeyError("ours"), begun=False)


async def test_a_mock_gets_the_request_and_gives_the_reply():
    def handler(request):
        assert request.headers["authorization"] == "Bearer secret"
        assert (request.method, request.url.path) == ("POST", CHAT)
        return httpx.Response(503, headers={"Retry-After": "3"}, content=request.content)

    reply = await send(Sender(httpx.MockTransport(handler)), "http://a:1", api_key="secret")
    assert (reply.status, reply.body, reply.retry_after) == (503, b'{"model":"m"}', "3")


async def test_a_mocks_body_that_breaks_off_is_cut_off():
    async def breaks_off():
        yield b"{"
        raise httpx.ReadError("")

    broken = Sender(httpx.MockTransport(lambda _request: httpx.Response(200, content=breaks_off())))
    assert (await send(broken, "http://a:1")).kind is FailureKind.CUT_OFF


async def test_a_mocks_body_above_what_we_keep_is_refused():
    large = httpx.MockTransport(lambda _request: httpx.Response(200, content=b"x" * 9))
    with pytest.raises(WireError) as refused:
        await ThroughHttpx(large, max_body_bytes=8).post("http://a:1/", [], b"")
    assert refused.value.kind is FailureKind.TOO_LARGE
