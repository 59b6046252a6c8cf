"""The monitor over a real Valkey: polling, writing, sharing the fleet, surviving outages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from forebay.simulator.faults import CutBodyFault, HangFault
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings
from monitor.exporter import Exporter, PollTimes
from monitor.http import MOST_BYTES, Answer, NoAnswer, Silence, Target, get, make_client
from monitor.server import bind, serve
from monitor.service import MonitorService
from monitor.settings import MonitorSettings
from monitor.sweep import reset_memos, sweep, sweep_fleet
from tests.monitored import Engine, reply, sglang_engine, sglang_loads, vllm_engine, vllm_page
from workers import keys
from workers.breaker import BreakerState
from workers.connection import AsyncRedis
from workers.errors import StoreUnavailable
from workers.fleet import FleetView, WorkerState, WorkerView
from workers.leases import Ask, Grant, lease_id
from workers.load import LoadSource
from workers.spec import WorkerSpec
from workers.store import FleetStore

pytestmark = pytest.mark.integration

FAST: dict[str, Any] = {"poll_interval_s": 0.05, "fast_interval_s": 0.02, "readiness_interval_s": 0.2}


class Hosts:
    """Several engines behind one client, by host; one that is not there refuses connections.

    ``asked`` counts requests by host; whoever waits for a count is woken by the requests.
    """

    def __init__(self, **engines: Engine | Callable[[httpx.Request], Awaitable[httpx.Response]]) -> None:
        self.engines = engines
        self.asked: Counter[str] = Counter()
        self._news = asyncio.Condition()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        async with self._news:
            self.asked[host] += 1
            self._news.notify_all()
        engine = self.engines.get(host)
        if engine is None:
            raise httpx.ConnectError("refused")
        answer = engine(request)
        return answer if isinstance(answer, httpx.Response) else await answer

    async def until(self, true: Callable[[], bool]) -> None:
        """Until ``true`` holds, looked at after every request."""
        async with asyncio.timeout(20), self._news:
            await self._news.wait_for(true)


@pytest.fixture
async def store(valkey: AsyncRedis) -> FleetStore:
    return FleetStore(valkey)


@contextlib.asynccontextmanager
async def running(
    store: FleetStore, hosts: Hosts, name: str = "m1", **more: Any
) -> AsyncIterator[MonitorService]:
    """A monitor at work; it ends, without complaint, with the block. A FlakyStore is used as it is."""
    if not isinstance(store, FlakyStore):
        store = FleetStore(store.client)
    async with httpx.AsyncClient(transport=httpx.MockTransport(hosts)) as client:
        service = MonitorService(store, client, MonitorSettings(name=name, **{**FAST, **more}), environ={})
        task = asyncio.create_task(service.run())
        try:
            yield service
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def register(store: FleetStore, *names: str, **more: Any) -> None:
    for name in names:
        await store.register(WorkerSpec(url=f"http://{name}:80", **more))


async def seen(store: FleetStore, true: Callable[[FleetView], object]) -> FleetView:
    """The first view in which ``true`` holds."""
    async with asyncio.timeout(20):
        while True:
            view = await store.view()  # every look is a round trip, which is all the waiting there is
            if true(view):
                return view


def only(view: FleetView) -> WorkerView:
    (worker,) = view.workers
    return worker


def all_read(view: FleetView) -> bool:
    return all(worker.load is not None for worker in view.workers)


async def test_a_fleet_is_found_read_and_described(store: FleetStore) -> None:
    hosts = Hosts(a=vllm_engine(running=3), b=sglang_engine(running=5, max_running_requests=64))
    await register(store, "a", "b")
    async with running(store, hosts):
        view = await seen(store, lambda view: all_read(view) and view.workers[1].limit == 64)
    a, b = view.workers
    assert a.load is not None
    assert b.load is not None
    assert (a.state, a.runtime, a.models, a.max_model_len) == (WorkerState.READY, "vllm", {"m"}, 2048)
    assert (a.load.source, a.load.running, b.load.source, b.load.running) == ("metrics", 3, "native", 5)
    assert (b.limit, b.limit_reason) == (64, "start: it runs 64 at once")
    memos = await store.memos([a.id, b.id])
    assert {worker: memo.reason for worker, memo in memos.items()} == {a.id: "status 404"}
    assert abs(view.now_s - a.load.sampled_at) < 10


async def test_a_worker_that_never_answers_delays_none_of_the_other_nineteen(store: FleetStore) -> None:
    async def hang(_request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    names = [f"w{number}" for number in range(19)]
    hosts = Hosts(**{name: vllm_engine() for name in names}, hangs=hang)
    await register(store, *names, "hangs")
    async with running(store, hosts, poll_budget_s=30.0):
        await hosts.until(lambda: all(hosts.asked[name] >= 12 for name in names) and hosts.asked["hangs"] > 0)
        # Its first question still hangs: it had all the time that the others' dozen took.
        assert hosts.asked["hangs"] == 1


async def test_while_a_memo_stands_loads_are_not_asked_for_and_are_again_when_it_ends(
    store: FleetStore,
) -> None:
    engine = vllm_engine()
    hosts = Hosts(a=engine)
    await register(store, "a")
    async with running(store, hosts):
        await seen(store, all_read)
        probes = count_probes(engine)
        await hosts.until(lambda: engine.asked.count("/metrics") > 10)
        assert count_probes(engine) - probes <= 1
        engine.replies["/v1/loads"] = reply(sglang_loads(running=9))
        await reset_memos(store)
        view = await seen(store, lambda view: only(view).load.source is LoadSource.NATIVE)
    assert only(view).load.running == 9


async def test_a_memo_ends_by_itself(store: FleetStore) -> None:
    engine = vllm_engine()
    await register(store, "a")
    hosts = Hosts(a=engine)
    async with running(store, hosts, memo_ttl_s=0.3):
        await hosts.until(lambda: count_probes(engine) >= 3)


def count_probes(engine: Engine) -> int:
    return sum("/v1/loads" in path for path in engine.asked)


async def test_a_probe_of_an_old_incarnation_that_ends_late_does_not_mark_the_new_one(
    store: FleetStore,
) -> None:
    asked, let_go = asyncio.Event(), asyncio.Event()
    engine = vllm_engine()

    async def slow(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/loads":
            asked.set()
            await let_go.wait()
            engine.replies["/v1/loads"] = reply(sglang_loads(running=4))
            return httpx.Response(404)
        return engine(request)

    hosts = Hosts(a=slow)
    await register(store, "a")
    async with running(store, hosts, poll_budget_s=30.0):
        await asyncio.wait_for(asked.wait(), 10)
        again = await store.register(WorkerSpec(url="http://a:80"), replace=True)
        assert again.outcome == "replaced"
        hosts.engines["a"] = engine
        let_go.set()
        view = await seen(store, all_read)
        assert (only(view).incarnation, only(view).load.running) == (again.incarnation, 4)
        assert await store.memos(["a"]) == {}


async def test_an_engine_that_restarted_starts_the_next_incarnation_once(store: FleetStore) -> None:
    engine = vllm_engine(tokens=5000)
    hosts = Hosts(a=engine)
    await register(store, "a")
    async with running(store, hosts):
        before = only(await seen(store, all_read))
        engine.replies["/metrics"] = reply(vllm_page(tokens=7, started=900.0))
        view = await seen(store, lambda v: only(v).load and only(v).load.generation_tokens_total == 7)
        polls = hosts.asked["a"]
        await hosts.until(lambda: hosts.asked["a"] > polls + 10)
        after = only(await store.view())
    assert only(view).incarnation > before.incarnation
    assert after.incarnation == only(view).incarnation


async def test_a_worker_that_is_gone_becomes_unready_and_comes_back(store: FleetStore) -> None:
    hosts = Hosts(a=vllm_engine())
    await register(store, "a")
    async with running(store, hosts):
        await seen(store, all_read)
        engine = hosts.engines.pop("a")
        view = await seen(store, lambda view: only(view).state is WorkerState.UNREADY)
        assert "ConnectError" in only(view).reason
        assert await store.memos([only(view).id]) == {}
        hosts.engines["a"] = engine
        await seen(store, lambda view: only(view).state is WorkerState.READY)


async def test_a_worker_that_works_without_a_token_trips_its_breaker(store: FleetStore) -> None:
    await register(store, "a")
    async with running(store, Hosts(a=vllm_engine(running=2)), stall_after_s=0.3):
        view = await seen(store, lambda view: only(view).breaker is BreakerState.OPEN)
    assert only(view).breaker_reason == "stalled"


async def take_leases(store: FleetStore, count: int) -> list[Grant]:
    asks = [Ask(lease_id("d1", number, 10), (only(await store.view()).id,)) for number in range(count)]
    return [grant for grant in await store.acquire(asks) if isinstance(grant, Grant)]


async def test_leases_that_press_raise_the_limit_and_say_why(store: FleetStore) -> None:
    await register(store, "a")
    async with running(store, Hosts(a=vllm_engine(running=16))):
        await seen(store, lambda view: only(view).limit_reason == "start: configured 4")
        assert len(await take_leases(store, 20)) == 4
        view = await seen(store, lambda view: only(view).limit > 4)
    assert only(view).limit == 6
    assert only(view).limit_reason.startswith("grow: 4 leases")
    assert only(view).limit_since > 0


async def test_a_limit_whose_write_a_failover_lost_is_written_again(
    store: FleetStore, valkey: AsyncRedis
) -> None:
    await register(store, "a")
    key = keys.LIMIT.of("a")
    async with running(store, Hosts(a=vllm_engine(running=16))):
        await seen(store, lambda view: only(view).limit_reason == "start: configured 4")
        before = await valkey.hgetall(key)
        await take_leases(store, 4)
        await seen(store, lambda view: only(view).limit == 6)
        await valkey.hset(key, mapping=before)
        await seen(store, lambda view: only(view).limit == 6)


async def test_a_poll_is_begun_on_a_view_that_shows_the_limit_written_before(store: FleetStore) -> None:
    tries: list[tuple[int, bool]] = []

    class Noting(FlakyStore):
        async def write_limit(self, *given: Any, seen: int) -> bool:
            written = await super().write_limit(*given, seen=seen)
            tries.append((seen, written))
            return written

    await register(store, "a")
    async with running(Noting(store.client), Hosts(a=vllm_engine(running=64))):
        for limit in (4, 6, 9):
            await seen(store, lambda view, limit=limit: only(view).limit == limit)
            await take_leases(store, 9)
        await seen(store, lambda view: only(view).limit > 9)
    assert [written for _seen, written in tries] == [True] * len(tries)


async def test_work_that_fills_a_limit_still_being_learned_is_a_reason_to_poll_at_once(
    store: FleetStore,
) -> None:
    await register(store, "a")
    hosts = Hosts(a=vllm_engine(running=16))
    async with running(store, hosts, poll_interval_s=600.0):  # nothing is due while the test runs
        await seen(store, lambda view: only(view).limit_reason == "start: configured 4" and all_read(view))
        await take_leases(store, 4)
        await seen(store, lambda view: only(view).limit > 4)


async def test_a_drained_worker_goes_when_its_leases_are_gone(store: FleetStore, valkey: AsyncRedis) -> None:
    await register(store, "a")
    hosts = Hosts(a=vllm_engine())
    async with running(store, hosts) as service:
        worker = only(await seen(store, all_read))
        await take_leases(store, 1)
        await store.drain(worker.id, deadline_s=600)
        await seen(store, lambda view: only(view).state is WorkerState.DRAINING)
        await service.fleet.wait_past(service.fleet.want() + 1)
        assert only(await store.view()).state is WorkerState.DRAINING
        await valkey.delete(f"forebay:v1:worker:{worker.id}:leases")
        await seen(store, lambda view: not view.workers)


async def test_a_drained_worker_goes_when_its_time_is_over(store: FleetStore) -> None:
    await register(store, "a")
    async with running(store, Hosts(a=vllm_engine())):
        worker = only(await seen(store, all_read))
        await take_leases(store, 1)
        await store.drain(worker.id, deadline_s=0.2)
        await seen(store, lambda view: not view.workers)


async def test_two_monitors_share_the_fleet_and_the_one_that_stays_takes_it_all(store: FleetStore) -> None:
    names = [f"w{number}" for number in range(12)]
    await register(store, *names)
    first, second = (Hosts(**{name: vllm_engine() for name in names}) for _ in range(2))
    async with running(store, first, "first", heartbeat_s=0.5) as one:
        async with running(store, second, "second", heartbeat_s=0.5) as other:
            async with asyncio.timeout(20):
                while not other.fleet.mine or len(one.fleet.mine) + len(other.fleet.mine) != 12:
                    await one.fleet.wait_past(one.fleet.want())
            assert one.fleet.mine | other.fleet.mine == {*names}
            assert one.fleet.mine
            moved = other.fleet.mine
            first.asked.clear()
        hosts_of_moved = {worker.partition(":")[0] for worker in moved}
        await first.until(lambda: all(first.asked[host] > 2 for host in hosts_of_moved))
        assert len(one.fleet.mine) == 12


async def test_in_steady_state_no_worker_is_asked_by_two_monitors(store: FleetStore) -> None:
    names = [f"w{number}" for number in range(12)]
    await register(store, *names)
    first, second = (Hosts(**{name: vllm_engine() for name in names}) for _ in range(2))
    async with (
        running(store, first, "first", heartbeat_s=3.0) as one,
        running(store, second, "second", heartbeat_s=3.0) as other,
    ):
        await other.fleet.wait_past(other.fleet.want())
        async with asyncio.timeout(20):
            while one.fleet.mine | other.fleet.mine != {*names} or one.fleet.mine & other.fleet.mine:
                await one.fleet.wait_past(one.fleet.want())
        first.asked.clear()
        second.asked.clear()
        await first.until(lambda: all(first.asked[worker] >= 10 for worker in one.fleet.mine))
        await second.until(lambda: all(second.asked[worker] >= 10 for worker in other.fleet.mine))
        assert (first.asked.keys(), second.asked.keys()) == (one.fleet.mine, other.fleet.mine)


class FlakyStore(FleetStore):
    """A store whose Redis can be taken away."""

    down = False

    def __init__(self, client: AsyncRedis) -> None:
        super().__init__(client)
        self.refused = asyncio.Event()

    async def view(self) -> FleetView:
        if self.down:
            self.refused.set()
            raise StoreUnavailable("gone")
        return await super().view()

    async def write_loads(self, loads: Any) -> list[bool]:
        if self.down:
            raise StoreUnavailable("gone")
        return await super().write_loads(loads)


class ForgetfulStore(FlakyStore):
    """Refuses the next write of a state that names this model, once."""

    refuses = ""

    async def write_state(self, *given: Any, models: Any = None, **more: Any) -> bool:
        if self.refuses in (models or ()):
            self.refuses = ""
            raise StoreUnavailable("gone")
        return await super().write_state(*given, models=models, **more)


async def test_a_model_whose_first_write_failed_is_known_with_the_next_poll(valkey: AsyncRedis) -> None:
    store, forgetful, engine = FleetStore(valkey), ForgetfulStore(valkey), vllm_engine()
    await register(store, "a")
    async with running(forgetful, Hosts(a=engine)):
        await seen(store, lambda view: only(view).models == {"m"})
        forgetful.refuses = "adapter"
        models = [{"id": name, "owned_by": "vllm"} for name in ("m", "adapter")]
        engine.replies["/v1/models"] = reply({"data": models})
        await seen(store, lambda view: only(view).models == {"m", "adapter"})
    assert forgetful.refuses == ""


async def test_an_outage_of_redis_ends_nothing(valkey: AsyncRedis) -> None:
    store, flaky, engine = FleetStore(valkey), FlakyStore(valkey), vllm_engine()
    hosts = Hosts(a=engine)
    await register(store, "a")
    async with running(flaky, hosts):
        await seen(store, all_read)
        flaky.down = True
        await flaky.refused.wait()
        engine.replies["/metrics"] = reply(vllm_page(running=7))
        flaky.down = False
        await seen(store, lambda view: only(view).load.running == 7)


async def test_a_mistake_with_one_worker_ends_nothing(store: FleetStore) -> None:
    def broken(_request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError

    await register(store, "bad", "good")
    async with running(store, Hosts(bad=broken, good=vllm_engine())):
        view = await seen(store, lambda view: any(worker.load for worker in view.workers))
    assert [worker.load is not None for worker in view.workers] == [False, True]


class TestSweep:
    async def test_a_sweep_shares_the_memos_both_ways(self, store: FleetStore) -> None:
        engines = {"a": vllm_engine(running=3), "b": sglang_engine(running=5)}
        hosts = Hosts(**engines)
        await register(store, "a", "b", "gone")
        for worker in (await store.view()).workers:
            await store.write_state(worker.id, worker.incarnation, WorkerState.READY)
        async with httpx.AsyncClient(transport=httpx.MockTransport(hosts)) as client:
            first = await sweep_fleet(store, client)
            assert [one.load.running if one.load else None for one in first] == [3, 5, None]
            assert "ConnectError" in first[2].reason
            await sweep_fleet(store, client)
            assert count_probes(engines["a"]) == 1
            await sweep(client, (await store.view()).workers, now_s=1.0)
            assert count_probes(engines["a"]) == 2

    async def test_a_sweep_that_finds_the_endpoint_clears_the_memo(self, store: FleetStore) -> None:
        await register(store, "a")
        worker = only(await store.view())
        await store.write_state(worker.id, worker.incarnation, WorkerState.READY)
        await store.set_memo(worker.id, worker.incarnation, "status 404", 600)
        assert await reset_memos(store) == 1
        assert await store.memos([worker.id]) == {}


class TestExporter:
    async def test_what_is_known_is_exported_and_what_is_not_is_absent(self, store: FleetStore) -> None:
        await register(store, "a", "gone")
        registry = CollectorRegistry()
        PollTimes(registry).observe("native", 0.01)
        async with running(store, Hosts(a=vllm_engine(running=3, kv=0.25))):
            await seen(store, lambda view: view.workers[0].load)
            page = (await Exporter(store, registry, ready=lambda: True).page()).decode()
        samples = {
            (sample.name, sample.labels.get("worker"), sample.labels.get("state")): sample
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        a, gone = "a", "gone"
        assert samples["forebay_worker_running", a, None].value == 3
        assert samples["forebay_worker_kv_usage", a, None].value == 0.25
        assert samples["forebay_worker_limit", gone, None].value == 16
        assert samples["forebay_worker_breaker_state", a, "closed"].value == 1
        assert ("forebay_worker_running", gone, None) not in samples
        assert ("forebay_worker_load_age_seconds", gone, None) not in samples
        info = samples["forebay_worker_info", a, "ready"].labels
        assert (info["runtime"], info["source"], info["memo"]) == ("vllm", "metrics", "status 404")
        assert samples["forebay_monitor_poll_duration_seconds_count", None, None].value == 1

    async def test_without_redis_only_that_is_said(self, valkey: AsyncRedis) -> None:
        store = FlakyStore(valkey)
        await register(store, "a")
        store.down = True
        page = (await Exporter(store, CollectorRegistry(), ready=lambda: False).page()).decode()
        assert "forebay_redis_up 0.0" in page
        assert "forebay_worker" not in page

    async def test_health_and_readiness_are_served(self, store: FleetStore) -> None:
        ready = False
        with bind("127.0.0.1", 0) as listener:
            base = Target(f"http://127.0.0.1:{listener.getsockname()[1]}")
            exporter = Exporter(store, CollectorRegistry(), ready=lambda: ready)
            task = asyncio.create_task(serve(exporter, listener))
            async with make_client() as client:
                before = [
                    await status_of(client, base, path)
                    for path in ("/healthz", "/readyz", "/metrics", "/nothing")
                ]
                ready = True
                after = await status_of(client, base, "/readyz")
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert before == [200, 503, 200, 404]
        assert after == 200


async def status_of(client: httpx.AsyncClient, target: Target, path: str) -> int:
    found = await get(client, target, path, deadline=asyncio.get_running_loop().time() + 10)
    assert isinstance(found, Answer)
    return found.status


class TestTransport:
    async def test_a_real_engine_is_read_over_a_real_socket(self, store: FleetStore) -> None:
        async with (
            SimulatedEngine(EngineSettings(runtime="vllm", slots=4)) as vllm,
            SimulatedEngine(EngineSettings(runtime="sglang", slots=12)) as sglang,
            make_client() as client,
        ):
            for engine in (vllm, sglang):
                await store.register(WorkerSpec(url=engine.url))
            task = asyncio.create_task(MonitorService(store, client, MonitorSettings(**FAST)).run())
            view = await seen(store, all_read)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        sources = {worker.runtime: worker.load.source for worker in view.workers if worker.load}
        assert sources == {"vllm": LoadSource.METRICS, "sglang": LoadSource.NATIVE}

    async def test_an_answer_without_an_end_is_read_no_further_than_its_bound(self) -> None:
        given = 0

        async def flood() -> AsyncIterator[bytes]:
            nonlocal given
            while True:
                given += 1024 * 1024
                yield bytes(1024 * 1024)

        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=flood()))
        async with httpx.AsyncClient(transport=transport) as client:
            deadline = asyncio.get_running_loop().time() + 30
            found = await get(client, Target("http://a:1"), "/metrics", deadline=deadline)
        assert found == NoAnswer(Silence.BROKEN, f"an answer above {MOST_BYTES} bytes")
        assert given <= MOST_BYTES + 2 * 1024 * 1024

    async def test_every_way_of_not_answering_has_its_name(self) -> None:
        hang, cut = HangFault(paths=("/version",)), CutBodyFault(paths=("/v1/models",))
        async with (
            SimulatedEngine(EngineSettings(faults=(hang, cut))) as engine,
            make_client() as client,
        ):
            target, now = Target(engine.url), asyncio.get_running_loop().time
            late = await get(client, target, "/version", deadline=now() + 0.1)
            broken = await get(client, target, "/v1/models", deadline=now() + 10)
        refused = Target(engine.url)
        async with make_client() as client:
            gone = await get(client, refused, "/version", deadline=now() + 10)
        found = [one.silence for one in (late, broken, gone) if isinstance(one, NoAnswer)]
        assert found == [Silence.LATE, Silence.BROKEN, Silence.REFUSED]
