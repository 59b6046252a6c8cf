"""One simulated engine: requests in, answers out when the workload has done them, faults played on the way.

Belongs here: routing, the key, the life of a request in the batch, and what is true of the engine at this
moment. Does not belong here: sockets (``connection``, ``server``), arithmetic of the batch (``batching``),
words (dialects). Time is the event loop's; Unix time only stamps what is sent.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qs

from forebay.simulator import answers
from forebay.simulator.calls import CHAT, EMBEDDINGS, PROMPT_FIELD, RefusedError, prompt_head, read_call
from forebay.simulator.control import PREFIX, control_reply
from forebay.simulator.dialect import EMBEDDING_DIMENSIONS, Choice, Dialect, Usage
from forebay.simulator.fault_replies import fault_reply, simulated_error
from forebay.simulator.faults import (
    AnswerFault,
    BrokenMetricsFault,
    CutBodyFault,
    Fault,
    FaultBoard,
    FreezeFault,
    HangFault,
    LoadsFault,
    RefuseFault,
    ResetFault,
    SetFault,
    ShutdownFault,
    SlowFault,
    StateFault,
    ZeroLoadFault,
)
from forebay.simulator.prefixes import PrefixCache
from forebay.simulator.reply import Reply
from forebay.simulator.sglang import SglangDialect
from forebay.simulator.sglang_loads import loads_reply
from forebay.simulator.stats import Stats
from forebay.simulator.vllm import VllmDialect
from forebay.simulator.workload import Job, Part, Workload

if TYPE_CHECKING:
    from forebay.simulator.calls import Call
    from forebay.simulator.connection import Exchange, Request
    from forebay.simulator.load import LoadSnapshot
    from forebay.simulator.settings import EngineSettings

_DIALECTS: dict[str, type[Dialect]] = {"vllm": VllmDialect, "sglang": SglangDialect}


class Listener(Protocol):
    """Whoever holds the listening socket."""

    def refuse(self, *, drop_open: bool) -> None:
        """Stop listening, so that connecting is refused; reset open connections when asked to."""

    def accept(self) -> None:
        """Listen again, on the same port."""


class Engine:
    """The engine behind the sockets. Needs a running event loop."""

    def __init__(self, settings: EngineSettings, listener: Listener) -> None:
        self.settings = settings
        self.stats = Stats(settings.log_requests)
        self._loop = asyncio.get_running_loop()
        self._dialect = _DIALECTS[settings.runtime](settings, time.time())
        self._workload = Workload(settings.pace())
        self._prefixes = PrefixCache(settings.kv_tokens) if settings.prefix_caching else None
        self._board = FaultBoard()
        self._listener = listener
        self._refusing = False
        self._frozen: LoadSnapshot | None = None
        self._fault_timer: asyncio.TimerHandle | None = None

    # What tests and the control pages use.

    def set_fault(self, fault: Fault) -> int:
        """Set a fault; returns the number by which it can be cleared."""
        entry = self._board.add(fault, self._loop.time())
        self._settle_faults()
        return entry.number

    def clear_faults(self, number: int | None = None) -> int:
        """Clear one fault, or all (None); returns how many there were."""
        cleared = self._board.clear(number)
        self._settle_faults()
        return cleared

    def fault_entries(self) -> list[SetFault]:
        return self._board.entries()

    def true_load(self) -> LoadSnapshot:
        """The load as it is, whatever faults make the pages say."""
        return self._workload.load(self.stats.rejected)

    @property
    def max_running_seen(self) -> int:
        """The most sequences that ever ran at once."""
        return self._workload.max_running_seen

    async def until_idle(self) -> None:
        """Return once no request is in the batch."""
        await self._workload.until_idle()

    def stop(self) -> None:
        """Cancel the timers; nothing is answered after this."""
        self._workload.stop()
        if self._fault_timer is not None:
            self._fault_timer.cancel()

    # Requests.

    def handle(self, exchange: Exchange) -> None:
        """Take one request from a connection; its answer may come at once, later, or never."""
        request = exchange.request
        if request.path.startswith(PREFIX):
            exchange.answer(control_reply(self, request))
            return
        exchange.record = self.stats.receive(request.method, request.path, request.headers, request.body)
        exchange.on_gone = partial(self.stats.gone, exchange.record)
        if request.path in PROMPT_FIELD:
            self.stats.remember(exchange.record, prompt_head(request.body))
        if not self._play_fault(exchange):
            self._serve(exchange)

    def _serve(self, exchange: Exchange) -> None:
        request = exchange.request
        if not self._may_enter(request):
            self._answer(exchange, self._dialect.unauthorized())
        elif request.path in PROMPT_FIELD and request.method == "POST":
            self._infer(exchange)
        else:
            self._answer(exchange, self._about_a_prompt(request) or self._page(request))

    def _about_a_prompt(self, request: Request) -> Reply | None:
        if request.method != "POST":
            return None
        try:
            return self._dialect.prompt_page(request.path, request.body)
        except RefusedError as refused:
            return refused.reply

    def _may_enter(self, request: Request) -> bool:
        key = self.settings.api_key
        if key is None or not self._dialect.needs_key(request.path):
            return True
        return request.headers.get(b"authorization") == f"Bearer {key}".encode()

    def _answer(self, exchange: Exchange, reply: Reply) -> None:
        if exchange.open and exchange.record is not None:
            self.stats.answered(exchange.record, reply.status, "cut" if exchange.cut else "answered")
        exchange.answer(reply)

    # Pages.

    def _page(self, request: Request) -> Reply:
        if request.path in PROMPT_FIELD:
            return self._dialect.method_not_allowed("POST")
        reply = self._get(request)
        if reply is None:
            return self._dialect.not_found()
        return reply if request.method == "GET" else self._dialect.method_not_allowed("GET")

    def _get(self, request: Request) -> Reply | None:
        load = self._told_load()
        match request.path:
            case "/metrics":
                broken = self._at_work(BrokenMetricsFault)
                if broken is not None:
                    return simulated_error(broken.status, self._dialect)
                return self._dialect.metrics(load, request.headers)
            case "/v1/loads":
                return self._loads(load, request.query)
            case "/health" if self._at_work(ShutdownFault) is not None:
                return self._dialect.shutdown_health()
            case path:
                return self._dialect.page(path, load)

    def _loads(self, load: LoadSnapshot, query: str) -> Reply | None:
        fault = self._at_work(LoadsFault)
        if not (self._dialect.serves_loads if fault is None else fault.served):
            return None
        include = parse_qs(query).get("include")
        return loads_reply(
            self.settings, self._dialect.version, load, ",".join(include) if include else None, time.time()
        )

    def _told_load(self) -> LoadSnapshot:
        load = self._frozen or self.true_load()
        return load.as_idle() if self._at_work(ZeroLoadFault) is not None else load

    # Inference.

    def _infer(self, exchange: Exchange) -> None:
        try:
            call = self._admit(exchange.request)
        except RefusedError as refused:
            self._answer(exchange, refused.reply)
            return
        digest = answers.fingerprint(self.settings.seed, call.asked)
        known = self._prefixes.read(call.asked) if self._prefixes is not None else 0
        parts = [self._part(call, digest, index, known) for index in range(call.choices)]
        job = Job(parts, lambda: self._answer(exchange, self._reply(call, digest, parts)))
        exchange.on_gone = partial(self._abandon, exchange, job)
        if not self._workload.try_run(job):
            self.stats.rejected += 1
            self._answer(exchange, self._dialect.queue_full())

    def _admit(self, request: Request) -> Call:
        if self._at_work(ShutdownFault) is not None and (refusal := self._dialect.shutdown_refusal()):
            raise RefusedError(refusal)
        if not self._dialect.serves(request.path):
            raise RefusedError(self._dialect.no_embeddings())
        return read_call(request.path, request.body, self._dialect)

    def _part(self, call: Call, digest: bytes, index: int, known: int) -> Part:
        prompt_tokens = max(1, call.prompts[index // call.n] - known)
        if call.path == EMBEDDINGS:
            return Part(prompt_tokens, 0, stopped=True)
        if call.exact:
            return Part(prompt_tokens, call.max_tokens, stopped=False)
        settings = self.settings
        drawn = answers.drawn_length(
            digest, index, median=settings.answer_tokens_median, sigma=settings.answer_tokens_sigma
        )
        return Part(prompt_tokens, min(drawn, call.max_tokens), stopped=drawn < call.max_tokens)

    def _abandon(self, exchange: Exchange, job: Job) -> None:
        self._workload.abandon(job)
        if exchange.record is not None:
            self.stats.gone(exchange.record)

    def _reply(self, call: Call, digest: bytes, parts: list[Part]) -> Reply:
        created_s = int(time.time())
        usage = Usage(sum(call.prompts), sum(part.tokens for part in parts))
        if call.path == EMBEDDINGS:
            vectors = [answers.vector(digest, index, EMBEDDING_DIMENSIONS) for index in range(len(parts))]
            return self._dialect.embedding(call, vectors, usage, created_s)
        choices = [
            Choice(answers.words(digest, index, part.tokens), part.tokens, part.stopped)
            for index, part in enumerate(parts)
        ]
        say = self._dialect.chat if call.path == CHAT else self._dialect.completion
        return say(call, choices, usage, created_s)

    # Faults.

    def _at_work(self, kind: type[StateFault]) -> StateFault | None:
        return self._board.first(kind, self._loop.time())

    def _play_fault(self, exchange: Exchange) -> bool:
        """Play the fault that the request meets, if any. False when the request is to be served after all."""
        entry = self._board.meet(exchange.request.path, self._loop.time())
        if entry is None:
            return False
        match entry.fault:
            case ResetFault():
                self._reset(exchange)
            case HangFault():
                pass  # the connection waits until the client gives up
            case CutBodyFault():
                exchange.cut = True
                return False
            case fault:
                reply = fault_reply(fault, entry.hits, self._dialect)
                if reply is None:
                    return False
                self._answer_after(fault.delay_s if isinstance(fault, AnswerFault) else 0.0, exchange, reply)
        return True

    def _answer_after(self, delay_s: float, exchange: Exchange, reply: Reply) -> None:
        if delay_s:
            self._loop.call_later(
                delay_s, self._answer, exchange, reply
            )  # to nobody, once the client is gone
        else:
            self._answer(exchange, reply)

    def _reset(self, exchange: Exchange) -> None:
        if exchange.record is not None:
            exchange.record.outcome = "reset"
        exchange.reset()

    def _settle_faults(self) -> None:
        """Make pace, telemetry and listener what the faults at work want; called at every start and end of
        one.
        """
        now_s = self._loop.time()
        slow = self._board.first(SlowFault, now_s)
        self._workload.set_factor(1.0 if slow is None else slow.factor)
        if self._board.first(FreezeFault, now_s) is None:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self.true_load()
        self._settle_listener(self._board.first(RefuseFault, now_s))
        self._sleep_until_next_fault(now_s)

    def _settle_listener(self, fault: RefuseFault | None) -> None:
        if fault is not None and not self._refusing:
            self._listener.refuse(drop_open=fault.drop_open)
        elif fault is None and self._refusing:
            self._listener.accept()
        self._refusing = fault is not None

    def _sleep_until_next_fault(self, now_s: float) -> None:
        if self._fault_timer is not None:
            self._fault_timer.cancel()
            self._fault_timer = None
        next_s = self._board.next_change_s(now_s)
        if next_s is not None:
            self._fault_timer = self._loop.call_at(next_s, self._settle_faults)
