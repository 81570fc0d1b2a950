"""Clients that rewrite their system messages at every turn: the conversation keeps those that it began with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec
import xxhash

from tailrace.records import Message, ToolSpec
from tailrace.rollouts.chat.conversations import has_reply, same_reply


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
        self._begun: dict[bytes, list[tuple[Message, list[list[Message]]]]] = {}
        """First replies, each with the system messages that it was given under, by the first other message and the
        tools."""

    def keep(self, messages: list[Message], tools: Sequence[ToolSpec] | None, reply: Message) -> None:
        """Remember the system messages of a conversation whose first reply this may be."""
        leading, rest = _parted([*messages, reply])
        known = self._known(rest, tools)
        if leading not in known:
            known.append(leading)

    def restored(self, messages: list[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        """The messages, beginning with the system messages that their conversation began with.

        One without a reply begins here, with its own.
        """
        leading, rest = _parted(messages)
        if not has_reply(rest):
            return messages
        known = self._known(rest, tools)
        if not known:
            known.append(leading)
        return messages if leading in known else [*known[0], *rest]

    def _known(self, rest: list[Message], tools: Sequence[ToolSpec] | None) -> list[list[Message]]:
        """The system messages of conversations that begin like this one, which has a reply."""
        names = [tool["name"] for tool in tools or ()]
        begun = self._begun.setdefault(xxhash.xxh3_128_digest(msgspec.json.encode((rest[0], names))), [])
        reply = next(message for message in rest if message["role"] == "assistant")
        for earlier, known in begun:
            if same_reply(earlier, reply):
                return known
        begun.append((reply, []))
        return begun[-1][1]


def _parted(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system messages that they begin with, and the rest."""
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    return leading, messages[len(leading) :]
