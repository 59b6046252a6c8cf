"""Batches in Redis, a real one and a fake: claims fence, reports are absolute, moves go where they may."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import fakeredis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dispatcher.batches.ledger import Claim, Ledger, Tally
from dispatcher.batches.poison import Past
from dispatcher.batches.record import BatchStatus
from workers import keys
from workers.errors import Fenced

pytestmark = pytest.mark.integration

BATCH = "batch_1"
FIELDS = {
    "status": "in_progress",
    "total": "30",
    "completed": "0",
    "failed": "2",
    "shards": "3",
    "shards_done": "0",
    "cost_total": "300",
    "expires_at": "5000",
}


@pytest.fixture(params=["valkey", "fake_redis"])
def client(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
async def ledger(client):
    ledger = Ledger(client)
    await ledger.open(BATCH, 1000.0, FIELDS)
    return ledger


async def test_a_known_batch_is_not_opened_again(ledger):
    assert not await ledger.open(BATCH, 2000.0, {"status": "validating"})
    assert (await ledger.entry(BATCH)).status == "in_progress"


async def test_a_later_claim_fences_the_earlier(ledger):
    old = await ledger.claim(BATCH, 0, "a")
    new = await ledger.claim(BATCH, 0, "b")
    with pytest.raises(Fenced):
        await ledger.progress(old, "a", Tally(completed=9), done=True)
    standing = await ledger.progress(new, "b", Tally(completed=10), done=True)
    entry = await ledger.entry(BATCH)
    assert (standing.shards_done, standing.all_done, entry.completed, entry.failed) == (1, False, 10, 2)


async def test_a_shard_of_a_batch_that_is_not_in_progress_cannot_be_claimed(ledger):
    await ledger.move(BATCH, BatchStatus.CANCELLING, among=[BatchStatus.IN_PROGRESS])
    assert await ledger.claim(BATCH, 0, "a") == "cancelling"
    assert await ledger.claim("batch_unknown", 0, "a") == ""


async def test_a_repeated_report_counts_once(ledger):
    claim = await ledger.claim(BATCH, 1, "a")
    tally = Tally(completed=7, failed=3, prompt_tokens=70, completion_tokens=30, cost=100)
    for _ in range(3):
        standing = await ledger.progress(claim, "a", tally, done=True)
    entry = await ledger.entry(BATCH)
    assert (standing.shards_done, entry.completed, entry.failed, entry.cost_done) == (1, 7, 5, 100)
    assert (entry.prompt_tokens, entry.completion_tokens) == (70, 30)
    assert await ledger.shards_done(BATCH) == {1}


async def test_a_running_report_that_comes_after_done_changes_nothing(ledger):
    claim = await ledger.claim(BATCH, 1, "a")
    await ledger.progress(claim, "a", Tally(completed=10), done=True)
    await ledger.progress(claim, "a", Tally(completed=4), done=False)
    assert await ledger.shards_done(BATCH) == {1}
    await ledger.progress(claim, "a", Tally(completed=10), done=True)
    entry = await ledger.entry(BATCH)
    assert (entry.shards_done, entry.completed) == (1, 10)


async def test_a_shard_that_was_done_counts_once_however_often_it_is_done_again(ledger):
    for owner in "abc":
        claim = await ledger.claim(BATCH, 2, owner)
        await ledger.progress(claim, owner, Tally(completed=3), done=False)
        await ledger.progress(claim, owner, Tally(completed=10), done=True)
    entry = await ledger.entry(BATCH)
    assert (entry.shards_done, entry.completed) == (1, 10)


async def test_a_report_after_the_end_leaves_the_final_counts_alone(ledger):
    claim = await ledger.claim(BATCH, 0, "a")
    await ledger.move(BATCH, BatchStatus.CANCELLING, among=[BatchStatus.IN_PROGRESS])
    await ledger.progress(claim, "a", Tally(completed=4), done=False)
    assert (await ledger.entry(BATCH)).completed == 4
    final = {"completed": "4", "failed": "28"}
    await ledger.move(BATCH, BatchStatus.CANCELLED, among=[BatchStatus.CANCELLING], fields=final)
    await ledger.progress(claim, "a", Tally(completed=9), done=False)
    entry = await ledger.entry(BATCH)
    assert (entry.completed, entry.failed) == (4, 28)


async def died(ledger, shard=0):
    """What befell the claims before the next one, which lives."""
    claim = await ledger.claim(BATCH, shard, "next")
    await ledger.hand_back(claim, "next")
    return claim.past


async def test_a_claim_that_nobody_handed_back_has_died(ledger):
    for _ in range(2):
        await ledger.claim(BATCH, 0, "a")
    assert await died(ledger) == Past(died=2)
    assert await died(ledger) == Past(died=2)
    assert await died(ledger, shard=1) == Past()


async def claim_by(ledger, call, owner="a"):
    """The number and the past of the claim that a call makes."""
    key_names = [keys.BATCH.of(BATCH), keys.BATCH_SHARDS.of(BATCH)]
    number, _, text = await ledger._scripts.run("claim_shard", key_names, [0, owner, call])
    return int(number), Past.read(dict(re.findall(r"(\w+)=(\S+)", text)))


async def test_a_claim_that_is_repeated_is_the_same_one_and_none_has_died(ledger):
    """The client repeats a call whose answer was lost."""
    for _ in range(3):
        assert await claim_by(ledger, "first") == (1, Past())
    for _ in range(3):
        assert await claim_by(ledger, "second") == (2, Past(died=1))
    await ledger.progress(Claim(BATCH, 0, 2), "a", Tally(completed=10), done=True)
    for _ in range(3):
        assert await claim_by(ledger, "third") == (3, Past(died=1))


async def test_a_claim_that_was_handed_back_is_never_given_again(ledger):
    await claim_by(ledger, "first")
    await ledger.hand_back(Claim(BATCH, 0, 1), "a")
    assert await claim_by(ledger, "first") == (2, Past())


async def test_each_claim_is_a_call_of_its_own(ledger):
    assert [(await ledger.claim(BATCH, 0, "a")).number for _ in range(3)] == [1, 2, 3]


async def test_deaths_survive_reports_and_are_kept_in_words(ledger):
    await ledger.claim(BATCH, 0, "a")
    claim = await ledger.claim(BATCH, 0, "b")
    await ledger.progress(claim, "b", Tally(completed=3, cost=30), done=False)
    text = await ledger.client.hget(keys.BATCH_SHARDS.of(BATCH), "0")
    assert re.sub(r"call=[0-9a-f]{8} ", "", text) == (
        "claim=2 state=running by=b died=1 completed=3 failed=0 prompt=0 completion=0 cost=30"
    )
    await ledger.hand_back(claim, "b")
    await ledger.progress(claim, "b", Tally(completed=4), done=False)  # the last report comes late
    assert await died(ledger) == Past(died=1)


async def test_a_claim_that_was_fenced_and_lives_has_not_died(ledger):
    slow = await ledger.claim(BATCH, 0, "slow")
    new = await ledger.claim(BATCH, 0, "new")
    assert new.past == Past(died=1)
    for _ in range(2):
        assert not await ledger.hand_back(slow, "slow")
    await ledger.note_group(new, "new", range(4, 5))
    newest = await ledger.claim(BATCH, 0, "newest")
    assert newest.past == Past(died=1, group=range(4, 5), alone=1)
    await ledger.hand_back(new, "new")
    assert await died(ledger) == Past(died=1, group=range(4, 5))  # the newest, which nobody handed back


async def test_a_death_counts_against_a_line_only_if_the_same_claim_had_noted_it_alone(ledger):
    await ledger.note_group(await ledger.claim(BATCH, 0, "a"), "a", range(7, 8))
    before = await ledger.claim(BATCH, 0, "b")
    assert before.past == Past(died=1, group=range(7, 8), alone=1)
    again = await ledger.claim(BATCH, 0, "c")  # died before it noted anything
    assert again.past == Past(died=2, group=range(7, 8), alone=1)
    await ledger.note_group(again, "c", range(7, 8))
    last = await ledger.claim(BATCH, 0, "d")
    assert last.past == Past(died=3, group=range(7, 8), alone=2)
    await ledger.note_group(last, "d", range(8, 20))
    assert await died(ledger) == Past(died=4, group=range(8, 20))


async def test_a_fenced_claim_notes_nothing(ledger):
    old = await ledger.claim(BATCH, 0, "a")
    await ledger.claim(BATCH, 0, "b")
    with pytest.raises(Fenced):
        await ledger.note_group(old, "a", range(3))


async def test_only_the_last_deaths_are_kept(ledger):
    for _ in range(30):
        await ledger.claim(BATCH, 0, "a")
    assert (await ledger.claim(BATCH, 0, "b")).past.died == 8


async def test_a_shard_that_is_reopened_has_no_claim_that_died(ledger):
    claim = await ledger.claim(BATCH, 0, "a")
    await ledger.progress(claim, "a", Tally(completed=10), done=True)
    assert await died(ledger) == Past()
    await ledger.reopen(BATCH, [0])
    assert await died(ledger) == Past()


async def test_a_batch_that_is_gone_is_not_brought_back_by_a_hand_back(ledger):
    claim = await ledger.claim(BATCH, 0, "a")
    await ledger.forget(BATCH)
    assert not await ledger.hand_back(claim, "a")
    with pytest.raises(Fenced):
        await ledger.note_group(claim, "a", range(3))
    assert await ledger.client.exists(keys.BATCH_SHARDS.of(BATCH)) == 0


async def test_a_batch_moves_only_from_where_it_may(ledger):
    among = [BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING]
    assert await ledger.move(BATCH, "finalizing", among=among) == "finalizing"
    assert await ledger.move(BATCH, "cancelling", among=["in_progress"]) == "finalizing"
    assert await ledger.move("batch_unknown", "cancelled", among=["in_progress"]) == ""
    entry = await ledger.entry(BATCH)
    assert (entry.status, "cancelling_at" in entry.fields) == ("finalizing", False)
    assert float(entry.fields["finalizing_at"]) <= await ledger.now()


async def test_a_batch_that_was_forgotten_is_not_brought_back_by_who_still_runs_it(ledger):
    claim = await ledger.claim(BATCH, 0, "a")
    await ledger.forget(BATCH)
    assert not await ledger.set_fields(BATCH, {"trouble": "disk is full"})
    with pytest.raises(Fenced):
        await ledger.progress(claim, "a", Tally(completed=1), done=True)
    assert await ledger.entry(BATCH) is None
    assert await ledger.entries([BATCH]) == {}
    assert await ledger.client.exists(keys.BATCH.of(BATCH), keys.BATCH_SHARDS.of(BATCH)) == 0


async def test_recent_batches_come_newest_first(ledger):
    await ledger.open("batch_2", 3000.0, FIELDS)
    await ledger.open("batch_0", 500.0, FIELDS)
    assert [entry.id for entry in await ledger.recent(2)] == ["batch_2", BATCH]


SHARDS = st.integers(0, 2)
COUNTS = st.integers(0, 10)


class Reports(RuleBasedStateMachine):
    """Claims and reports in any order, some twice: the batch's sums are those of the standing ones."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = fakeredis.FakeAsyncRedis(decode_responses=True, server=fakeredis.FakeServer())
        self.ledger = Ledger(self.client)
        self.run(self.ledger.open(BATCH, 1.0, FIELDS))
        self.claims: list[Claim] = []
        self.standing: dict[int, int] = {}
        self.counted: dict[int, Tally] = {}
        self.done: set[int] = set()

    def run(self, step):
        return self.loop.run_until_complete(step)

    def teardown(self):
        self.run(self.client.aclose())
        self.loop.close()

    @rule(shard=SHARDS)
    def claim(self, shard):
        claim = self.run(self.ledger.claim(BATCH, shard, "owner"))
        self.claims.append(claim)
        self.standing[shard] = claim.number

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), completed=COUNTS, failed=COUNTS, done=st.booleans(), again=st.booleans())
    def report(self, data, completed, failed, done, again):
        claim = data.draw(st.sampled_from(self.claims))
        tally = Tally(completed, failed, completed * 2, failed * 3, completed + failed)
        for _ in range(1 + again):
            try:
                self.run(self.ledger.progress(claim, "owner", tally, done=done))
            except Fenced:
                assert claim.number < self.standing[claim.shard]
                return
        assert claim.number == self.standing[claim.shard]
        if done or claim.shard not in self.done:
            self.counted[claim.shard] = tally
        if done:
            self.done.add(claim.shard)

    @invariant()
    def sums_are_those_of_the_standing_reports(self):
        entry = self.run(self.ledger.entry(BATCH))
        wanted = replace(Tally(), failed=2)
        for tally in self.counted.values():
            wanted = Tally(
                *(
                    getattr(wanted, name) + getattr(tally, name)
                    for name in ("completed", "failed", "prompt_tokens", "completion_tokens", "cost")
                )
            )
        found = Tally(
            entry.completed, entry.failed, entry.prompt_tokens, entry.completion_tokens, entry.cost_done
        )
        assert found == wanted
        assert entry.shards_done == len(self.done)
        assert self.run(self.ledger.shards_done(BATCH)) == self.done


TestReports = Reports.TestCase
TestReports.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
