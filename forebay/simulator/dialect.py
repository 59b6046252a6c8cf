"""What differs between the runtimes that a simulated engine can be: the contract, and what they share.

Belongs here: one method for each kind of answer. Does not belong here: when an answer is given (``calls``,
``engine``). The shapes were copied from real servers; each dialect names its version.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forebay.simulator.calls import EMBEDDINGS, RefusedError
from forebay.simulator.reply import Reply, json_reply

if TYPE_CHECKING:
    import json
    from collections.abc import Mapping, Sequence

    from forebay.simulator.calls import Call
    from forebay.simulator.load import LoadSnapshot
    from forebay.simulator.settings import EngineSettings

EMBEDDING_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: its text, how many tokens it took, and whether it ended by itself (else by its ceiling)."""

    text: str
    tokens: int
    stopped: bool

    @property
    def finish_reason(self) -> str:
        return "stop" if self.stopped else "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Dialect(ABC):
    """The words of one runtime. ``started_at_s`` is Unix time."""

    version: ClassVar[str]
    fewest_tokens: ClassVar[int]
    """The smallest max_tokens that is not refused."""
    serves_loads: ClassVar[bool]
    """Whether /v1/loads is there without any fault."""

    def __init__(self, settings: EngineSettings, started_at_s: float) -> None:
        self.settings = settings
        self.started_at_s = started_at_s
        self.max_model_len = settings.max_model_len
        self._ids = itertools.count(1)

    # Who may ask, and what is there.

    @abstractmethod
    def needs_key(self, path: str) -> bool:
        """Whether a path answers 401 without the key, when the engine has one."""

    @abstractmethod
    def page(self, path: str, load: LoadSnapshot) -> Reply | None:
        """The answer to a GET of a page of the runtime's own; None where it has none (404)."""

    @abstractmethod
    def metrics(self, load: LoadSnapshot, headers: Mapping[bytes, bytes]) -> Reply:
        """The Prometheus page."""

    @abstractmethod
    def shutdown_health(self) -> Reply:
        """What /health says in shutdown."""

    @abstractmethod
    def shutdown_refusal(self) -> Reply | None:
        """What new requests get in shutdown; None when they are served."""

    # Refusals.

    @abstractmethod
    def error(self, status: int, kind: str, message: str, param: str | None = None) -> Reply:
        """An error in the runtime's shape."""

    @abstractmethod
    def malformed(self, path: str, error: json.JSONDecodeError) -> Reply: ...

    @abstractmethod
    def missing_body(self, path: str) -> Reply: ...

    @abstractmethod
    def missing_field(self, path: str, body: dict[str, object], field: str) -> Reply: ...

    @abstractmethod
    def no_object(self, path: str, body: object) -> Reply: ...

    @abstractmethod
    def no_list(self, path: str, field: str, value: object) -> Reply: ...

    @abstractmethod
    def bad_role(self, path: str, index: int, message: object) -> Reply: ...

    @abstractmethod
    def empty_messages(self) -> Reply: ...

    @abstractmethod
    def bad_temperature(self, temperature: float) -> Reply: ...

    @abstractmethod
    def too_few_tokens(self, asked: int) -> Reply: ...

    @abstractmethod
    def prompt_too_long(self, tokens: int) -> Reply: ...

    @abstractmethod
    def refuse_length(self, prompt_tokens: int, asked: int) -> Reply | None:
        """The refusal of a ceiling that does not fit beside its prompt; None when the answer is cut."""

    @abstractmethod
    def queue_full(self, status: int = 503) -> Reply: ...

    @abstractmethod
    def no_embeddings(self) -> Reply: ...

    @abstractmethod
    def unknown_model(self, model: str) -> Reply | None:
        """The refusal of a model that is not served; None when any name is answered."""

    # Answers.

    @abstractmethod
    def default_model(self) -> str:
        """The name that an answer carries when the request named no model."""

    @abstractmethod
    def chat(self, call: Call, choices: Sequence[Choice], usage: Usage, created_s: int) -> Reply: ...

    @abstractmethod
    def completion(self, call: Call, choices: Sequence[Choice], usage: Usage, created_s: int) -> Reply: ...

    @abstractmethod
    def embedding(
        self, call: Call, vectors: Sequence[list[float]], usage: Usage, created_s: int
    ) -> Reply: ...

    def prompt_page(self, path: str, raw: bytes) -> Reply | None:
        """The answer to a POST about a prompt that generates nothing; None where there is no such page.

        Raises RefusedError.
        """
        del path, raw
        return None

    # Shared.

    def bad_request(self, param: str, message: str) -> Reply:
        return self.error(400, "BadRequestError", message, param)

    def model_for(self, model: object) -> str:
        """The name to answer with. Raises RefusedError when the model is not served."""
        if not model:
            return self.default_model()
        if model != self.settings.model and (refusal := self.unknown_model(str(model))) is not None:
            raise RefusedError(refusal)
        return str(model)

    def not_found(self) -> Reply:
        return json_reply(404, {"detail": "Not Found"})

    def method_not_allowed(self, allowed: str) -> Reply:
        return json_reply(405, {"detail": "Method Not Allowed"}, (b"allow", allowed.encode()))

    def unauthorized(self) -> Reply:
        return json_reply(401, {"error": "Unauthorized"})

    def serves(self, path: str) -> bool:
        """Whether an inference path is served by this engine's model."""
        return path != EMBEDDINGS or self.settings.embeddings

    def next_id(self) -> int:
        """A number no earlier answer of this engine has carried; ids are made from it."""
        return next(self._ids)


def empty_reply(status: int) -> Reply:
    """An answer without a body, as the health pages give."""
    return Reply(status, b"", None)
