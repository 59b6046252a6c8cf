"""The one door to Redis for the fleet: one method is one atomic step.

What is stored, and under which key, is ``keys``' subject; what the numbers mean is the records', how workers
are read that of ``views``. Every method raises StoreUnavailable when Redis does not answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from workers import keys, leases
from workers.breaker import BreakerPolicy
from workers.connection import AsyncRedis, translated
from workers.errors import UnknownWorker
from workers.evidence import Evidence
from workers.fleet import FleetView, WorkerState
from workers.leases import Ask, End, Grant, Refusal
from workers.limits import DEFAULT_LIMIT
from workers.load import Load
from workers.scripts import Scripts
from workers.spec import Runtime, WorkerSpec, worker_id
from workers.views import ViewReader, finite

_ACQUIRE_KEYS = (keys.WORKER, keys.BREAKER, keys.DEFERRAL, keys.LIMIT, keys.LEASES, keys.GRANTS)
_SETTLE_KEYS = (keys.BREAKER, keys.DEFERRAL, keys.LIMIT, keys.LEASES, keys.GRANTS)


@dataclass(frozen=True, slots=True)
class Registered:
    """How a registration ended: ``outcome`` is created, replaced or kept."""

    worker_id: str
    incarnation: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Memo:
    """The note that an incarnation of a worker has no ``/v1/loads``."""

    reason: str
    incarnation: int
    until: float


@dataclass(frozen=True, slots=True)
class _Roster:
    """Who is registered as of a generation, and the keys to look at for all of them."""

    generation: str
    ids: tuple[str, ...]
    keys: list[str]


class FleetStore:
    """Workers, loads, limits, breakers, memos and leases in one Redis."""

    def __init__(
        self,
        client: AsyncRedis,
        *,
        policy: BreakerPolicy | None = None,
        lease_ttl_s: float = 20.0,
        rng: random.Random | None = None,
    ) -> None:
        self.client = client
        self.policy = policy or BreakerPolicy()
        self.lease_ttl_s = lease_ttl_s
        self._policy_fields = self.policy.model_dump()
        self._rng = rng or random.Random()
        self._scripts = Scripts(client)
        self._roster = _Roster("?", (), [keys.WORKERS_GENERATION.of()])
        self._reader = ViewReader()

    async def now(self) -> float:
        """Redis' clock, in seconds since the epoch."""
        with translated():
            seconds, micros = await self.client.time()
        return float(seconds) + float(micros) / 1e6

    # -- the registry -------------------------------------------------------------------------------------

    async def register(self, spec: WorkerSpec, *, replace: bool = False, origin: str = "") -> Registered:
        """Register a worker. The same spec again changes nothing, unless ``replace`` asks for a new life.

        ``origin`` names the configuration file that asks; empty: a person or a program does.
        """
        given = {
            "url": spec.url,
            "given_runtime": spec.runtime or "",
            "given_models": _packed(spec.models),
            "weight": repr(spec.weight),
            "api_key_env": spec.api_key_env or "",
            "api_key_file": spec.api_key_file or "",
            "max_running": str(spec.max_running or ""),
        }
        answer = await self._scripts.run(
            "register",
            [
                keys.WORKERS.of(),
                keys.WORKERS_GENERATION.of(),
                *_of(spec.id, keys.WORKER, keys.LOAD, keys.LIMIT, keys.BREAKER, keys.DEFERRAL, keys.MEMO),
            ],
            [
                spec.id,
                _json(given),
                spec.max_running or DEFAULT_LIMIT,
                "replace" if replace else "keep",
                origin,
            ],
        )
        return Registered(spec.id, int(answer[0]), str(answer[1]))

    async def remove(self, name: str, *, incarnation: int | None = None) -> bool:
        """Forget a worker; False when it is not there, or lives another incarnation than the one given."""
        worker = worker_id(name) if "://" in name else name
        removed = await self._scripts.run(
            "remove",
            [
                keys.WORKERS.of(),
                keys.WORKERS_GENERATION.of(),
                *_of(worker, *keys.OF_WORKER, keys.MEMO),
            ],
            [worker, "any" if incarnation is None else str(incarnation)],
        )
        return bool(removed)

    async def drain(self, name: str, *, deadline_s: float) -> None:
        """Let a worker take no new lease; it is removed when its leases are gone or ``deadline_s`` is over.

        Raises UnknownWorker.
        """
        worker = worker_id(name) if "://" in name else name
        if not await self._scripts.run("drain", _of(worker, keys.WORKER), [repr(deadline_s)]):
            raise UnknownWorker(f"no worker {name} is registered; see: forebay workers list")

    async def write_state(
        self,
        worker: str,
        incarnation: int,
        state: WorkerState,
        *,
        reason: str = "",
        models: Iterable[str] | None = None,
        max_model_len: int | None = None,
        runtime: Runtime | None = None,
        version: str | None = None,
    ) -> bool:
        """Write what was found out about a worker; None leaves a field. False: another incarnation stands."""
        fields: list[str] = ["reason", reason]
        if models is not None:
            fields += ["models", _packed(models)]
        if max_model_len is not None:
            fields += ["max_model_len", str(max_model_len)]
        if runtime is not None:
            fields += ["runtime", runtime.value]
        if version is not None:
            fields += ["version", version]
        return bool(
            await self._scripts.run(
                "write_state",
                _of(worker, keys.WORKER, keys.MEMO),
                [str(incarnation), state.value, *fields],
            )
        )

    async def next_incarnation(self, worker: str, seen: int, reason: str) -> int:
        """Start the next incarnation of a worker that was seen to live a new life.

        The load and the memo go, and the limit is a first one again: what comes back may be smaller.

        Returns the incarnation that now stands: another observer may have been first. 0: no such worker.
        """
        found = await self._scripts.run(
            "next_incarnation",
            [
                *_of(worker, keys.WORKER),
                keys.WORKERS_GENERATION.of(),
                *_of(worker, keys.LOAD, keys.MEMO, keys.LIMIT),
            ],
            [str(seen), reason, DEFAULT_LIMIT],
        )
        return int(found)

    # -- what the monitor writes --------------------------------------------------------------------------

    async def write_load(self, worker: str, incarnation: int, load: Load) -> bool:
        """Replace the load (stamps on Redis' clock). False: another incarnation or a newer load stands."""
        return (await self.write_loads([(worker, incarnation, load)]))[0]

    async def write_loads(self, loads: Sequence[tuple[str, int, Load]]) -> list[bool]:
        """The same for several workers, each for itself, in one step; cheaper than one step each."""
        given = [
            (
                str(incarnation),
                repr(load.sampled_at),
                [text for item in load.to_hash().items() for text in item],
            )
            for _worker, incarnation, load in loads
        ]
        names = (worker for worker, _incarnation, _load in loads)
        answer = await self._scripts.run(
            "write_loads", _of_all(names, (keys.WORKER, keys.LOAD)), [_json(given)]
        )
        return [bool(written) for written in answer]

    async def write_limit(self, worker: str, incarnation: int, value: int, reason: str, *, seen: int) -> bool:
        """Set the limit. ``seen`` is the version it was computed from; False: it changed since."""
        return bool(
            await self._scripts.run(
                "write_limit",
                _of(worker, keys.WORKER, keys.LIMIT),
                [str(incarnation), str(seen), str(max(1, value)), reason],
            )
        )

    async def note_evidence(self, notes: Sequence[tuple[str, float, Evidence]]) -> int:
        """Count what answers showed: of a worker, since when the limit stands at which they were seen, it.

        Returns for how many workers it was counted: those whose limit has changed since are left out.
        """
        args: list[str | int | float | bytes] = []
        for _worker, since, seen in notes:
            args += [f"{since:.6f}", seen.answers, seen.tokens, round(seen.seconds * 1000), seen.leases]
        names = (worker for worker, _since, _seen in notes)
        return int(await self._scripts.run("note_evidence", _of_all(names, (keys.LIMIT,)), args))

    async def set_memo(self, worker: str, incarnation: int, reason: str, ttl_s: float) -> bool:
        """Note that this incarnation has no ``/v1/loads``; False: another stands, or it is not ready."""
        return bool(
            await self._scripts.run(
                "set_memo", _of(worker, keys.WORKER, keys.MEMO), [str(incarnation), reason, repr(ttl_s)]
            )
        )

    async def clear_memo(self, worker: str) -> None:
        """Drop the memo: the endpoint was found, or shall be looked for again."""
        with translated():
            await self.client.delete(keys.MEMO.of(worker))

    async def memos(self, workers: Sequence[str]) -> dict[str, Memo]:
        """The memos that stand, by worker."""
        with translated():
            async with self.client.pipeline(transaction=False) as pipeline:
                for worker in workers:
                    pipeline.hgetall(keys.MEMO.of(worker))
                found = await pipeline.execute()
        memos = {worker: _to_memo(fields) for worker, fields in zip(workers, found, strict=True)}
        return {worker: memo for worker, memo in memos.items() if memo is not None}

    async def trip(self, worker: str, incarnation: int | None, reason: str, *, seconds: float = 0.0) -> bool:
        """Open the breaker from outside; ``seconds`` 0: as long as the policy says. False: it was open."""
        return bool(
            await self._scripts.run(
                "trip",
                _of(worker, keys.WORKER, keys.BREAKER),
                [
                    "any" if incarnation is None else str(incarnation),
                    reason,
                    repr(self._jitter()),
                    _json(self._policy_fields),
                    repr(seconds),
                ],
            )
        )

    async def reset_breaker(self, worker: str) -> None:
        """Close the breaker by hand. Raises UnknownWorker."""
        if not await self._scripts.run("reset_breaker", _of(worker, keys.WORKER, keys.BREAKER), []):
            raise UnknownWorker(f"no worker {worker} is registered; see: forebay workers list")

    async def monitor_heartbeat(self, name: str, ttl_s: float) -> tuple[str, ...]:
        """Mark a monitor live; returns the names of all live ones, sorted."""
        return tuple(await self._scripts.run("heartbeat", [keys.MONITORS.of()], [name, repr(ttl_s)]))

    async def live_monitors(self, ttl_s: float) -> tuple[str, ...]:
        """The names of monitors whose last heartbeat is no older, sorted; nothing is written."""
        with translated():
            seconds, micros = await self.client.time()
            since = seconds + micros / 1e6 - ttl_s
            names = await self.client.zrangebyscore(keys.MONITORS.of(), since, "+inf")
        return tuple(sorted(str(name) for name in names))

    # -- looking ------------------------------------------------------------------------------------------

    async def view(self) -> FleetView:
        """The whole fleet at one moment: one script call, two when the list of workers has changed.

        A worker whose record cannot be read is not in it; one whose load cannot be read has none.
        """
        while True:
            roster = self._roster
            answer = msgspec.json.decode(await self._scripts.run("fleet", roster.keys, [roster.generation]))
            if str(answer[1]) == roster.generation:
                return self._to_view(roster, answer)
            await self._read_roster(str(answer[1]))

    async def generation(self) -> int:
        """A counter that grows whenever a worker comes, goes or lives anew; 0 in an empty Redis.

        One that shrank says that Redis has lost data.
        """
        with translated():
            return int(await self.client.get(keys.WORKERS_GENERATION.of()) or 0)

    async def _read_roster(self, generation: str) -> None:
        with translated():
            members = await self.client.smembers(keys.WORKERS.of())
        ids = tuple(sorted(str(member) for member in members))
        of_workers = [key for worker in ids for key in _of(worker, *keys.OF_WORKER)]
        self._roster = _Roster(generation, ids, [keys.WORKERS_GENERATION.of(), *of_workers])
        self._reader.keep_only(set(ids))

    def _to_view(self, roster: _Roster, answer: list[list[object]]) -> FleetView:
        workers = (
            self._reader.read(worker, entry)
            for worker, entry in zip(roster.ids, answer[2:], strict=True)
            if entry[0]  # a worker removed between the two reads has no record
        )
        return FleetView(
            now_s=float(str(answer[0])),
            generation=int(roster.generation),
            workers=tuple(worker for worker in workers if worker is not None),
        )

    # -- leases -------------------------------------------------------------------------------------------

    async def acquire(self, asks: Sequence[Ask]) -> list[Grant | tuple[Refusal, ...]]:
        """Take a lease for each ask on the first candidate that admits it; the others say why not."""
        workers, numbered = leases.asked(asks)
        payload = {
            "ttl_s": self.lease_ttl_s,
            "default_limit": 1,
            "policy": self._policy_fields,
            "asks": numbered,
        }
        answer = await self._scripts.run("acquire", _of_all(workers, _ACQUIRE_KEYS), [_json(payload)])
        return leases.answered(answer, workers)

    async def settle(self, ends: Sequence[End]) -> int:
        """End attempts: free their leases and tell breaker, deferral and limit. Repeating it changes nothing.

        Returns how many leases were freed.
        """
        workers, numbered = leases.ended(ends, self._jitter)
        payload = {"policy": self._policy_fields, "ends": numbered}
        return int(await self._scripts.run("settle", _of_all(workers, _SETTLE_KEYS), [_json(payload)]))

    async def renew(self, held: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Keep leases (by worker) alive for another term; returns the ids of those that were gone already."""
        workers = [worker for worker, ids in held.items() if ids]
        if not workers:
            return ()
        payload = {
            "ttl_s": self.lease_ttl_s,
            "trial_s": self.policy.trial_s,
            "leases": [list(held[worker]) for worker in workers],
        }
        gone = await self._scripts.run(
            "renew", _of_all(workers, (keys.LEASES, keys.BREAKER)), [_json(payload)]
        )
        return tuple(msgspec.json.decode(gone))

    def _jitter(self) -> float:
        return self._rng.uniform(-0.1, 0.1)


def _of(worker: str, *families: keys.Key) -> list[str]:
    return [family.of(worker) for family in families]


def _of_all(workers: Iterable[str], families: tuple[keys.Key, ...]) -> list[str]:
    return [family.of(worker) for worker in workers for family in families]


def _to_memo(fields: Mapping[str, str]) -> Memo | None:
    try:
        return Memo(fields["reason"], int(fields["incarnation"]), finite(fields["until"]))
    except (KeyError, ValueError):  # there is none, or one that somebody spoiled: the worker is asked anew
        return None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _packed(names: Iterable[str]) -> str:
    """Names as JSON text: readable in redis-cli, safe for names with spaces or commas."""
    return _json(sorted(names)) if names else ""
