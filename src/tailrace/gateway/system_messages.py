"""Clients that rewrite their system messages at every turn: the conversation keeps those that it began with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec
import xxhash

from tailrace.records import Message, ToolSpec
from tailrace.rollouts.chat.conversations import same_reply


class FirstSystemMessages:
    """Those of the conversations of one rollout, told apart by their first other message, first reply and tools.

    Agents of one rollout may ask the same, each under system messages of its own.

    >>> firsts = FirstSystemMessages()
    >>> question, reply = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ada"}
    >>> firsts.keep([{"role": "system", "content": "It is 9:00."}, question], None, reply)
    >>> firsts.restored([{"role": "system", "content": "It is 9:01."}, question, reply], None)[0]["content"]
    'It is 9:00.'
    """

    def __init__(self) -> None:
        self._begun: dict[bytes, list[tuple[Message, list[Message]]]] = {}
        """First replies and system messages, by the first other message and the tools."""

    def keep(self, messages: list[Message], tools: Sequence[ToolSpec] | None, reply: Message) -> None:
        """Remember the system messages of a conversation whose first reply this may be."""
        self.restored([*messages, reply], tools)

    def restored(self, messages: list[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        """The messages, beginning with the system messages that their conversation began with.

        One without a reply begins here, with its own.
        """
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        rest = messages[len(leading) :]
        reply = next((message for message in rest if message["role"] == "assistant"), None)
        if reply is None:
            return messages
        names = [tool["name"] for tool in tools or ()]
        begun = self._begun.setdefault(xxhash.xxh3_128_digest(msgspec.json.encode((rest[0], names))), [])
        known = [first for earlier, first in begun if same_reply(earlier, reply)]
        if not known:
            begun.append((reply, leading))
        return messages if leading in known or not known else [*known[0], *rest]
