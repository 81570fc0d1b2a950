"""Clients that rewrite their system messages at every turn: the conversation keeps those that it began with."""

from __future__ import annotations

from itertools import takewhile

import msgspec
import xxhash

from tailrace.records import Message


class FirstSystemMessages:
    """Those of the conversations of one rollout, which are told apart by their first other message.

    >>> firsts = FirstSystemMessages()
    >>> question = {"role": "user", "content": "who?"}
    >>> firsts.restored([{"role": "system", "content": "It is 9:00."}, question])[0]["content"]
    'It is 9:00.'
    >>> firsts.restored([{"role": "system", "content": "It is 9:01."}, question])[0]["content"]
    'It is 9:00.'
    """

    def __init__(self) -> None:
        self._firsts: dict[bytes, list[Message]] = {}

    def restored(self, messages: list[Message]) -> list[Message]:
        """The messages, beginning with the system messages of the first request of their conversation."""
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        rest = messages[len(leading) :]
        if not rest:
            return messages
        key = xxhash.xxh3_128_digest(msgspec.json.encode(rest[0]))
        return [*self._firsts.setdefault(key, leading), *rest]
