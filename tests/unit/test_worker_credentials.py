"""A worker's key comes from a variable or a file, read at every use, and is never invented."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from workers.credentials import MissingKeyError, key_if_there, read_key
from workers.spec import WorkerSpec


def test_without_a_name_there_is_no_key() -> None:
    assert read_key(None, None, {"KEY": "k"}) is None


def test_a_variable_is_read_without_the_space_around_it() -> None:
    assert read_key("KEY", None, {"KEY": " k\n"}) == "k"


def test_a_file_is_read_anew_at_every_use(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first\n", encoding="utf-8")
    assert read_key(None, str(file), {}) == "first"
    file.write_text("second", encoding="utf-8")
    assert read_key(None, str(file), {}) == "second"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe\x00"])
def test_a_file_without_a_key_is_an_error_that_names_the_file_only(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(MissingKeyError, match=f"key file {file}"):
        read_key(None, str(file), {})
    assert key_if_there(None, str(file), {}) is None


@pytest.mark.parametrize("environ", [{}, {"KEY": ""}, {"KEY": "  "}])
def test_a_variable_without_a_key_is_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(MissingKeyError, match="KEY is not set"):
        read_key("KEY", None, environ)
    assert key_if_there("KEY", None, environ) is None


@pytest.mark.parametrize("file", ["relative/key", "/", "/keys/", "/two\nlines", ""])
def test_a_key_file_is_named_by_its_absolute_path(file: str) -> None:
    with pytest.raises(ValidationError):
        WorkerSpec(url="http://h:1", api_key_file=file)


def test_a_worker_has_one_key() -> None:
    with pytest.raises(ValidationError, match="not both"):
        WorkerSpec(url="http://h:1", api_key_file="/run/key", api_key_env="KEY")
