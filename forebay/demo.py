"""A demonstration that needs no inference server: ``python -m forebay.demo``.

Four simulated engines of different speed, and the same code path as ``forebay run`` on 500 requests of uneven
lengths. The engines' true speeds are known here, so the time can be held against the possible. Results go to
``demo-output/`` in the working folder.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from forebay.children import Child, end_all, start_child
from forebay.cli.failures import reported
from forebay.cli.picture import HalfWay
from forebay.cli.run import execute
from forebay.errors import CannotWork
from forebay.fleet import worker_spec
from forebay.results import errors_path
from forebay.run import Watcher
from forebay.run_settings import RunSettings
from forebay.simulator.command import LISTENING
from forebay.simulator.process import flags
from forebay.simulator.settings import EngineSettings
from workers.errors import SettingsError

INPUT = Path(__file__).parent.parent / "examples" / "demo.jsonl"
OUTPUT = Path("demo-output")
MODEL = "demo-model"
_LONGEST_ANSWER = 4096.0

_START_S = 30.0
_POLL_S = 0.02


def engine(name: str, runtime: str, tokens_per_s: float, slots: int) -> EngineSettings:
    """One engine. It writes as many tokens as it is asked for, and reads a hundred times as fast."""
    return EngineSettings.model_validate(
        {
            "name": name,
            "runtime": runtime,
            "model": MODEL,
            "tokens_per_s": tokens_per_s,
            "prefill_tokens_per_s": 100 * tokens_per_s,
            "slots": slots,
            "answer_tokens_median": _LONGEST_ANSWER,
            "answer_tokens_sigma": 0.0,
        }
    )


ENGINES = (
    engine("small-vllm", "vllm", 60, 8),
    engine("small-sglang", "sglang", 60, 8),
    engine("medium-sglang", "sglang", 80, 16),
    engine("large-vllm", "vllm", 100, 32),
)


def capacity(engines: Sequence[EngineSettings]) -> float:
    """Tokens per second that the engines generate when all of their slots are taken."""
    return sum(each.tokens_per_s * each.slots * each.pace().speed(each.slots) for each in engines)


@contextmanager
def running(engines: Sequence[EngineSettings], logs: Path) -> Iterator[list[str]]:
    """The engines' URLs, while they run. Raises ChildDied, CannotWork."""
    children: list[Child] = []
    try:
        for each in engines:
            command = [sys.executable, "-m", "forebay.simulator", *flags(each)]
            children.append(start_child(f"engine {each.name}", command, log=logs / f"{each.name}.log"))
        yield [_address(child) for child in children]
    finally:
        end_all(children, grace_s=5.0)


def _address(child: Child) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        for line in child.last_lines().splitlines():
            if line.startswith(LISTENING):
                return line.removeprefix(LISTENING).strip()
        child.check()
        time.sleep(_POLL_S)  # a process that cannot signal us
    raise CannotWork(f"the {child.name} does not listen; its log:\n{child.last_lines()}")


def demo(
    keep_look: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep a look at the run half-way, for a picture of it."),
    ] = None,
) -> None:
    """Run the demonstration. Exits as ``forebay run`` does."""

    def between(looking: Watcher) -> Watcher:
        return looking if keep_look is None else HalfWay(looking, keep_look)

    with reported():
        if not INPUT.is_file():
            raise SettingsError(
                f"{INPUT} is not there: the demonstration is run from a checkout of the project"
            )
        OUTPUT.mkdir(exist_ok=True)
        logs = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
        try:
            with running(ENGINES, logs) as urls:
                code = execute(_settings(urls), known_tokens_per_s=capacity(ENGINES), between=between)
        finally:
            shutil.rmtree(logs, ignore_errors=True)
    raise typer.Exit(code)


def _settings(urls: Sequence[str]) -> RunSettings:
    output = OUTPUT / "results.jsonl"
    return RunSettings(
        input=INPUT,
        output=output,
        errors=errors_path(output),
        workers=tuple(worker_spec(url) for url in urls),
        overwrite=True,
        restart=True,
    )


if __name__ == "__main__":
    typer.run(demo)
