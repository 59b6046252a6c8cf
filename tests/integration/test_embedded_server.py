"""The embedded server and the other children: private, and never alive without us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import redis

from forebay.children import end_all, start_child
from forebay.embedded import EmbeddedServer, find_program
from forebay.errors import ChildDied, NoServer

pytestmark = pytest.mark.integration

PARENT = """
import sys, time
from pathlib import Path
from forebay.children import start_child
from forebay.embedded import EmbeddedServer

server = EmbeddedServer(Path(sys.argv[1]) / "valkey.log")
child = start_child("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"],
                    log=Path(sys.argv[1]) / "sleeper.log")
print(server.child.pid, child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _some_server():
    try:
        find_program()
    except NoServer as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))  # no Valkey or Redis to start; it says which to install


def gone(pid, *, timeout_s=20.0):
    """Whether a process has ended, a zombie that nobody waits for included."""
    descriptor = os.pidfd_open(pid)
    try:
        import selectors

        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))
    finally:
        os.close(descriptor)


def test_it_listens_on_a_private_socket_and_on_no_port(tmp_path):
    server = EmbeddedServer(tmp_path / "valkey.log")
    try:
        path = Path(server.url.removeprefix("unix://"))
        assert len(str(path)) <= 100
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
            assert client.config_get("save")["save"] == ""
            assert client.config_get("port")["port"] == "0"
        listening = psutil.Process(server.child.pid).net_connections(kind="inet")
        assert listening == []
    finally:
        server.close()
    assert not path.parent.exists()
    assert not psutil.pid_exists(server.child.pid)
    server.close()


def test_its_socket_is_near_however_far_the_temporary_folder_is(tmp_path, monkeypatch):
    far = tmp_path / ("f" * 100)
    far.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(far))
    server = EmbeddedServer(tmp_path / "valkey.log")
    try:
        assert len(server.url.removeprefix("unix://")) <= 100
        assert list(far.iterdir()) == []
    finally:
        server.close()


def test_a_program_that_cannot_serve_is_told_with_its_words(tmp_path, monkeypatch):
    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\necho cannot do this\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("forebay.embedded.find_program", lambda: str(program))
    with pytest.raises(ChildDied, match="ended with status 3") as died:
        EmbeddedServer(tmp_path / "valkey.log")
    assert died.value.last_lines == "cannot do this"


def test_children_do_not_survive_the_sigkill_of_their_parent(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
        assert all(gone(pid) for pid in children)


def test_a_child_whose_parent_died_first_does_not_start(tmp_path):
    from forebay import tether

    made = tmp_path / "made"
    code = f"open({str(made)!r}, 'w')"
    nobody = 2**22 + 1  # above any process id
    tethered = [sys.executable, "-I", "-S", tether.__file__, str(nobody), sys.executable, "-c", code]
    assert subprocess.run(tethered, check=False).returncode == 1
    assert not made.exists()


def test_ctrl_c_at_the_terminal_reaches_us_only(tmp_path):
    child = start_child(
        "sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "log"
    )
    try:
        assert os.getpgid(child.pid) != os.getpgid(0)
        child.check()
    finally:
        child.kill()


def test_a_child_that_does_not_end_when_asked_is_killed(tmp_path):
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); signal.pause()"
    )
    child = start_child("deaf", [sys.executable, "-c", code], log=tmp_path / "log")
    while child.last_lines() != "deaf":
        child.check()
    end_all([child], grace_s=0.05)
    with pytest.raises(ChildDied) as died:
        child.check()
    assert died.value.status == -signal.SIGKILL


def test_a_child_that_died_is_told_with_the_end_of_its_log(tmp_path):
    code = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(7)"
    child = start_child("talker", [sys.executable, "-c", code], log=tmp_path / "log")
    assert child.ended(20)
    with pytest.raises(ChildDied, match="the talker ended with status 7") as died:
        child.check()
    assert died.value.last_lines.splitlines() == [str(number) for number in range(88, 100)]


def test_children_are_started_from_the_main_thread_only(tmp_path):
    raised = []

    def start():
        try:
            start_child("late", ["true"], log=tmp_path / "log")
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert raised == ["children are started from the main thread only"]
