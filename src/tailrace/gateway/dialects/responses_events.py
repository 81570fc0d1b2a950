"""OpenAI's Responses, the events of an answer that is streamed.

response.created  response.in_progress
for each item     output_item.added, its deltas, its done events, output_item.done
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import override

from tailrace.gateway.dialects.openai_errors import error_kind
from tailrace.gateway.dialects.protocol import Answer, Events, Failure
from tailrace.gateway.dialects.responses_output import (
    begun_response,
    call_item,
    call_item_id,
    message_id,
    message_item,
    reasoning_id,
    reasoning_item,
    reasoning_part,
    response,
    status_of,
    summary_part,
    text_part,
)
from tailrace.gateway.dialects.responses_reading import ResponsesRequest
from tailrace.gateway.dialects.server_sent import server_sent, unsent
from tailrace.gateway.dialects.tool_calls import arguments_text
from tailrace.records import Json, ToolCall


class ResponsesEvents(Events):
    """The events of one response. At most one item is open at a time."""

    def __init__(self, request: ResponsesRequest, answer_id: str, created_s: int) -> None:
        self._request, self._answer_id, self._created_s = request, answer_id, created_s
        self._number = -1
        """Of the event that was sent last."""
        self._items = 0
        """Items that were opened."""
        self._reasoning: str | None = None
        """Sent so far; None: none was."""
        self._text: str | None = None

    @override
    def begin(self) -> Iterator[bytes]:
        begun = begun_response(self._request, self._answer_id, self._created_s)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    @override
    def reasoning(self, delta: str) -> Iterator[bytes]:
        if self._reasoning is None:
            yield from self._open_reasoning()
        self._reasoning = (self._reasoning or "") + delta
        yield self._reasoning_event("delta", delta=delta)

    @override
    def text(self, delta: str) -> Iterator[bytes]:
        if self._text is None:
            yield from self._close_reasoning()
            yield from self._open_message()
        self._text = (self._text or "") + delta
        yield self._text_event("response.output_text.delta", delta=delta, logprobs=[])

    @override
    def end(self, answer: Answer) -> Iterator[bytes]:
        reply = answer.reply
        if self._text is None and (rest := unsent(self._reasoning or "", reply.message.get("reasoning_content") or "")):
            yield from self.reasoning(rest)
        if rest := unsent(self._text or "", reply.content):
            yield from self.text(rest)
        yield from self._close_reasoning()
        if self._text is None and not reply.tool_calls:
            yield from self._open_message()
        yield from self._close_message(answer)
        for number, call in enumerate(reply.tool_calls):
            yield from self._call(number, call)
        finished = response(self._request, answer)
        yield self._event(f"response.{finished['status']}", response=finished)

    @override
    def fail(self, failure: Failure) -> Iterator[bytes]:
        failed = begun_response(self._request, self._answer_id, self._created_s)
        failed["status"] = "failed"
        failed["error"] = {"code": error_kind(failure), "message": failure.message}
        yield self._event("response.failed", response=failed)

    # ---- reasoning

    def _open_reasoning(self) -> Iterator[bytes]:
        self._items += 1
        yield self._item_event("added", reasoning_item(self._request, self._answer_id, None, "in_progress"))
        yield self._reasoning_part_event("added", "")

    def _close_reasoning(self) -> Iterator[bytes]:
        if self._reasoning is None or self._text is not None:
            return
        yield self._reasoning_event("done", text=self._reasoning)
        yield self._reasoning_part_event("done", self._reasoning)
        yield self._item_event("done", reasoning_item(self._request, self._answer_id, self._reasoning, "completed"))

    def _reasoning_event(self, what: str, **fields: Json) -> bytes:
        kind, index = "reasoning_text", "content_index"
        if self._request.summarizes:
            kind, index = "reasoning_summary_text", "summary_index"
        fields |= {"item_id": reasoning_id(self._answer_id), "output_index": 0, index: 0}
        return self._event(f"response.{kind}.{what}", **fields)

    def _reasoning_part_event(self, what: str, text: str) -> bytes:
        about: dict[str, Json] = {"item_id": reasoning_id(self._answer_id), "output_index": 0}
        if self._request.summarizes:
            part, kind = summary_part(text), f"response.reasoning_summary_part.{what}"
            return self._event(kind, summary_index=0, part=part, **about)
        return self._event(f"response.content_part.{what}", content_index=0, part=reasoning_part(text), **about)

    # ---- the message

    def _open_message(self) -> Iterator[bytes]:
        self._items += 1
        self._text = ""
        yield self._item_event("added", message_item(self._answer_id, None, "in_progress"))
        yield self._text_event("response.content_part.added", part=text_part(""))

    def _close_message(self, answer: Answer) -> Iterator[bytes]:
        if self._text is None:
            return
        yield self._text_event("response.output_text.done", text=self._text, logprobs=[])
        yield self._text_event("response.content_part.done", part=text_part(self._text))
        yield self._item_event("done", message_item(self._answer_id, self._text, status_of(answer)))

    def _text_event(self, kind: str, **fields: Json) -> bytes:
        about = {"item_id": message_id(self._answer_id), "output_index": self._items - 1, "content_index": 0}
        return self._event(kind, **about, **fields)

    # ---- tool calls

    def _call(self, number: int, call: ToolCall) -> Iterator[bytes]:
        self._items += 1
        arguments = arguments_text(call)
        about: dict[str, Json] = {
            "item_id": call_item_id(self._answer_id, number),
            "output_index": self._items - 1,
        }
        yield self._item_event("added", call_item(self._answer_id, number, call, begun=True))
        yield self._event("response.function_call_arguments.delta", delta=arguments, **about)
        done = "response.function_call_arguments.done"
        yield self._event(done, arguments=arguments, name=call["function"]["name"], **about)
        yield self._item_event("done", call_item(self._answer_id, number, call))

    def _item_event(self, what: str, item: dict[str, Json]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=self._items - 1, item=item)

    def _event(self, kind: str, **fields: Json) -> bytes:
        self._number += 1
        return server_sent({"type": kind, "sequence_number": self._number, **fields})
