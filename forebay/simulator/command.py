"""The command ``simulate-engine``: flags to ``EngineSettings``, and a process that serves them.

Belongs here: the flags and their help. Does not belong here: what the settings mean (``settings``).
"""

import asyncio
from typing import Annotated

import typer
import uvloop
from pydantic import ValidationError

from forebay.simulator.faults import Fault, parse_fault
from forebay.simulator.server import serve
from forebay.simulator.settings import EngineSettings, Runtime

_DEFAULTS = EngineSettings()
LISTENING = "listening on "


def simulate_engine(  # one parameter for each flag; typer passes them by keyword
    runtime: Annotated[Runtime, typer.Option(help="Which engine to be like.")] = _DEFAULTS.runtime,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = _DEFAULTS.port,
    model: Annotated[str, typer.Option(help="Name of the model it serves.")] = _DEFAULTS.model,
    name: Annotated[
        str, typer.Option(help="A word for people, shown in the control state.")
    ] = _DEFAULTS.name,
    tokens_per_s: Annotated[
        float, typer.Option(help="Decode rate of one sequence that runs alone; 0 takes no time.")
    ] = _DEFAULTS.tokens_per_s,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(help="Prefill rate of one sequence that runs alone; 0 takes no time.")
    ] = _DEFAULTS.prefill_tokens_per_s,
    instant: Annotated[
        bool, typer.Option(help="Answer at once, whatever the rates say.")
    ] = _DEFAULTS.instant,
    slots: Annotated[int, typer.Option(help="Sequences that run at once.")] = _DEFAULTS.slots,
    slowdown: Annotated[
        float,
        typer.Option(help="Pace of one of b running sequences: 1 / (1 + slowdown * (b - 1) / slots)."),
    ] = _DEFAULTS.slowdown,
    max_queued: Annotated[
        int | None,
        typer.Option(help="Sequences that may wait; further requests get 503. Default: any number."),
    ] = _DEFAULTS.max_queued,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds.")] = _DEFAULTS.kv_tokens,
    max_model_len: Annotated[
        int, typer.Option(help="Longest prompt and answer together, in tokens.")
    ] = _DEFAULTS.max_model_len,
    prefix_caching: Annotated[
        bool, typer.Option(help="Read the beginning of a prompt once only, while it is remembered.")
    ] = _DEFAULTS.prefix_caching,
    seed: Annotated[int, typer.Option(help="Same seed and request, same answer.")] = _DEFAULTS.seed,
    answer_tokens_median: Annotated[
        float, typer.Option(help="Median length of an answer that nothing cuts, in tokens.")
    ] = _DEFAULTS.answer_tokens_median,
    answer_tokens_sigma: Annotated[
        float, typer.Option(help="Spread of the lognormal that lengths are drawn from; 0: all the median.")
    ] = _DEFAULTS.answer_tokens_sigma,
    embeddings: Annotated[
        bool, typer.Option(help="Serve /v1/embeddings; otherwise refuse it as a generating model does.")
    ] = _DEFAULTS.embeddings,
    load_tracking: Annotated[
        bool, typer.Option(help="vLLM: let /load tell the truth; without it, it always says 0.")
    ] = _DEFAULTS.load_tracking,
    api_key: Annotated[
        str | None, typer.Option(help="Answer 401 without this key, on the paths that the runtime guards.")
    ] = _DEFAULTS.api_key,
    keep_alive_s: Annotated[
        float, typer.Option(help="Seconds after which an idle connection is closed.")
    ] = _DEFAULTS.keep_alive_s,
    shutdown_timeout_s: Annotated[
        float, typer.Option(help="Seconds that running requests may go on after SIGTERM; 0 drops them.")
    ] = _DEFAULTS.shutdown_timeout_s,
    fault: Annotated[
        list[str] | None,
        typer.Option(help='A fault as JSON, for example \'{"kind":"answer","status":503,"requests":5}\'.'),
    ] = None,
    log_requests: Annotated[
        int, typer.Option(help="Inference requests that the control state remembers.")
    ] = _DEFAULTS.log_requests,
) -> None:
    """Run a fake inference engine, for demos and tests.

    It prints one line when it listens, and stops at SIGTERM or SIGINT. Pages below /_control/ set faults
    while it runs (POST /_control/fault) and show what it has seen (GET /_control/state).
    """
    try:
        settings = EngineSettings(
            runtime=runtime,
            host=host,
            port=port,
            model=model,
            name=name,
            tokens_per_s=tokens_per_s,
            prefill_tokens_per_s=prefill_tokens_per_s,
            instant=instant,
            slots=slots,
            slowdown=slowdown,
            max_queued=max_queued,
            kv_tokens=kv_tokens,
            max_model_len=max_model_len,
            prefix_caching=prefix_caching,
            seed=seed,
            answer_tokens_median=answer_tokens_median,
            answer_tokens_sigma=answer_tokens_sigma,
            embeddings=embeddings,
            load_tracking=load_tracking,
            api_key=api_key,
            keep_alive_s=keep_alive_s,
            shutdown_timeout_s=shutdown_timeout_s,
            faults=_faults(fault or []),
            log_requests=log_requests,
        )
    except ValidationError as error:
        raise typer.BadParameter(_said(error)) from error
    run(settings)


def run(settings: EngineSettings) -> None:
    """Serve until SIGTERM or SIGINT, on uvloop. Exits with status 1 when it cannot listen."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, started=_announce))
    except OSError as error:
        typer.echo(f"cannot listen on {settings.host}:{settings.port}: {error}", err=True)
        raise typer.Exit(1) from error


def _announce(url: str) -> None:
    typer.echo(f"{LISTENING}{url}")  # echo flushes: whoever started the process waits for this line


def _faults(texts: list[str]) -> tuple[Fault, ...]:
    return tuple(parse_fault(text) for text in texts)


def _said(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in error.errors()
    )
