"""A dispatcher's metrics page: where it is served, and to whom."""

from __future__ import annotations

import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from dispatcher.exporter import Exporter
from dispatcher.settings import DispatcherSettings


@pytest.fixture
def exporter():
    hedging = SimpleNamespace(made=3)
    return Exporter("d1", SimpleNamespace(in_flight=1, waiting=2, without_worker=None, hedging=hedging))


def page(host, port):
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as response:
        return response.read().decode()


def test_the_page_is_served_at_the_address_that_is_set_and_at_no_other(exporter):
    with exporter.serving(0, "127.0.0.2") as port:
        assert "forebay_second_attempts_total 3.0" in page("127.0.0.2", port)
        with pytest.raises(urllib.error.URLError, match="refused"):
            page("127.0.0.1", port)
    with pytest.raises(urllib.error.URLError, match="refused"):
        page("127.0.0.2", port)


def test_without_a_port_there_is_no_page(exporter):
    with exporter.serving(None, "127.0.0.1") as port:
        assert port is None


def test_only_this_machine_may_ask_unless_it_is_said():
    assert DispatcherSettings().metrics_host == "127.0.0.1"
