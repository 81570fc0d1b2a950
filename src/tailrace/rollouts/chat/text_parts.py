"""Content of messages that comes as a list of text parts."""

from __future__ import annotations

from tailrace.records import Json, Message


def as_text(messages: list[Message]) -> list[Message]:
    """Messages whose content is a list of text parts, with their text; the list as it is where there are none.

    Raises `ValueError` for a part that is no text.

    >>> as_text([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    [{'role': 'user', 'content': 'Hello'}]
    """
    if all(not isinstance(message.get("content"), list) for message in messages):
        return messages
    return [{**message, "content": _joined(message["content"])} for message in messages]


def _joined(content: Json) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"content with a part of type {kind!r}: the policy reads text only")
    return "".join(part["text"] for part in parts)
