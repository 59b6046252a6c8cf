"""Every Redis key of the fleet and of batches: pattern, type, meaning, lifetime. Nothing else spells a key.

``docs/protocol.md`` lists the same patterns for people; a test holds the two together. RQ's own keys
(``rq:...``) are RQ's business.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "forebay:v1:"


@dataclass(frozen=True, slots=True)
class Key:
    """One family of keys. ``pattern`` is the text after the prefix, with ``{}`` for the part that varies."""

    pattern: str
    type: str
    meaning: str
    lifetime: str

    def of(self, *parts: object) -> str:
        """The key itself, for one worker or batch."""
        return PREFIX + self.pattern.format(*parts)


WORKERS = Key("workers", "set", "ids of all registered workers", "for ever")
WORKERS_GENERATION = Key(
    "workers:generation", "string", "counter; changes whenever the set above changes", "for ever"
)
WORKER = Key(
    "worker:{}",
    "hash",
    "what a person said of the worker, its state, incarnation and models",
    "until removed",
)
LOAD = Key("worker:{}:load", "hash", "last load read; a field that is not there is unknown", "until removed")
LIMIT = Key("worker:{}:limit", "hash", "how many leases it may have now, why, since when", "until removed")
BREAKER = Key("worker:{}:breaker", "hash", "circuit breaker; no key is a closed breaker", "until removed")
DEFERRAL = Key("worker:{}:deferral", "hash", "not-before time that the worker asked for", "until then")
MEMO = Key("worker:{}:memo", "hash", "absence memo: it has no /v1/loads", "10 min, renewed by the monitor")
LEASES = Key(
    "worker:{}:leases", "zset", "lease id -> expiry (s); the last part of an id is its tokens", "expiry"
)
GRANTS = Key("worker:{}:grants", "zset", "lease id -> time granted (s)", "with its lease")

SPEEDS = Key(
    "speeds",
    "hash",
    "worker -> tokens/s that it writes of one request, as a dispatcher saw it, and when (s)",
    "10 min after the last",
)

DEMAND = Key(
    "demand",
    "hash",
    "dispatcher -> what found no room there (JSON: model, urgency, count, beyond which speed), for how long",
    "a minute after the last",
)

MONITORS = Key("monitors", "zset", "monitor name -> last heartbeat (s)", "for ever")

BATCHES = Key("batches", "zset", "batch id -> time created (s)", "until the batch is removed")
BATCH = Key("batch:{}", "hash", "a batch: status, counts, times, where its files are", "until removed")
BATCH_SHARDS = Key(
    "batch:{}:shards",
    "hash",
    "shard number -> claim, state, lines completed and failed",
    "a day after its end",
)

QUEUE_MEMORY = Key(
    "queue:{}",
    "hash",
    "a queue as its last claim left it: its ends; by batch share, deadline, shards' costs, next shard",
    "while jobs wait in the queue",
)
QUEUE_TURNS = Key(
    "queue:{}:turns",
    "zset",
    "batch with shards in the queue -> what it has had (planned tokens / share); the least is next",
    "while jobs wait in the queue",
)
QUEUE_EXPRESS = Key(
    "queue:{}:express",
    "list",
    "jobs in the queue that are no shards, which go first, in its order",
    "while jobs wait in the queue",
)

ANSWERS = Key(
    "answers",
    "hash",
    "model -> mean length of its answers to requests without a ceiling (tokens), of how many, and when (s)",
    "30 days after the last answer; of more than 1,024 models, those answered for last",
)

DECISIONS = Key(
    "decisions",
    "zset",
    "request id, batch id and custom_id, with | between -> end of its last recorded attempt (s)",
    "the last 20,000, up to 24 h",
)
DECISION = Key("decision:{}", "zset", "last recorded attempts of a request: record (JSON) -> end (s)", "24 h")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Key))
OF_WORKER = (WORKER, LOAD, LIMIT, BREAKER, DEFERRAL, LEASES, GRANTS)
