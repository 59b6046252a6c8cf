"""A real llama.cpp on the CPU: found, read, and given a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatcher.batches.record import BatchStatus
from forebay.client import Forebay
from tests.engines.batches import assert_whole, chat, write
from tests.engines.servers import MODEL, Page, Server
from workers.breaker import BreakerState
from workers.fleet import WorkerState
from workers.load import LoadSource
from workers.spec import Runtime

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def idle(page: Page) -> bool:
    return page.total("llamacpp:requests_processing") == 0 == page.total("llamacpp:requests_deferred")


def test_a_batch_goes_through_llama_cpp_which_is_read_as_it_says_of_itself(
    llama_server: Server, forebay: Forebay, tmp_path: Path
) -> None:
    lines = [chat(f"line-{n}", f"word {n}", 16 + 8 * n) for n in range(20)]
    forebay.workers.add(llama_server.url)
    batch = forebay.submit(write(tmp_path / "in.jsonl", lines))
    record = forebay.wait(batch.id, timeout_s=200)
    assert (record.status, record.request_counts.completed) == (BatchStatus.COMPLETED, 20)
    assert_whole(forebay.results(batch.id), lines)

    page = llama_server.until(idle)
    [found] = forebay.workers.loads()
    worker = forebay.workers.show(llama_server.url)
    assert (worker.state, worker.runtime) == (WorkerState.READY, Runtime.LLAMACPP)
    assert (worker.models, worker.max_model_len) == (frozenset({MODEL}), 2048)
    assert worker.breaker is BreakerState.CLOSED
    assert forebay.workers.memos()[worker.id].reason == "status 404"
    assert found.load is not None, found.reason
    assert (found.load.source, found.load.running, found.load.waiting) == (LoadSource.METRICS, 0, 0)
    assert found.load.generation_tokens_total == page.total("llamacpp:tokens_predicted_total")
    assert found.load.prompt_tokens_total == page.total("llamacpp:prompt_tokens_total")
    assert found.load.steps_total == page.total("llamacpp:n_decode_total")
