"""Anthropic's Messages, the events of an answer that is streamed.

message_start
for each block    content_block_start, its deltas, content_block_stop
message_delta  message_stop
"""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import override

from tailrace.gateway.dialects.anthropic_errors import anthropic_error
from tailrace.gateway.dialects.messages_output import begun_message, blocks, stopped, usage
from tailrace.gateway.dialects.messages_reading import MessagesRequest
from tailrace.gateway.dialects.protocol import Answer, Events, Failure
from tailrace.gateway.dialects.server_sent import server_sent, unsent
from tailrace.gateway.dialects.tool_calls import json_text
from tailrace.records import Json

_PING = server_sent({"type": "ping"})


class MessagesEvents(Events):
    """The events of one message. At most one block is open at a time."""

    def __init__(self, request: MessagesRequest, answer_id: str) -> None:
        self._request, self._answer_id = request, answer_id
        self._opened = 0
        """Blocks so far."""
        self._open: str | None = None
        """The type of the block that is open."""
        self._thinking, self._text = "", ""
        """Sent so far."""

    @override
    def begin(self) -> Iterator[bytes]:
        yield server_sent({"type": "message_start", "message": begun_message(self._request, self._answer_id)})

    @override
    def reasoning(self, delta: str) -> Iterator[bytes]:
        if not self._request.shows_thinking:
            return
        yield from self._in_block({"type": "thinking", "thinking": "", "signature": ""})
        self._thinking += delta
        if delta and not self._request.omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": delta})

    @override
    def text(self, delta: str) -> Iterator[bytes]:
        yield from self._in_block({"type": "text", "text": ""})
        self._text += delta
        if delta:
            yield self._delta({"type": "text_delta", "text": delta})

    @override
    def end(self, answer: Answer) -> Iterator[bytes]:
        for block in blocks(self._request, answer):
            kind = block["type"]
            if kind == "text":
                yield from self.text(unsent(self._text, block["text"]))
            elif kind == "tool_use":
                yield from self._call(block)
            elif self._open != "text":
                yield from self.reasoning(unsent(self._thinking, answer.reply.message.get("reasoning_content", "")))
        yield from self._close()
        yield server_sent({"type": "message_delta", "delta": stopped(answer), "usage": usage(answer)})
        yield server_sent({"type": "message_stop"})

    @override
    def fail(self, failure: Failure) -> Iterator[bytes]:
        yield server_sent(anthropic_error(failure))

    @override
    def keep_alive(self) -> bytes:
        return _PING

    def _call(self, block: dict[str, Json]) -> Iterator[bytes]:
        yield from self._close()
        yield from self._in_block({**block, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": json_text(block["input"])})

    def _in_block(self, block: dict[str, Json]) -> Iterator[bytes]:
        """Open a block, unless one of its type is."""
        if self._open == block["type"]:
            return
        yield from self._close()
        self._open = block["type"]
        self._opened += 1
        yield server_sent({"type": "content_block_start", "index": self._opened - 1, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._answer_id})
        self._open = None
        yield server_sent({"type": "content_block_stop", "index": self._opened - 1})

    def _delta(self, delta: dict[str, Json]) -> bytes:
        return server_sent({"type": "content_block_delta", "index": self._opened - 1, "delta": delta})
