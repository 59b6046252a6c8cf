"""vLLM 0.32 as it answers over HTTP.

Belongs here: bodies, words and pages of vLLM, copied from a real server; the metrics page is in
``vllm_metrics``. The shape of an embedding was not captured (the server generated text) and follows vLLM's
protocol module.

With an API key every path below /v1 answers 401 without it, whether the path exists or not; /health,
/metrics, /version and /load stay open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.simulator.dialect import Choice, Dialect, Usage, empty_reply
from forebay.simulator.reply import Reply, json_reply
from forebay.simulator.vllm_metrics import metrics_page
from forebay.simulator.vllm_render import PATHS, prompt_reply

if TYPE_CHECKING:
    import json
    from collections.abc import Mapping, Sequence

    from forebay.simulator.calls import Call
    from forebay.simulator.load import LoadSnapshot

_FINGERPRINT = "vllm-0.32.0-16e6d415"
_ROLE_ERRORS = (
    ("Developer", "developer", "content"),
    ("System", "system", "content"),
    ("User", "user", "content"),
    ("Assistant", "assistant", None),
    ("Tool", "tool", "content"),
)
_METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"


class VllmDialect(Dialect):
    """vLLM's OpenAI-compatible server."""

    version = "0.32.0"
    fewest_tokens = 1
    serves_loads = False

    def needs_key(self, path: str) -> bool:
        return path.startswith("/v1")

    def page(self, path: str, load: LoadSnapshot) -> Reply | None:
        match path:
            case "/health" | "/ping":
                return empty_reply(200)
            case "/version":
                return json_reply(200, {"version": self.version})
            case "/load":
                tracked = load.running + load.waiting if self.settings.load_tracking else 0
                return json_reply(200, {"server_load": tracked})
            case "/v1/models":
                return self._models(int(load.sampled_at_s))
            case path if path in PATHS:
                return self.method_not_allowed("POST")
            case _:
                return None

    def prompt_page(self, path: str, raw: bytes) -> Reply | None:
        return prompt_reply(path, raw, self)

    def metrics(self, load: LoadSnapshot, headers: Mapping[bytes, bytes]) -> Reply:
        del headers  # vLLM prints the same page whatever is accepted
        body = metrics_page(self.settings, load, self.started_at_s)
        return Reply(200, body, _METRICS_TYPE)

    def shutdown_health(self) -> Reply:
        return empty_reply(200)

    def shutdown_refusal(self) -> Reply:
        return self.error(500, "InternalServerError", "cannot schedule new futures after shutdown")

    def error(self, status: int, kind: str, message: str, param: str | None = None) -> Reply:
        error = {"message": message, "type": kind, "param": param, "code": status}
        return json_reply(status, {"error": error})

    def malformed(self, path: str, error: json.JSONDecodeError) -> Reply:
        del path
        where = f"body.{error.pos}"
        return self._invalid(
            where,
            f"{{'type': 'json_invalid', 'loc': '{where}', 'msg': 'JSON decode error', "
            f"'input': '<dict of 0 items>', 'ctx': {{'error': '{error.msg}'}}}}",
        )

    def missing_body(self, path: str) -> Reply:
        del path
        return self._invalid("body", _missing("body", "None"))

    def missing_field(self, path: str, body: dict[str, object], field: str) -> Reply:
        del path
        where = f"body.{field}"
        return self._invalid(where, _missing(where, f"<dict of {len(body)} items>"))

    def no_object(self, path: str, body: object) -> Reply:
        del path, body
        what = "Input should be a valid dictionary or object to extract fields from"
        return self._invalid("body", f"{{'type': 'model_attributes_type', 'loc': 'body', 'msg': '{what}'}}")

    def no_list(self, path: str, field: str, value: object) -> Reply:
        del path, value
        where = f"body.{field}"
        return self._invalid(
            where, f"{{'type': 'list_type', 'loc': '{where}', 'msg': 'Input should be a valid list'}}"
        )

    def bad_role(self, path: str, index: int, message: object) -> Reply:
        del path
        lines = list(_role_errors(index, message))
        shown = "".join(f"\n  {line}" for line in lines)
        first = f"body.messages.{index}.ChatCompletionDeveloperMessageParam.content"
        return self.error(
            400, "Bad Request", f"15 validation errors:{shown}\n  ...and {15 - len(lines)} more errors", first
        )

    def empty_messages(self) -> Reply:
        message = "Cannot apply chat template to an empty conversation. Provide at least one message."
        return self.error(400, "BadRequestError", message)

    def bad_temperature(self, temperature: float) -> Reply:
        return self._bad_value("temperature must be non-negative, got {value}.", "temperature", temperature)

    def too_few_tokens(self, asked: int) -> Reply:
        return self._bad_value("max_tokens must be at least 1, got {value}.", "max_tokens", asked)

    def prompt_too_long(self, tokens: int) -> Reply:
        del tokens  # vLLM stops counting one token past the limit
        limit = self.max_model_len
        return self._bad_value(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
            f"{limit + 1} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            limit + 1,
        )

    def refuse_length(self, prompt_tokens: int, asked: int) -> Reply | None:
        del prompt_tokens  # an answer that only its prompt makes too long is cut
        limit = self.max_model_len
        if asked <= limit:
            return None
        return self._bad_value(
            f"max_tokens={asked} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens.",
            "max_tokens",
            asked,
        )

    def queue_full(self, status: int = 503) -> Reply:
        message = (
            "The engine is currently busy and cannot accept new requests. "
            "Please try again later or on a different instance."
        )
        return self.error(status, "Service Unavailable", message)

    def no_embeddings(self) -> Reply:
        return self.not_found()

    def unknown_model(self, model: str) -> Reply:
        message = f"The model `{model}` does not exist. Valid aliases: {self.settings.model}."
        return self.error(404, "NotFoundError", message, "model")

    def default_model(self) -> str:
        return self.settings.model

    def chat(self, call: Call, choices: Sequence[Choice], usage: Usage, created_s: int) -> Reply:
        return json_reply(
            200,
            {
                "id": f"chatcmpl-{self.next_id():016x}",
                "object": "chat.completion",
                "created": created_s,
                "model": call.model,
                "choices": [_chat_choice(index, each) for index, each in enumerate(choices)],
                "service_tier": None,
                "system_fingerprint": _FINGERPRINT,
                "usage": _usage(usage),
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "prompt_text": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            },
        )

    def completion(self, call: Call, choices: Sequence[Choice], usage: Usage, created_s: int) -> Reply:
        return json_reply(
            200,
            {
                "id": f"cmpl-{self.next_id():016x}",
                "object": "text_completion",
                "created": created_s,
                "model": call.model,
                "choices": [_text_choice(index, each) for index, each in enumerate(choices)],
                "service_tier": None,
                "system_fingerprint": _FINGERPRINT,
                "usage": _usage(usage),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            },
        )

    def embedding(self, call: Call, vectors: Sequence[list[float]], usage: Usage, created_s: int) -> Reply:
        return json_reply(
            200,
            {
                "id": f"embd-{self.next_id():016x}",
                "object": "list",
                "created": created_s,
                "model": call.model,
                "data": [
                    {"index": index, "object": "embedding", "embedding": each}
                    for index, each in enumerate(vectors)
                ],
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "total_tokens": usage.total_tokens,
                    "completion_tokens": 0,
                    "prompt_tokens_details": None,
                },
            },
        )

    def _invalid(self, param: str, line: str) -> Reply:
        return self.error(400, "Bad Request", f"1 validation error:\n  {line}", param)

    def _bad_value(self, message: str, param: str, value: float) -> Reply:
        text = f"{message.format(value=value)} (parameter={param}, value={value})"
        return self.error(400, "BadRequestError", text, param)

    def _models(self, now_s: int) -> Reply:
        model = self.settings.model
        permission = {
            "id": f"modelperm-{self.next_id():016x}",
            "object": "model_permission",
            "created": now_s,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": model,
            "object": "model",
            "created": now_s,
            "owned_by": "vllm",
            "root": model,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [permission],
        }
        return json_reply(200, {"object": "list", "data": [card]})


def _missing(where: str, given: str) -> str:
    return f"{{'type': 'missing', 'loc': '{where}', 'msg': 'Field required', 'input': '{given}'}}"


def _role_errors(index: int, message: object) -> list[str]:
    """The ten lines that vLLM shows of the fifteen that a bad role earns."""
    fields = message if isinstance(message, dict) else {}
    lines = []
    for kind, role, required in _ROLE_ERRORS:
        where = f"body.messages.{index}.ChatCompletion{kind}MessageParam"
        if required is not None:
            lines.append(_missing(f"{where}.{required}", f"<dict of {len(fields)} items>"))
        lines.append(
            f"{{'type': 'literal_error', 'loc': '{where}.role', 'msg': \"Input should be '{role}'\", "
            f"'input': '{fields.get('role')}', 'ctx': {{'expected': \"'{role}'\"}}}}"
        )
    call_id = f"body.messages.{index}.ChatCompletionToolMessageParam.tool_call_id"
    return [*lines, _missing(call_id, f"<dict of {len(fields)} items>")]


def _chat_choice(index: int, choice: Choice) -> dict[str, object]:
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }


def _text_choice(index: int, choice: Choice) -> dict[str, object]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
