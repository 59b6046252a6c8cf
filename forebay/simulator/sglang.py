"""SGLang 0.5.23 as it answers over HTTP.

Belongs here: bodies, words and pages of SGLang, copied from a real server; the metrics page is in
``sglang_metrics`` and the body of /v1/loads in ``sglang_loads``. The shape of an embedding was not captured
(the server generated text) and follows SGLang's protocol module. /server_info and the model's info are cut
down to the keys that describe the engine: the real page has 556.

With an API key every path but the health pages answers 401 without it, /metrics included: the strictest
reading, so that a client that forgets the key on any of its paths is found out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.simulator.dialect import Choice, Dialect, Usage, empty_reply
from forebay.simulator.reply import Reply, json_reply
from forebay.simulator.sglang_metrics import metrics_reply

if TYPE_CHECKING:
    import json
    from collections.abc import Mapping, Sequence

    from forebay.simulator.calls import Call
    from forebay.simulator.load import LoadSnapshot

_HANDLERS = {
    "/v1/chat/completions": "openai_v1_chat_completions",
    "/v1/completions": "openai_v1_completions",
    "/v1/embeddings": "openai_v1_embeddings",
}
_HEALTH = ("/health", "/health_generate")
_MESSAGE_PART = "function-after[validate_thinking_parts_role(), ChatCompletionMessage{}Param]"


class SglangDialect(Dialect):
    """SGLang's HTTP server."""

    version = "0.5.23"
    fewest_tokens = 0
    serves_loads = True

    def needs_key(self, path: str) -> bool:
        return path not in _HEALTH

    def page(self, path: str, load: LoadSnapshot) -> Reply | None:
        match path:
            case "/health" | "/health_generate" | "/ping":
                return empty_reply(200)
            case "/v1/models":
                return self._models(int(load.sampled_at_s))
            case "/server_info" | "/get_server_info":
                return self._server_info(load)
            case "/model_info" | "/get_model_info":
                return self._model_info()
            case _:
                return None

    def metrics(self, load: LoadSnapshot, headers: Mapping[bytes, bytes]) -> Reply:
        return metrics_reply(self.settings, load, headers)

    def shutdown_health(self) -> Reply:
        return empty_reply(503)

    def shutdown_refusal(self) -> None:
        return None

    def error(self, status: int, kind: str, message: str, param: str | None = None) -> Reply:
        del param  # SGLang names none
        return json_reply(
            status,
            {"object": "error", "message": message, "type": kind, "param": None, "code": status},
        )

    def malformed(self, path: str, error: json.JSONDecodeError) -> Reply:
        return self._invalid(
            path,
            f"{{'type': 'json_invalid', 'loc': ('body', {error.pos}), 'msg': 'JSON decode error', "
            f"'input': {{}}, 'ctx': {{'error': '{_decode_words(error)}'}}}}",
        )

    def missing_body(self, path: str) -> Reply:
        return self._invalid(
            path, "{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}"
        )

    def missing_field(self, path: str, body: dict[str, object], field: str) -> Reply:
        given = {**body, "tool_choice": "none"} if field == "messages" else body
        return self._invalid(
            path,
            f"{{'type': 'missing', 'loc': ('body', '{field}'), 'msg': 'Field required', 'input': {given!r}}}",
        )

    def no_object(self, path: str, body: object) -> Reply:
        what = "Input should be a valid dictionary or object to extract fields from"
        return self._invalid(
            path,
            f"{{'type': 'model_attributes_type', 'loc': ('body',), 'msg': '{what}', 'input': {body!r}}}",
        )

    def no_list(self, path: str, field: str, value: object) -> Reply:
        what = "Input should be a valid list"
        return self._invalid(
            path, f"{{'type': 'list_type', 'loc': ('body', '{field}'), 'msg': '{what}', 'input': {value!r}}}"
        )

    def bad_role(self, path: str, index: int, message: object) -> Reply:
        return self._invalid(path, *_role_errors(index, message))

    def empty_messages(self) -> Reply:
        return self.error(400, "BadRequestError", "Messages cannot be empty.")

    def bad_temperature(self, temperature: float) -> Reply:
        message = f"temperature must be a non-negative finite number, got {temperature}."
        return self.error(400, "BadRequestError", message)

    def too_few_tokens(self, asked: int) -> Reply:
        return self.error(400, "BadRequestError", f"max_new_tokens must be at least 0, got {asked}.")

    def prompt_too_long(self, tokens: int) -> Reply:
        message = (
            f"The input ({tokens} tokens) is longer than the model's context length "
            f"({self.max_model_len} tokens)."
        )
        return self.error(400, "BadRequestError", message)

    def refuse_length(self, prompt_tokens: int, asked: int) -> Reply | None:
        if prompt_tokens + asked <= self.max_model_len:
            return None
        message = (
            "Requested token count exceeds the model's maximum context length of "
            f"{self.max_model_len} tokens. You requested a total of {prompt_tokens + asked} tokens: "
            f"{prompt_tokens} tokens from the input messages and {asked} tokens for the completion. "
            "Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )
        return self.error(400, "BadRequestError", message)

    def queue_full(self, status: int = 503) -> Reply:
        return self.error(status, str(status), "The request queue is full.")

    def no_embeddings(self) -> Reply:
        message = (
            "This model does not appear to be an embedding model by default. Please add `--is-embedding` "
            "when launching the server or try another model."
        )
        return self.error(400, "BadRequestError", message)

    def unknown_model(self, model: str) -> None:
        del model  # any name is answered, as if it were the engine's own

    def default_model(self) -> str:
        return "default"

    def chat(self, call: Call, choices: Sequence[Choice], usage: Usage, created_s: int) -> Reply:
        return self._answer(
            "chat.completion", call, [_chat_choice(*each) for each in enumerate(choices)], usage, created_s
        )

    def completion(self, call: Call, choices: Sequence[Choice], usage: Usage, created_s: int) -> Reply:
        return self._answer(
            "text_completion", call, [_text_choice(*each) for each in enumerate(choices)], usage, created_s
        )

    def embedding(self, call: Call, vectors: Sequence[list[float]], usage: Usage, created_s: int) -> Reply:
        del created_s  # not told
        return json_reply(
            200,
            {
                "data": [
                    {"embedding": each, "index": index, "object": "embedding"}
                    for index, each in enumerate(vectors)
                ],
                "model": call.model,
                "object": "list",
                "usage": _usage(usage),
            },
        )

    def _answer(
        self, what: str, call: Call, choices: list[dict[str, object]], usage: Usage, created_s: int
    ) -> Reply:
        weights = {"version": "default", "start": 0, "end": usage.completion_tokens}
        return json_reply(
            200,
            {
                "id": f"{self.next_id():032x}",
                "object": what,
                "created": created_s,
                "model": call.model,
                "choices": choices,
                "usage": _usage(usage),
                "metadata": {"weight_version": "default", "weight_versions": [weights]},
            },
        )

    def _invalid(self, path: str, *lines: str) -> Reply:
        count = f"{len(lines)} validation error{'s' if len(lines) > 1 else ''}"
        shown = "".join(f"\n  {line}" for line in lines)
        frame = (
            f'  File "site-packages/sglang/srt/entrypoints/http_server.py", line 1870, in {_HANDLERS[path]}'
        )
        listed = ", ".join(lines)
        return self.error(400, "Bad Request", f"{count}:{shown}\n\n{frame}\n    POST {path} [{listed}]")

    def _models(self, now_s: int) -> Reply:
        model = self.settings.model
        card = {
            "id": model,
            "object": "model",
            "created": now_s,
            "owned_by": "sglang",
            "root": model,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        return json_reply(200, {"object": "list", "data": [card]})

    def _server_info(self, load: LoadSnapshot) -> Reply:
        settings = self.settings
        state = {
            "effective_max_running_requests_per_dp": settings.slots,
            "last_gen_throughput": load.gen_tokens_per_s,
            "memory_usage": {"weight": 0.0, "kvcache": 0.0, "token_capacity": settings.kv_tokens},
        }
        return json_reply(
            200,
            {
                "model_path": settings.model,
                "tokenizer_path": settings.model,
                "context_length": None,
                "max_running_requests": settings.slots,
                "max_queued_requests": settings.max_queued,
                "max_total_tokens": settings.kv_tokens,
                "schedule_policy": "fcfs",
                "page_size": 1,
                "tp_size": 1,
                "pp_size": 1,
                "dp_size": 1,
                "served_model_name": settings.model,
                "status": "ready",
                "max_total_num_tokens": settings.kv_tokens,
                "max_req_input_len": self.max_model_len - 6,
                "internal_states": [state],
                "version": self.version,
                "frontend": "python",
            },
        )

    def _model_info(self) -> Reply:
        return json_reply(
            200,
            {
                "model_path": self.settings.model,
                "served_model_name": self.settings.model,
                "tokenizer_path": self.settings.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "load_format": "auto",
            },
        )


def _decode_words(error: json.JSONDecodeError) -> str:
    if error.pos >= len(error.doc):
        return "unexpected end of data"
    return f"unexpected character: line {error.lineno} column {error.colno} (char {error.pos})"


def _role_errors(index: int, message: object) -> list[str]:
    fields = message if isinstance(message, dict) else {}
    role = fields.get("role")
    generic, user = (
        f"('body', 'messages', {index}, '{_MESSAGE_PART.format(kind)}', " for kind in ("Generic", "User")
    )
    no_string = (
        f"{{'type': 'value_error', 'loc': {generic}'role'), 'msg': \"Value error, 'role' must be a string\", "
        f"'input': {role!r}, 'ctx': {{'error': ValueError(\"'role' must be a string\")}}}}"
    )
    no_user = (
        f"{{'type': 'literal_error', 'loc': {user}'role'), 'msg': \"Input should be 'user'\", "
        f"'input': {role!r}, 'ctx': {{'expected': \"'user'\"}}}}"
    )
    if "content" in fields:
        return [no_string, no_user]
    no_content = (
        f"{{'type': 'missing', 'loc': {user}'content'), 'msg': 'Field required', 'input': {message!r}}}"
    )
    return [no_string, no_user, no_content]


def _chat_choice(index: int, choice: Choice) -> dict[str, object]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "reasoning_content": None},
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "matched_stop": 1 if choice.stopped else None,
    }


def _text_choice(index: int, choice: Choice) -> dict[str, object]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "matched_stop": 1 if choice.stopped else None,
    }


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }
