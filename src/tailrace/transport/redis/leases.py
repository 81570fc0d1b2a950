"""Names in Redis that one holder has at a time: each is kept by renewing it, and free again soon after its holder died.

attempt ──► TAKEN    ours from now on, or renewed
        ├─► HELD     by another, who may be dead: try again
        └─► RENEWED  by another, since the attempt before: it lives
"""

from __future__ import annotations

import enum

from tailrace.transport.redis.connection import RedisConnection, raised

RENEWALS = 4
"""In the length of a lease: three of them may come late."""


class Attempt(enum.Enum):
    """What became of one."""

    TAKEN = "taken"
    HELD = "held"
    RENEWED = "renewed"


class Lease:
    """One name, and one who wants it, known by a token. Its calls block: one thread at a time."""

    def __init__(self, connection: RedisConnection, key: str, token: str, length_s: float) -> None:
        self.token, self.length_s = token, length_s
        self.holder = ""
        """Token of the other who had the name at the last attempt; empty where nobody had."""
        self._connection, self._key = connection, key
        self._left_ms = 0

    def attempt(self) -> Attempt:
        """Take the name, or keep it. Raises as `RedisConnection.execute`."""
        length_ms = int(self.length_s * 1000)
        replies = self._connection.execute(
            [("SET", self._key, self.token, "NX", "PX", length_ms), ("GET", self._key), ("PTTL", self._key)]
        )
        taken, holder, left_ms = map(raised, replies)
        if taken is None and holder == self.token.encode():
            taken = self._connection.one("PEXPIRE", self._key, length_ms)
        if taken:
            self.holder, self._left_ms = "", 0
            return Attempt.TAKEN
        assert isinstance(left_ms, int)
        self.holder = holder.decode(errors="replace") if isinstance(holder, bytes) else ""
        before_ms, self._left_ms = self._left_ms, left_ms
        return seen(before_ms, left_ms)

    def give_back(self) -> None:
        """Let go of the name, where it is still ours."""
        if self._connection.one("GET", self._key) == self.token.encode():
            self._connection.one("DEL", self._key)


def seen(before_ms: int, left_ms: int) -> Attempt:
    """What is known of another's lease by what is left of it, now and at the attempt before. A pure decision.

    One that never lapses (-1: set by hand) is not waited for.

    >>> [seen(0, 900).value, seen(900, 700).value, seen(700, 1000).value, seen(0, -1).value]
    ['held', 'held', 'renewed', 'renewed']
    """
    return Attempt.RENEWED if left_ms > before_ms > 0 or left_ms == -1 else Attempt.HELD
