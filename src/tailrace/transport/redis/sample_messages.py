"""What the orchestrator and a rank of an outside trainer tell each other over Redis, and under which keys.

    tailrace:RUN:samples:open         who looks for a run finds it here: epoch, schema, lease; gone when the run is
    tailrace:RUN:samples:name:NAME    the token of the rank that has this name, for as long as it renews it
    tailrace:RUN:samples:joins        stream: ranks that want to be let in
    tailrace:RUN:samples:TOKEN:down   stream, the orchestrator's: welcome, samples, stop, closed
    tailrace:RUN:samples:TOKEN:up     stream, the rank's: hello, pull, report, left
    tailrace:RUN:samples:TOKEN:heard  number of the last message of `up` that was heard

A sample goes down one stream, so one rank alone has it, whatever Redis forgets. A token is of one life of a rank: one
that comes back has streams of its own, in which nothing of its last life lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

WELCOME, SAMPLES, STOP, CLOSED = "welcome", "samples", "stop", "closed"
"""Kinds of messages down: nothing, a document of the codec, a `StopRequested`, a reason."""
HELLO, PULL, REPORT, LEFT = "hello", "pull", "report", "left"
"""Kinds of messages up: nothing, a `Pull`, a `ConsumerReport`, nothing."""


class OpenFeed(msgspec.Struct, frozen=True):
    """A run that feeds an outside trainer."""

    schema: int
    """Of its samples."""
    epoch: str
    lease_s: float
    """Who says nothing for so long, on either side, counts as gone."""


class Join(msgspec.Struct, frozen=True):
    """A rank wants to be let in."""

    name: str
    token: str


class Pull(msgspec.Struct, frozen=True):
    """A rank has room for so many more samples."""

    count: int
    seen: int
    """Number of the last message that it read."""
    ignored: int = 0
    """Entries of another run or epoch that it passed over, in all."""


@dataclass(frozen=True, slots=True)
class FeedKeys:
    """Where everything of a run's feed lies.

    >>> FeedKeys("tailrace", "quickstart").name("trainer")
    'tailrace:quickstart:samples:name:trainer'
    """

    prefix: str
    run: str

    @property
    def open(self) -> str:
        """Where the run says that it is there."""
        return self._key("open")

    @property
    def joins(self) -> str:
        """Where ranks ask to be let in."""
        return self._key("joins")

    def name(self, name: str) -> str:
        """Who has this name."""
        return self._key(f"name:{name}")

    def down(self, token: str) -> str:
        """To a rank."""
        return self._key(f"{token}:down")

    def up(self, token: str) -> str:
        """From a rank."""
        return self._key(f"{token}:up")

    def heard(self, token: str) -> str:
        """What was heard of a rank."""
        return self._key(f"{token}:heard")

    def _key(self, what: str) -> str:
        return f"{self.prefix}:{self.run}:samples:{what}"
