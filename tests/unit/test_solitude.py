"""Sending together or alone: whoever is alone really is, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.solitude import Solitude


class Gate:
    """Sends that begin and end when told, and who was sending when."""

    def __init__(self):
        self.solitude = Solitude()
        self.sending = set()
        self.let_go = {}

    def begin(self, name, *, alone=None):
        self.let_go[name] = asyncio.Event()
        return asyncio.create_task(self._send(name, alone))

    async def _send(self, name, alone):
        async with self.solitude.sending(alone):
            self.sending.add(name)
            try:
                await self.let_go[name].wait()
            finally:
                self.sending.discard(name)


async def settled():
    """Everything that can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def gate():
    return Gate()


async def nothing():
    return None


async def test_requests_are_sent_beside_each_other(gate):
    tasks = [gate.begin(name) for name in "abc"]
    await settled()
    assert gate.sending == set("abc")
    for name in "abc":
        gate.let_go[name].set()
    await asyncio.gather(*tasks)


async def test_one_that_wants_to_be_alone_waits_for_those_and_goes_before_these(gate):
    noted = []

    async def note():
        noted.append(set(gate.sending))

    early = gate.begin("early")
    await settled()
    lone = gate.begin("lone", alone=note)
    await settled()
    late = gate.begin("late")
    await settled()
    assert (gate.sending, noted) == ({"early"}, [])
    gate.let_go["early"].set()
    await settled()
    assert (gate.sending, noted) == ({"lone"}, [set()])
    gate.let_go["lone"].set()
    await settled()
    assert gate.sending == {"late"}
    gate.let_go["late"].set()
    await asyncio.gather(early, lone, late)


async def test_two_that_want_to_be_alone_go_one_after_the_other(gate):
    tasks = [gate.begin(name, alone=nothing) for name in "ab"]
    await settled()
    assert gate.sending == {"a"}
    gate.let_go["a"].set()
    await settled()
    assert gate.sending == {"b"}
    gate.let_go["b"].set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("waits", [True, False])
async def test_one_that_is_called_off_lets_the_others_go_on(gate, waits):
    early = gate.begin("early")
    await settled()
    lone = gate.begin("lone", alone=nothing)
    if not waits:
        gate.let_go["early"].set()
    await settled()
    late = gate.begin("late")
    await settled()
    assert gate.sending == {"early" if waits else "lone"}
    lone.cancel()
    await settled()
    assert gate.sending - {"early"} == {"late"}
    for name in ("early", "late"):
        gate.let_go[name].set()
    await asyncio.gather(early, late)


async def test_nothing_is_sent_when_what_comes_before_fails(gate):
    async def refuse():
        raise LookupError

    with pytest.raises(LookupError):
        await gate.begin("lone", alone=refuse)
    other = gate.begin("other")
    await settled()
    assert gate.sending == {"other"}
    gate.let_go["other"].set()
    await other
