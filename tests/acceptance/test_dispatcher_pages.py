"""A running dispatcher's pages: readiness, and what it tells of queues and batches."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import urllib.error
import urllib.request

import pytest

from tests.acceptance.conftest import Rig, rows

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def ask(port: int, path: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.read().decode()
    except urllib.error.URLError:
        return None


async def test_a_dispatcher_tells_what_waits_and_is_ready_until_it_ends(rig: Rig):
    port = a_free_port()
    process = rig.dispatcher("d1", metrics_port=port)
    await rig.until(lambda: asyncio.to_thread(ask, port, "/readyz"), "the dispatcher is ready")
    assert await asyncio.to_thread(ask, port, "/healthz") == "ok\n"

    await rig.submit(rows(30), queue="elsewhere", slots=4)
    page = await asyncio.to_thread(ask, port, "/metrics")
    assert page is not None
    assert {
        'forebay_queue_jobs{queue="default"} 0.0',
        'forebay_batches{status="in_progress"} 1.0',
        "forebay_batch_lines_left 30.0",
        "forebay_batches_in_trouble 0.0",
    } <= set(page.splitlines())
    assert "process_resident_memory_bytes" in page
    [most_open] = [
        float(line.split()[1]) for line in page.splitlines() if line.startswith("process_max_fds ")
    ]
    assert most_open == resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    process.send_signal(signal.SIGTERM)
    assert await rig.gone(process) == 0
