"""OpenAI's Responses: `POST /v1/responses`, what the Agents SDK and Codex speak.

A response's output is one item of reasoning where there is some, one message where there is text or nothing else, and
one item for each tool call. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from tailrace.gateway.dialects.openai_errors import openai_error
from tailrace.gateway.dialects.protocol import Answer, ChatDialect, ChatRequest, Events, Failure
from tailrace.gateway.dialects.responses_events import ResponsesEvents
from tailrace.gateway.dialects.responses_output import response
from tailrace.gateway.dialects.responses_reading import ResponsesRequest, read_request
from tailrace.records import Json


class Responses(ChatDialect):
    """Reads and writes responses."""

    name = "responses"

    @override
    def read(self, body: Mapping[str, Json]) -> ResponsesRequest:
        return read_request(body)

    @override
    def whole(self, request: ChatRequest, answer: Answer) -> dict[str, Json]:
        assert isinstance(request, ResponsesRequest)  # the server hands back what `read` made
        return response(request, answer)

    @override
    def events(self, request: ChatRequest, answer_id: str, created_s: int) -> Events:
        assert isinstance(request, ResponsesRequest)
        return ResponsesEvents(request, answer_id, created_s)

    @override
    def error(self, failure: Failure) -> dict[str, Json]:
        return openai_error(failure)
