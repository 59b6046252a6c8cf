"""Which runtime a worker runs, and its version: asked once per incarnation when nobody said.

``identify`` is pure; ``detect`` asks only for what is still missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from monitor.http import Answer, NoAnswer, Target, get
from workers.spec import Runtime

if TYPE_CHECKING:
    import httpx

VERSION_PATH = "/version"
SERVER_INFO_PATH = "/server_info"

_OWNERS: Mapping[str, Runtime] = {
    "vllm": Runtime.VLLM,
    "sglang": Runtime.SGLANG,
    "tensorrt_llm": Runtime.TRTLLM,
    "tensorrt-llm": Runtime.TRTLLM,
    "trtllm": Runtime.TRTLLM,
    "lmdeploy": Runtime.LMDEPLOY,
    "tokenspeed": Runtime.TOKENSPEED,
    "llamacpp": Runtime.LLAMACPP,
    "llama.cpp": Runtime.LLAMACPP,
    "tgi": Runtime.TGI,
    "text-generation-inference": Runtime.TGI,
}
"""``owned_by`` in ``/v1/models``. NIM and others put a vendor's name there."""

_SGLANG_MARKS = frozenset({"chunked_prefill_size", "mem_fraction_static", "schedule_policy"})
"""Arguments of SGLang's server, which ``/server_info`` repeats."""


@dataclass(frozen=True, slots=True)
class Detection:
    """``runtime`` None: the worker did not answer well, ask again. GENERIC: it did, and is none we know."""

    runtime: Runtime | None
    version: str | None = None


async def detect(
    client: httpx.AsyncClient, target: Target, models: Answer | None, *, deadline: float
) -> Detection:
    """Find out. ``models`` is the answer of ``/v1/models`` that readiness has just read, if it gave one."""
    version = await get(client, target, VERSION_PATH, deadline=deadline)
    found = identify(models, version, None)
    if found.runtime not in (None, Runtime.GENERIC):
        return found
    return identify(models, version, await get(client, target, SERVER_INFO_PATH, deadline=deadline))


def identify(
    models: Answer | None, version: Answer | NoAnswer | None, server_info: Answer | NoAnswer | None
) -> Detection:
    """What three answers together say; ``owned_by`` is the surest sign, a bare ``/version`` is vLLM's."""
    number = _word(_fields(version).get("version"))
    info = _fields(server_info)
    owned_by = owner(models)
    if owned_by is not None:
        return Detection(owned_by, number or _word(info.get("version")))
    if info.keys() & _SGLANG_MARKS:
        return Detection(Runtime.SGLANG, _word(info.get("version")) or number)
    if number is not None:
        return Detection(Runtime.VLLM, number)
    if any(map(_in_trouble, (models, version, server_info))):
        return Detection(None)
    return Detection(Runtime.GENERIC)


def _in_trouble(answer: Answer | NoAnswer | None) -> bool:
    """Whether the worker might say something else in a moment."""
    if answer is None or isinstance(answer, NoAnswer):
        return answer is not None
    return answer.status in (408, 429) or (answer.status >= 500 and answer.status != 501)


def owner(models: Answer | None) -> Runtime | None:
    """The runtime that ``owned_by`` of the models names; None when it names none that we know."""
    entries = _fields(models).get("data")
    for entry in entries if isinstance(entries, list) else ():
        name = entry.get("owned_by") if isinstance(entry, dict) else None
        if isinstance(name, str) and name.lower() in _OWNERS:
            return _OWNERS[name.lower()]
    return None


def _fields(answer: Answer | NoAnswer | None) -> dict[str, Any]:
    if not isinstance(answer, Answer) or answer.status != 200:
        return {}
    try:
        decoded = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
