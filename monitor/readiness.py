"""Is a worker ready, and for which models? ``/v1/models`` first, else ``/health``.

``judge_models`` and ``judge_health`` are pure; ``check`` asks. When to ask, and what a failure leads to,
belongs to ``watch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from monitor import lenient
from monitor.http import Answer, NoAnswer, Silence, Target, get

if TYPE_CHECKING:
    import httpx

MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"


@dataclass(frozen=True, slots=True)
class Readiness:
    """``ready`` None: nothing was learned (a slow answer is not a dead worker [vllm-project/vllm#38157]).

    ``models`` holds every name served, LoRA adapters included; None: it did not say. ``max_model_len`` is the
    smallest context length of its base models, in tokens. ``models_answer`` is kept for runtime detection,
    whatever its status.
    """

    ready: bool | None
    reason: str
    models: tuple[str, ...] | None = None
    max_model_len: int | None = None
    models_answer: Answer | None = None


async def check(client: httpx.AsyncClient, target: Target, *, deadline: float) -> Readiness:
    """Ask a worker; ``deadline`` is on the loop's clock."""
    models = await get(client, target, MODELS_PATH, deadline=deadline)
    found = judge_models(models)
    # A key that is refused here is refused for requests as well; engines leave their health page open to all.
    refused = isinstance(models, Answer) and models.status in (401, 403)
    if found.ready is not False or refused or isinstance(models, NoAnswer):
        return found
    health = judge_health(await get(client, target, HEALTH_PATH, deadline=deadline))
    return replace(health, models_answer=models) if health.ready else found


def judge_models(answer: Answer | NoAnswer) -> Readiness:
    """What the answer of ``/v1/models`` says."""
    if isinstance(answer, NoAnswer):
        return _silent(answer)
    if not 200 <= answer.status < 300:
        return Readiness(ready=False, reason=f"{MODELS_PATH}: status {answer.status}")
    entries = _entries(answer.body)
    names = tuple(entry["id"] for entry in entries if isinstance(entry.get("id"), str))
    lengths = [length for entry in entries if (length := _context_length(entry))]
    return Readiness(
        ready=True,
        reason=f"answers {MODELS_PATH}",
        models=names or None,
        max_model_len=min(lengths, default=None),
        models_answer=answer,
    )


def judge_health(answer: Answer | NoAnswer) -> Readiness:
    """What the answer of ``/health`` says, of a worker without a list of models."""
    if isinstance(answer, NoAnswer):
        return _silent(answer)
    if not 200 <= answer.status < 300:
        return Readiness(ready=False, reason=f"{HEALTH_PATH}: status {answer.status}")
    return Readiness(ready=True, reason=f"answers {HEALTH_PATH}, not {MODELS_PATH}")


def _silent(answer: NoAnswer) -> Readiness:
    return Readiness(ready=None if answer.silence is Silence.LATE else False, reason=answer.reason)


def _entries(body: bytes) -> list[Mapping[str, Any]]:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    entries = answer.get("data") if isinstance(answer, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _context_length(entry: Mapping[str, Any]) -> int | None:
    # vLLM and SGLang say it on the entry; llama.cpp says what one slot holds, in "meta".
    meta = entry.get("meta")
    return lenient.count(entry.get("max_model_len")) or (
        lenient.count(meta.get("n_ctx")) if isinstance(meta, dict) else None
    )
