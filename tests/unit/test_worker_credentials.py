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


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_part_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("\ufeffsk-1\n", encoding="utf-8")
    assert read_key(None, str(file), {}) == "sk-1"


@pytest.mark.parametrize(
    "key", ["\u201csk-1\u201d", "\ufeffsk-1", "sk\u00a01", "sk-\u00e9", "sk-1\r\nX: 1", "sk\0-1", "sk\t1"]
)
def test_a_key_that_no_header_can_carry_is_an_error_that_says_where_it_stands_and_not_what_it_is(
    tmp_path: Path, key: str
) -> None:
    file = tmp_path / "key"
    file.write_text(f"-{key}", encoding="utf-8")
    for variable, path, source in (
        ("KEY", None, "environment variable KEY"),
        (None, str(file), f"key file {file}"),
    ):
        with pytest.raises(MissingKeyError, match=f"{source} holds more than a key") as error:
            read_key(variable, path, {"KEY": f"-{key}"})
        assert "sk" not in str(error.value)
        assert error.value.__cause__ is None
        assert key_if_there(variable, path, {"KEY": f"-{key}"}) is None


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
