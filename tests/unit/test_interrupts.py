"""Signals as wishes: the first stops in order, later ones hurry, and what is ignored stays so."""

from __future__ import annotations

import os
import signal

import pytest

from forebay.interrupts import Interrupts


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def number(request):
    """A signal, handled after the test as it was before."""
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_the_first_signal_stops_and_every_later_one_hurries(number):
    hurried = []
    with Interrupts() as interrupts:
        interrupts.on_hurry = lambda: hurried.append(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert len(hurried) == 2


def test_what_was_to_be_ignored_is_ignored_still(number):
    """As SIGHUP is under nohup, and SIGINT of what a script starts in the background."""
    signal.signal(number, signal.SIG_IGN)
    with Interrupts() as interrupts:
        interrupts.on_hurry = pytest.fail
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN


def test_afterwards_signals_mean_what_they_meant_before(number):
    signal.signal(number, signal.SIG_DFL)
    with Interrupts():
        assert signal.getsignal(number) is not signal.SIG_DFL
    assert signal.getsignal(number) is signal.SIG_DFL
