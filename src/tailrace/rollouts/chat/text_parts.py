"""Conversations as users' code gives them: a list of messages, whose content may come as a list of text parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tailrace.records import Json, Message, Reply

_EXAMPLE = '{"role": "user", "content": "hello"}'


def as_text(messages: list[Message]) -> list[Message]:
    """Messages whose content is a list of text parts, with their text; the list as it is where there are none.

    Raises `TypeError` for what is no list of messages, and `ValueError` for a part that is no text.

    >>> as_text([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    [{'role': 'user', 'content': 'Hello'}]
    """
    _require_messages(messages)
    if all(not isinstance(message.get("content"), list) for message in messages):
        return messages
    return [{**message, "content": _joined(message["content"])} for message in messages]


def _require_messages(given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"a conversation is a list of messages, [{_EXAMPLE}]; this one is a {type(given).__name__}")
    for place, message in enumerate(given):
        if isinstance(message, Reply):
            raise TypeError(f"message {place} of the conversation is a Reply; append its message, `reply.message`")
        if not isinstance(message, Mapping):
            raise TypeError(
                f"a message is a dict, {_EXAMPLE}; message {place} of the conversation is a {type(message).__name__}"
            )


def _joined(content: Json) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"content with a part of type {kind!r}: the policy reads text only")
    return "".join(part["text"] for part in parts)
