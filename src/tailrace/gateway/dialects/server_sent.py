"""Server-sent events as bytes, and what of a reply's text a stream has yet to say."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tailrace.records import Json

_encode = msgspec.json.Encoder().encode


def server_sent(event: Mapping[str, Json]) -> bytes:
    """An event that is named by its own `type`, as both OpenAI's Responses and Anthropic's Messages name theirs.

    >>> server_sent({"type": "ping"})
    b'event: ping\\ndata: {"type":"ping"}\\n\\n'
    """
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), _encode(event))


def unsent(sent: str, whole: str) -> str:
    """The rest of a text whose beginning a client has; nothing where what it has is no beginning of it.

    >>> unsent("Ada,", "Ada, Bob")
    ' Bob'
    """
    return whole[len(sent) :] if whole.startswith(sent) else ""
