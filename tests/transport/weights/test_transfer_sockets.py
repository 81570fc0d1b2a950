"""Connections by which generators of other hosts ask for weights."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.errors import CorruptData, TransportError
from tailrace.transport.weights import transfer_sockets
from tailrace.transport.weights.transfer_sockets import TransferListener, TransferPlace, connect

DEADLINE_S = 30.0
PLACE = TransferPlace(Path("nowhere"), "127.0.0.1", b"the run's key")


@pytest.fixture
def listener() -> Iterator[TransferListener]:
    listener = TransferListener(PLACE)
    yield listener
    listener.close()
    listener.close()


class Admitted:
    """What becomes of connections, one after the other."""

    def __init__(self, listener: TransferListener) -> None:
        self.errors: list[TransportError] = []
        self._listener = listener
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self) -> None:
        while (connection := self._listener.accept()) is not None:
            try:
                self._listener.admit(connection)
                connection.send_bytes(connection.recv_bytes()[::-1])
            except TransportError as error:
                self.errors.append(error)


def test_holders_of_the_key_are_let_in_and_nobody_else(listener: TransferListener) -> None:
    admitted = Admitted(listener)
    for key in (b"another", b""):
        with pytest.raises(TransportError, match=r"does not hold the run's key|weights are not offered"):
            connect(replace(PLACE, key=key), listener.uri)
    with closing(connect(PLACE, listener.uri)) as connection:
        connection.send_bytes(b"abc")
        assert connection.recv_bytes() == b"cba"
    listener.close()
    admitted.thread.join(DEADLINE_S)
    assert len(admitted.errors) == 2


def test_one_that_says_nothing_is_shut_out_after_a_deadline(
    listener: TransferListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_sockets, "_GREETING_S", 1)
    host, _, port = listener.uri.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.settimeout(DEADLINE_S)
        connection = listener.accept()
        assert connection is not None
        with pytest.raises(TransportError, match="does not hold the run's key"):
            listener.admit(connection)
        while silent.recv(1024):
            pass  # the challenge, and then the end


def test_a_host_that_falls_silent_after_it_was_let_in_is_noticed_by_the_system(listener: TransferListener) -> None:
    admitted = Admitted(listener)
    with closing(connect(PLACE, listener.uri)) as connection:
        with socket.socket(fileno=connection.fileno()) as one:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s, every_s, probes = (
                one.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            one.detach()
        assert idle_s + every_s * probes <= 15
        connection.send_bytes(b"a")
        assert connection.recv_bytes() == b"a"
    listener.close()
    admitted.thread.join(DEADLINE_S)
    assert not admitted.errors


@pytest.mark.parametrize(
    "uri", ["", "../elsewhere", "a/b", "a\nb", "tcp://", "tcp://host", "tcp://host:x", "tcp://h:70000"]
)
def test_what_names_no_place_is_refused(uri: str) -> None:
    with pytest.raises(CorruptData, match="a model state dict's reference names no"):
        connect(PLACE, uri)


def test_an_address_that_is_none_here_says_so() -> None:
    with pytest.raises(TransportError, match=r"weights cannot be offered at 192\.0\.2\.1"):
        TransferListener(replace(PLACE, host="192.0.2.1"))


def test_nobody_is_there() -> None:
    listener = TransferListener(PLACE)
    listener.close()
    with pytest.raises(TransportError, match=r"weights are not offered at tcp://127\.0\.0\.1"):
        connect(PLACE, listener.uri)


def test_a_key_is_not_shown() -> None:
    assert "the run's key" not in repr(PLACE)
