"""Redis' replies off a socket: whatever pieces they come in, they are what was sent, or an error of the connection."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("redis")

from redis.exceptions import ConnectionError as Gone
from redis.exceptions import InvalidResponse, OutOfMemoryError, RedisError, ResponseError

from tailrace.transport.redis.connection import Reply
from tailrace.transport.redis.replies import ReplyParser

LONG = 200_000
"""Bytes of a value that is not read ahead."""
VALUES = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=50) | st.sampled_from([b"x" * LONG, b"\r\n" * 9]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def encoded(value: Reply) -> bytes:
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(value), value)
        case list():
            return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))
    raise AssertionError(value)


@contextmanager
def parser_of(pieces: Sequence[bytes]) -> Iterator[ReplyParser]:
    """Of a socket that these come through, and nothing more."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(OSError):  # the parser has seen enough
            for piece in pieces:
                theirs.sendall(piece)
        theirs.close()

    sending = threading.Thread(target=send)
    sending.start()
    parser = ReplyParser(socket_read_size=1)
    parser.on_connect(SimpleNamespace(_sock=ours, socket_timeout=None))  # type: ignore[arg-type]
    try:
        yield parser
    finally:
        parser.on_disconnect()
        ours.close()
        sending.join()


@given(values=st.lists(VALUES, min_size=1, max_size=4), cuts=st.lists(st.integers(0, 3 * LONG), max_size=6))
def test_replies_are_what_was_sent_in_whatever_pieces(values: list[Reply], cuts: list[int]) -> None:
    content = b"".join(map(encoded, values))
    bounds = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    with parser_of([content[start:end] for start, end in pairwise(bounds)]) as parser:
        assert [parser.read_response(timeout=10.0) for _ in values] == values
        with pytest.raises(Gone):
            parser.read_response()


def test_an_error_is_a_reply_and_one_of_the_connection_is_raised() -> None:
    with parser_of([b"*2\r\n-ERR no\r\n+OK\r\n-OOM command not allowed\r\n-LOADING the data\r\n"]) as parser:
        first, second = parser.read_response()  # type: ignore[misc]
        assert isinstance(first, ResponseError)
        assert second == b"OK"
        assert isinstance(parser.read_response(), OutOfMemoryError)
        with pytest.raises(Gone, match="the data"):
            parser.read_response()


def test_a_reply_that_does_not_come_is_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parser = ReplyParser(socket_read_size=1)
        parser.on_connect(SimpleNamespace(_sock=ours, socket_timeout=None))  # type: ignore[arg-type]
        theirs.sendall(b"$5\r\nabc")
        with pytest.raises(TimeoutError):
            parser.read_response(timeout=0.01)


@pytest.mark.parametrize(
    "content",
    [b"?\r\n", b"$-2\r\n", b"$x\r\n", b"$99999999999999\r\n", b":\r\n", b"*x\r\n", b"*1\r\n" * 5000, b"+" * 200_000],
    ids=lambda content: str(content[:20]),
)
def test_what_is_no_reply_is_told(content: bytes) -> None:
    with parser_of([content]) as parser, pytest.raises(InvalidResponse):
        parser.read_response()


def test_only_errors_of_the_connection_leave_it() -> None:
    draw = random.Random(0)
    valid = encoded([b"abc", 5, None, [b"x" * 100, b""]])
    for _ in range(500):
        content = bytearray(valid)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        with parser_of([bytes(content)]) as parser, suppress(RedisError):
            parser.read_response()
