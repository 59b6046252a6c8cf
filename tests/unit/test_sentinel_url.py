"""What a Sentinel URL says, what is refused, and that no password of it is ever shown."""

from __future__ import annotations

import pytest

from workers.connection import connect, connect_sync, public_url
from workers.errors import SettingsError, StoreUnavailable
from workers.sentinel import is_sentinel_url, parse_sentinel_url
from workers.store import FleetStore

FULL = (
    "redis+sentinel://user:p%40ss@one:26380,[::1]:26381,three/fleet/2"
    "?sentinel_username=looker&sentinel_password=secret"
)


def test_a_full_url_names_sentinels_service_database_and_both_kinds_of_credentials():
    seen = parse_sentinel_url(FULL)
    assert seen.sentinels == (("one", 26380), ("::1", 26381), ("three", 26379))
    assert seen.service == "fleet"
    assert seen.master_options == {"db": 2, "username": "user", "password": "p@ss"}
    assert (seen.sentinel_options["username"], seen.sentinel_options["password"]) == ("looker", "secret")
    assert 0 < seen.sentinel_options["socket_timeout"] <= 2


def test_what_is_left_out_is_left_to_the_server():
    seen = parse_sentinel_url("redis+sentinel://one/fleet")
    assert (seen.sentinels, seen.service, seen.master_options) == ((("one", 26379),), "fleet", {"db": 0})
    assert "password" not in seen.sentinel_options


def test_tls_is_for_the_master_and_for_the_sentinels():
    seen = parse_sentinel_url("rediss+sentinel://:key@one/fleet?ssl_ca_certs=/ca.pem")
    for options in (seen.master_options, seen.sentinel_options):
        assert (options["ssl"], options["ssl_ca_certs"]) == (True, "/ca.pem")
    assert seen.master_options["password"] == "key"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis+sentinel://one:26379", "names its service"),
        ("redis+sentinel://one:26379/", "names its service"),
        ("redis+sentinel:///fleet", "host:port"),
        ("redis+sentinel://one,,two/fleet", "host:port"),
        ("redis+sentinel://one:port/fleet", "port"),
        ("redis+sentinel://one/fleet/many", "many"),
        ("redis+sentinel://one/fleet?colour=red", "unknown options of a Sentinel URL: colour"),
    ],
)
def test_an_impossible_url_is_refused_with_the_reason(url, complaint):
    for make in (connect, connect_sync):
        with pytest.raises(SettingsError, match=complaint):
            make(url)


def test_other_urls_are_not_taken_for_one():
    assert is_sentinel_url("REDISS+SENTINEL://one/fleet")
    assert not is_sentinel_url("redis://one,two/0")
    assert not is_sentinel_url("unix:///redis+sentinel")


def test_no_password_is_shown():
    assert public_url(FULL) == (
        "redis+sentinel://user:***@one:26380,[::1]:26381,three/fleet/2"
        "?sentinel_username=looker&sentinel_password=***"
    )
    assert public_url("redis://:secret@one/0") == "redis://:***@one/0"
    assert public_url("redis://one/0?password=secret&db=1") == "redis://one/0?password=***&db=1"


@pytest.mark.parametrize(
    "url",
    ["redis://:se@cret@one/0", "redis://u:se:cret@one", "redis://:se/cret@one/0", "unix://:secret@/a@b.sock",
     "redis://one/0?PASSWORD=secret", "rediss://one/0?ssl_password=secret&db=1"],
)  # fmt: skip
def test_no_part_of_a_password_is_shown_however_it_is_written(url):
    assert "cret" not in public_url(url)
    assert "se" not in public_url(url).partition("//")[2].replace("password", "")
    with pytest.raises(SettingsError) as refused:
        connect("redis+sentinel://:secret@one/fleet?sentinel_password=hidden&colour=red")
    assert "secret" not in str(refused.value)
    assert "hidden" not in str(refused.value)


async def test_sentinels_that_do_not_answer_are_an_outage_whose_message_shows_no_password():
    nobody = "redis+sentinel://:secret@127.0.0.1:1,127.0.0.1:2/fleet?sentinel_password=hidden"
    client = connect(nobody)
    with pytest.raises(StoreUnavailable, match="No master found for 'fleet'") as failed:
        await FleetStore(client).now()
    await client.aclose()
    told = f"{failed.value} {failed.value.__cause__!r} {parse_sentinel_url(nobody)!r} {client!r}"
    assert "secret" not in told
    assert "hidden" not in told
