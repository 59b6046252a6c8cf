"""One simulated engine: requests in, answers out when the batching model says so, faults played on the way.

Belongs here: routing, the key, the life of a request in the batch, and what is true of the engine at this
moment. Does not belong here: sockets (``connection``, ``server``), arithmetic of the batch (``batching``),
words (dialects). Time is the event loop's; Unix time only stamps what is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qs

from forebay.simulator import answers
from forebay.simulator.batching import Batch, Sequence
from forebay.simulator.calls import CHAT, EMBEDDINGS, PROMPT_FIELD, RefusedError, prompt_head, read_call
from forebay.simulator.control import PREFIX, control_reply
from forebay.simulator.dialect import EMBEDDING_DIMENSIONS, Choice, Dialect, Usage, empty_reply
from forebay.simulator.faults import (
    AlternateFault,
    AnswerFault,
    BrokenMetricsFault,
    CutBodyFault,
    Fault,
    FaultBoard,
    FreezeFault,
    HangFault,
    LoadsFault,
    OddBodyFault,
    RefuseFault,
    ResetFault,
    SetFault,
    ShutdownFault,
    SlowFault,
    StateFault,
    ZeroLoadFault,
)
from forebay.simulator.load import LoadSnapshot
from forebay.simulator.reply import JSON, Reply, json_reply
from forebay.simulator.sglang import SglangDialect
from forebay.simulator.sglang_loads import loads_reply
from forebay.simulator.stats import Stats
from forebay.simulator.vllm import VllmDialect

if TYPE_CHECKING:
    from forebay.simulator.calls import Call
    from forebay.simulator.connection import Exchange, Request
    from forebay.simulator.settings import EngineSettings

_DIALECTS: dict[str, type[Dialect]] = {"vllm": VllmDialect, "sglang": SglangDialect}


class Listener(Protocol):
    """Whoever holds the listening socket."""

    def refuse(self, *, drop_open: bool) -> None:
        """Stop listening, so that connecting is refused; reset open connections when asked to."""

    def accept(self) -> None:
        """Listen again, on the same port."""


@dataclass(slots=True)
class _Job:
    """A request in the batch: one sequence for each choice of each prompt, answered when the last has
    finished.
    """

    exchange: Exchange
    call: Call
    digest: bytes
    choices: list[tuple[int, bool]]  # tokens, and whether the answer ends by itself
    keys: list[int]
    left: int


class Engine:
    """The engine behind the sockets. Needs a running event loop."""

    def __init__(self, settings: EngineSettings, listener: Listener) -> None:
        self.settings = settings
        self.stats = Stats(settings.log_requests)
        self._loop = asyncio.get_running_loop()
        self._dialect = _DIALECTS[settings.runtime](settings, time.time())
        self._batch = Batch(settings.pace(), now_s=self._loop.time())
        self._board = FaultBoard()
        self._listener = listener
        self._refusing = False
        self._frozen: LoadSnapshot | None = None
        self._keys = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self._finish_timer: asyncio.TimerHandle | None = None
        self._fault_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

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
        self._pump()
        return LoadSnapshot(
            sampled_at_s=time.time(),
            running=self._batch.running,
            waiting=self._batch.waiting,
            waiting_prompt_tokens=self._batch.waiting_prompt_tokens,
            used_tokens=self._batch.held_tokens,
            capacity_tokens=self.settings.kv_tokens,
            gen_tokens_per_s=self._batch.tokens_per_s_now,
            prompt_tokens_total=self._batch.prompt_tokens_total,
            generation_tokens_total=self._batch.generation_tokens_total,
            finished=dict(self._finished),
            rejected=self.stats.rejected,
        )

    @property
    def max_running_seen(self) -> int:
        """The most sequences that ever ran at once."""
        return self._batch.max_running_seen

    async def until_idle(self) -> None:
        """Return once no request is in the batch."""
        await self._idle.wait()

    def stop(self) -> None:
        """Cancel the timers; nothing is answered after this."""
        for timer in (self._finish_timer, self._fault_timer):
            if timer is not None:
                timer.cancel()

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
            self._answer(exchange, self._page(request))

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
                    return self._error(broken.status)
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
        request = exchange.request
        try:
            job = self._read_job(exchange, request)
        except RefusedError as refused:
            self._answer(exchange, refused.reply)
            return
        self._pump()  # first, so that slots that are free by now count as room
        if not self._batch.has_room(len(job.choices)):
            self.stats.rejected += 1
            self._answer(exchange, self._dialect.queue_full())
            return
        self._submit(job)
        self._pump()

    def _read_job(self, exchange: Exchange, request: Request) -> _Job:
        if self._at_work(ShutdownFault) is not None and (refusal := self._dialect.shutdown_refusal()):
            raise RefusedError(refusal)
        if not self._dialect.serves(request.path):
            raise RefusedError(self._dialect.no_embeddings())
        call = read_call(request.path, request.body, self._dialect)
        digest = answers.fingerprint(self.settings.seed, request.body)
        choices = [self._choice(call, digest, index) for index in range(call.choices)]
        keys = [next(self._keys) for _ in choices]
        return _Job(exchange, call, digest, choices, keys, len(choices))

    def _choice(self, call: Call, digest: bytes, index: int) -> tuple[int, bool]:
        if call.path == EMBEDDINGS:
            return 0, True
        if call.exact:
            return call.max_tokens, False
        settings = self.settings
        drawn = answers.drawn_length(
            digest, index, median=settings.answer_tokens_median, sigma=settings.answer_tokens_sigma
        )
        return min(drawn, call.max_tokens), drawn < call.max_tokens

    def _submit(self, job: _Job) -> None:
        now_s = self._loop.time()
        job.exchange.on_gone = partial(self._abandon, job)
        for index, (key, (tokens, _)) in enumerate(zip(job.keys, job.choices, strict=True)):
            self._jobs[key] = job
            prompt_tokens = job.call.prompts[index // job.call.n]
            self._batch.submit(Sequence(key, prompt_tokens, tokens), now_s)
        self._idle.clear()

    def _abandon(self, job: _Job) -> None:
        now_s = self._loop.time()
        for key in job.keys:
            if self._batch.abort(key, now_s):
                self._finished["abort"] += 1
                self._jobs.pop(key, None)
        if job.exchange.record is not None:
            self.stats.gone(job.exchange.record)
        self._pump()

    def _pump(self) -> None:
        """Answer what has finished by now, and sleep until the next finish."""
        for finished in self._batch.advance(self._loop.time()):
            job = self._jobs.pop(finished.sequence.key, None)
            if job is not None:
                self._finish_one(job)
        if not self._jobs:
            self._idle.set()
        self._sleep_until_next_finish()

    def _finish_one(self, job: _Job) -> None:
        job.left -= 1
        if job.left == 0:
            for _, stopped in job.choices:
                self._finished["stop" if stopped else "length"] += 1
            self._answer(job.exchange, self._reply(job))

    def _sleep_until_next_finish(self) -> None:
        if self._finish_timer is not None:
            self._finish_timer.cancel()
            self._finish_timer = None
        next_s = self._batch.next_event_s()
        if next_s is not None:
            self._finish_timer = self._loop.call_at(next_s, self._pump)

    def _reply(self, job: _Job) -> Reply:
        call, created_s = job.call, int(time.time())
        usage = Usage(sum(call.prompts), sum(tokens for tokens, _ in job.choices))
        if call.path == EMBEDDINGS:
            vectors = [
                answers.vector(job.digest, index, EMBEDDING_DIMENSIONS) for index in range(len(call.prompts))
            ]
            return self._dialect.embedding(call, vectors, usage, created_s)
        choices = [
            Choice(answers.words(job.digest, index, tokens), tokens, stopped)
            for index, (tokens, stopped) in enumerate(job.choices)
        ]
        say = self._dialect.chat if call.path == CHAT else self._dialect.completion
        return say(call, choices, usage, created_s)

    # Faults.

    def _at_work(self, kind: type[StateFault]) -> StateFault | None:
        return self._board.first(kind, self._loop.time())

    def _error(self, status: int) -> Reply:
        return self._dialect.error(status, "SimulatedFault", f"Simulated fault: status {status}.")

    def _play_fault(self, exchange: Exchange) -> bool:
        """Play the fault that the request meets, if any. False when the request is to be served after all."""
        entry = self._board.meet(exchange.request.path, self._loop.time())
        if entry is None:
            return False
        match entry.fault:
            case AnswerFault() as fault:
                self._answer(exchange, self._told_answer(fault))
            case AlternateFault(statuses=statuses):
                status = statuses[(entry.hits - 1) % len(statuses)]
                if status == 200:
                    return False
                self._answer(exchange, self._error(status))
            case OddBodyFault() as fault:
                self._answer(exchange, self._odd_body(fault))
            case ResetFault():
                self._reset(exchange)
            case CutBodyFault():
                exchange.cut = True
                return False
            case HangFault():
                pass
        return True

    def _reset(self, exchange: Exchange) -> None:
        if exchange.record is not None:
            exchange.record.outcome = "reset"
        exchange.reset()

    def _told_answer(self, fault: AnswerFault) -> Reply:
        if fault.body is not None:
            reply = Reply(fault.status, fault.body.encode(), fault.content_type.encode())
        elif fault.queue_full:
            reply = self._dialect.queue_full(fault.status)
        else:
            reply = self._error(fault.status)
        if fault.retry_after is None:
            return reply
        header = (b"retry-after", fault.retry_after.encode("latin-1"))
        return Reply(reply.status, reply.body, reply.content_type, (header,))

    def _odd_body(self, fault: OddBodyFault) -> Reply:
        match fault.form:
            case "empty":
                return empty_reply(fault.status)
            case "html":
                page = b"<html><body><h1>Welcome</h1></body></html>"
                return Reply(fault.status, page, b"text/html; charset=utf-8")
            case "invalid_json":
                return Reply(fault.status, b'{"id":"chatcmpl-1","choices":[{"index":0,', JSON)
            case "error_object":
                error = {
                    "message": "Simulated error inside an answer.",
                    "type": "BadRequestError",
                    "code": 400,
                }
                return json_reply(fault.status, {"error": error})

    def _settle_faults(self) -> None:
        """Make pace, telemetry and listener what the faults at work want; called at every start and end of
        one.
        """
        now_s = self._loop.time()
        slow = self._board.first(SlowFault, now_s)
        self._batch.set_factor(1.0 if slow is None else slow.factor, now_s)
        if self._board.first(FreezeFault, now_s) is None:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self.true_load()
        self._settle_listener(self._board.first(RefuseFault, now_s))
        self._pump()
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
