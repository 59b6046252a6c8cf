"""A worker's URL has one spelling, and carries no secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.errors import InvalidWorkerUrl
from workers.spec import WorkerSpec, normalise_url, worker_id


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "//", "/v1//"])
@pytest.mark.parametrize("host", ["h", "H", "h.example", "10.0.0.1", "[::1]"])
def test_all_spellings_are_one_worker(host, end):
    assert normalise_url(f" http://{host}:8000{end} ") == f"http://{host.lower()}:8000"


@pytest.mark.parametrize(
    ("given_url", "wanted"),
    [
        ("http://h:80", "http://h"),
        ("https://h:443/v1", "https://h"),
        ("https://h:80", "https://h:80"),
        ("HTTP://h:1", "http://h:1"),
        ("http://h/models/a/v1", "http://h/models/a"),
        ("http://h/v1beta", "http://h/v1beta"),
        ("http://h/xv1", "http://h/xv1"),
        ("http://h/v1/x", "http://h/v1/x"),
    ],
)
def test_default_ports_go_and_other_paths_stay(given_url, wanted):
    assert normalise_url(given_url) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:8000",
        "localhost",
        "ftp://h",
        "unix:///tmp/s",
        "http://",
        "http:///v1",
        "http://h:99999",
        "http://h:port",
        "http://no url at all",
        "http://h?x=1",
        "http://h#x",
        "http://user@h",
    ],
)
def test_what_is_no_server_s_url_is_refused(text):
    with pytest.raises(InvalidWorkerUrl):
        normalise_url(text)


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(InvalidWorkerUrl) as refused:
        normalise_url("http://me:secret@h:1")
    assert "secret" not in str(refused.value)


@given(
    st.sampled_from(["http", "https"]),
    st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z]{2,5})?", fullmatch=True),
    st.integers(1, 65535),
    st.sampled_from(["", "/", "/v1", "/a/v1/", "/v1/v1"]),
)
def test_normalising_twice_is_normalising_once(scheme, host, port, path):
    once = normalise_url(f"{scheme}://{host}:{port}{path}")
    assert normalise_url(once) == once
    assert not once.endswith("/")
    assert worker_id(once) == normalise_url(once).split("://", 1)[1]


def test_a_spec_holds_the_one_spelling_and_names_itself_by_it():
    spec = WorkerSpec(url="http://H:8000/v1/")
    assert (spec.url, spec.id) == ("http://h:8000", "h:8000")


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0},
        {"weight": float("nan")},
        {"weight": 1001},
        {"api_key_env": "sk-123 not a name"},
        {"max_running": 0},
        {"runtime": "abacus"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_impossible_specs_are_refused(wrong):
    with pytest.raises(ValidationError):
        WorkerSpec(url="http://h", **wrong)
