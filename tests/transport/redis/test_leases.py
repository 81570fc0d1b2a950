"""Promises of names: one holder at a time, for as long as it renews."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tailrace.transport.redis.connection import RedisConnection
from tailrace.transport.redis.leases import Attempt, Lease
from tailrace.transport.redis.server import RedisServer
from tests.support.redis_servers import ask, needs_redis

pytestmark = needs_redis

Want = Callable[..., Lease]


@pytest.fixture
def want(server: RedisServer) -> Iterator[Want]:
    """Makes one who wants the name, known by this token."""
    with contextlib.closing(RedisConnection(server.url)) as connection:
        yield lambda token, length_s=60.0: Lease(connection, "name", token, length_s)


def test_a_name_is_held_by_one(want: Want) -> None:
    one, another = want("one"), want("another")
    assert one.attempt() is Attempt.TAKEN
    assert another.attempt() is Attempt.HELD
    assert another.holder == "one"
    assert one.attempt() is Attempt.TAKEN


def test_who_wants_a_name_is_told_that_its_holder_renewed_it(server: RedisServer, want: Want) -> None:
    one, another = want("one"), want("another")
    one.attempt()
    ask(server, "PEXPIRE", "name", "50000")
    assert [another.attempt(), another.attempt()] == [Attempt.HELD, Attempt.HELD]
    one.attempt()
    assert another.attempt() is Attempt.RENEWED


def test_a_name_that_was_not_renewed_is_free(server: RedisServer, want: Want) -> None:
    another = want("another")
    want("one").attempt()
    assert another.attempt() is Attempt.HELD
    ask(server, "PEXPIRE", "name", "1")
    while (attempt := another.attempt()) is not Attempt.TAKEN:
        assert attempt is Attempt.HELD


def test_a_name_that_never_lapses_is_not_waited_for(server: RedisServer, want: Want) -> None:
    ask(server, "SET", "name", "by hand")
    assert want("one").attempt() is Attempt.RENEWED


def test_a_name_is_given_back_by_its_holder_alone(server: RedisServer, want: Want) -> None:
    one, another = want("one"), want("another")
    one.attempt()
    another.give_back()
    assert ask(server, "GET", "name") == b"one"
    one.give_back()
    assert ask(server, "GET", "name") is None
