"""Which branch a conversation extends: a pure comparison of messages, no tokens.

exact        the message came back as it was handed out, whatever name the agent gave it
realigned    it came back changed in form only (outer whitespace, reasoning left out, arguments as a
             JSON string, characters that decoding had replaced): the sampled tokens stand
different    the agent rewrote it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.records import Branch, FirstReply, Int32Array, Json, Message, ToolSpec

_REPLACEMENT = "\ufffd"


@dataclass(slots=True, eq=False)
class Turn:
    """One reply of a branch: where it ends, in messages and in tokens."""

    num_messages: int
    """Messages of the conversation up to and with the reply."""
    start_token: int
    end_token: int
    drifted: bool
    """Its text would be tokenized otherwise than it was sampled."""


@dataclass(slots=True, eq=False)
class BranchConversation:
    """A branch, and the conversation that it holds."""

    index: int
    """The branch's place in its rollout, among those that were demonstrated too."""
    branch: Branch
    tools: Sequence[ToolSpec] | None
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    first_reply: FirstReply | None = None
    """Of the conversation, wherever it was sampled; None before there is one."""
    sampled_texts: dict[int, str] = field(default_factory=dict)
    """See `Rollout.sampled_texts`."""
    is_waiting: bool = False
    """A completion is being sampled; nothing else may extend it meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a turn goes on."""

    conversation: BranchConversation
    context: Int32Array  # [num_tokens]
    """What it adds to the branch."""
    messages: Sequence[Message]
    """The whole conversation."""
    counts: Mapping[str, float]
    """What it adds to the rollout's metrics."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedTurn:
    """A turn that waits for its reply: what it will add to its branch, and nothing until then."""

    conversation: BranchConversation
    context: Int32Array  # [num_tokens]
    messages: list[Message]
    """Those since the reply before."""

    @property
    def prompt_token_ids(self) -> Int32Array:
        """What is sampled after: [num_tokens], the branch with the context behind it."""
        before = self.conversation.branch.token_ids
        return np.concatenate([before, self.context]) if len(before) else self.context

    @property
    def brings_tool_output(self) -> bool:
        """Whether its context is what tools answered to the turn before."""
        return bool(self.conversation.turns) and any(message["role"] == "tool" for message in self.messages)


@dataclass(frozen=True, slots=True)
class Match:
    """A conversation goes on from `turn` of a branch."""

    conversation: BranchConversation
    turn: Turn
    realigned: bool
    """The reply came back changed in form, or would be tokenized otherwise; the sampled tokens stand."""

    @property
    def is_tip(self) -> bool:
        """Whether the branch ends with this reply and is free, so that it can be extended; else it must be forked."""
        seen = self.conversation
        return not seen.is_waiting and seen.branch.num_tokens == self.turn.end_token


def longest_match(
    conversations: Sequence[BranchConversation], messages: Sequence[Message], tools: Sequence[ToolSpec] | None
) -> Match | None:
    """The latest reply, of all branches, up to which `messages` are the same conversation."""
    best: Match | None = None
    for conversation in conversations:
        if not conversation.turns or (conversation.tools or None) != (tools or None):
            continue
        same, realigned_at = _common(conversation, messages)
        for turn in reversed(conversation.turns):
            if turn.num_messages <= same:
                match = Match(conversation, turn, turn.drifted or turn.num_messages - 1 in realigned_at)
                if best is None or _rank(match) > _rank(best):
                    best = match
                break
    return best


def longest_prefix(conversations: Sequence[BranchConversation], token_ids: Int32Array) -> Match | None:
    """The latest reply, of all branches, up to which `token_ids` [num_tokens] are the same tokens."""
    best: Match | None = None
    for conversation in conversations:
        for turn in reversed(conversation.turns):
            end = turn.end_token
            if end <= len(token_ids) and np.array_equal(conversation.branch.token_ids[:end], token_ids[:end]):
                match = Match(conversation, turn, realigned=False)
                if best is None or (end, match.is_tip) > (best.turn.end_token, best.is_tip):
                    best = match
                break
    return best


def first_reply_place(conversations: Sequence[BranchConversation], messages: Sequence[Message]) -> int:
    """How many of the `messages` that begin a branch were given to the policy before its first reply among them.

    A branch may begin with the replies of others, by a fork, or where it could not go on with their tokens. All of the
    messages, where none of the `conversations` begins like that.
    """
    shared = (
        first.message
        for conversation in conversations
        if (first := conversation.first_reply) is not None and first.message < _common(conversation, messages)[0]
    )
    return min(shared, default=len(messages))


def sampled_texts(conversations: Sequence[BranchConversation], messages: Sequence[Message]) -> dict[int, str]:
    """Those of the policy's replies among the `messages` that begin a branch: see `first_reply_place`."""
    known: dict[int, str] = {}
    for conversation in conversations:
        if conversation.sampled_texts:
            same = _common(conversation, messages)[0]
            known.update({place: text for place, text in conversation.sampled_texts.items() if place < same})
    return known


def _rank(match: Match) -> tuple[int, bool]:
    return (match.turn.num_messages, match.is_tip)


def _common(conversation: BranchConversation, messages: Sequence[Message]) -> tuple[int, list[int]]:
    """How many first messages are the same, and at which of them only the form differs."""
    replies = {turn.num_messages - 1 for turn in conversation.turns}
    realigned: list[int] = []
    for position, (seen, given) in enumerate(zip(conversation.messages, messages, strict=False)):
        if seen is given or seen == given:
            continue
        if position not in replies or not same_reply(seen, given):
            return position, realigned
        if _unnamed(seen) != _unnamed(given):
            realigned.append(position)
    return min(len(conversation.messages), len(messages)), realigned


def _unnamed(message: Message) -> dict[str, object]:
    return {key: value for key, value in message.items() if key != "name"}


def same_reply(ours: Message, theirs: Message) -> bool:
    """Whether an assistant's message says what we handed out, form aside."""
    if theirs["role"] != "assistant":
        return False
    if not _same_text(ours.get("content"), theirs.get("content")):
        return False
    reasoning = theirs.get("reasoning_content")
    if reasoning and not _same_text(ours.get("reasoning_content"), reasoning):
        return False
    return _calls(ours) == _calls(theirs)


def _same_text(ours: str | None, theirs: str | None) -> bool:
    mine, yours = (ours or "").strip(), (theirs or "").strip()
    return mine == yours or mine.replace(_REPLACEMENT, "") == yours.replace(_REPLACEMENT, "")


def _calls(message: Message) -> list[tuple[str, Json]]:
    """Name and arguments of each tool call, arguments as objects."""
    calls: list[tuple[str, Json]] = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {"": arguments}
        calls.append((call["function"]["name"], arguments))
    return calls


def has_reply(messages: Sequence[Message]) -> bool:
    """Whether one of them is the policy's."""
    return any(message["role"] == "assistant" for message in messages)
