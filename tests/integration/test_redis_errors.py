"""What a real server refuses, and which of it passes: only that is waited out."""

from __future__ import annotations

import pytest
from redis.exceptions import DataError, ResponseError

from workers.connection import connect_sync, translated
from workers.errors import StoreUnavailable

pytestmark = pytest.mark.integration


@pytest.fixture
def connection(redis_url):
    client = connect_sync(redis_url)
    yield client
    client.close()


def plainly(connection):
    connection.set("key", "value")


def in_a_script(connection):
    connection.eval("return redis.call('SET', KEYS[1], 'value')", 1, "key")


def in_a_transaction(connection):
    with connection.pipeline() as pipeline:
        pipeline.set("key", "value")
        pipeline.execute()


WAYS = pytest.mark.parametrize("write", [plainly, in_a_script, in_a_transaction])


@WAYS
def test_a_full_server_passes(connection, write):
    connection.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailable), translated():
            write(connection)
    finally:
        connection.config_set("maxmemory", "0")


@WAYS
def test_a_server_without_its_replicas_passes(connection, write):
    connection.config_set("min-replicas-to-write", "1")
    try:
        with pytest.raises(StoreUnavailable), translated():
            write(connection)
    finally:
        connection.config_set("min-replicas-to-write", "0")


@pytest.mark.parametrize(
    "said",
    [
        "MISCONF Redis is configured to save RDB snapshots",
        "Command # 1 (HSET key) of pipeline caused error: MISCONF Redis is configured to save",
        "Command # 1 (HSET key) of pipeline caused error: ('NOREPLICAS Not enough good replicas to write.',)",
        "Error running script (call to f_1): @user_script:1: -MISCONF Redis is configured to save",
    ],
)
def test_what_passes_is_known_whatever_stands_before_it(said):
    with pytest.raises(StoreUnavailable), translated():
        raise ResponseError(said)


def test_words_of_ours_are_no_words_of_the_server():
    with pytest.raises(ResponseError), translated():
        raise ResponseError("the key is called MISCONF and so on")


@WAYS
def test_a_replica_that_was_a_master_passes(connection, write):
    connection.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable), translated():
            write(connection)
    finally:
        connection.replicaof("NO", "ONE")


def test_a_mistake_of_ours_does_not_pass(connection):
    connection.set("text", "value")
    with pytest.raises(ResponseError, match="WRONGTYPE"), translated():
        connection.lpush("text", "value")
    with pytest.raises(DataError), translated():
        connection.set("text", None)
