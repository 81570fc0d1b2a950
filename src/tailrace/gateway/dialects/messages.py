"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`, what Claude Code speaks.

https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from tailrace.gateway.dialects.anthropic_errors import anthropic_error
from tailrace.gateway.dialects.messages_events import MessagesEvents
from tailrace.gateway.dialects.messages_output import message
from tailrace.gateway.dialects.messages_reading import MessagesRequest, read_request
from tailrace.gateway.dialects.protocol import Answer, ChatDialect, ChatRequest, CountsTokens, Events, Failure
from tailrace.records import Json


class Messages(ChatDialect, CountsTokens):
    """Reads and writes messages. Knows nothing of earlier ones: clients send the whole conversation."""

    name = "messages"

    @override
    def read(self, body: Mapping[str, Json]) -> MessagesRequest:
        return read_request(body)

    @override
    def read_prompt(self, body: Mapping[str, Json]) -> MessagesRequest:
        return read_request(body, counts=True)

    @override
    def counted(self, num_tokens: int) -> dict[str, Json]:
        return {"input_tokens": num_tokens}

    @override
    def whole(self, request: ChatRequest, answer: Answer) -> dict[str, Json]:
        assert isinstance(request, MessagesRequest)  # the server hands back what `read` made
        return message(request, answer)

    @override
    def events(self, request: ChatRequest, answer_id: str, created_s: int) -> Events:
        assert isinstance(request, MessagesRequest)
        return MessagesEvents(request, answer_id)

    @override
    def error(self, failure: Failure) -> dict[str, Json]:
        return anthropic_error(failure)
