"""Anthropic's Messages, the answer: a reply as a message with its blocks."""

from __future__ import annotations

from tailrace.gateway.dialects.messages_reading import MessagesRequest
from tailrace.gateway.dialects.protocol import Answer
from tailrace.records import FinishReason, Json


def message(request: MessagesRequest, answer: Answer) -> dict[str, Json]:
    """The message that answers a request."""
    return {
        **begun_message(request, answer.answer_id),
        "content": blocks(request, answer),
        **stopped(answer),
        "usage": usage(answer),
    }


def begun_message(request: MessagesRequest, answer_id: str) -> dict[str, Json]:
    """A message before anything of it is there."""
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def blocks(request: MessagesRequest, answer: Answer) -> list[dict[str, Json]]:
    """The blocks of an answer: thinking where it is shown, text where there is some or nothing else, tool calls.

    Texts are never left empty but where there is nothing else: clients read the first block.
    """
    reply = answer.reply
    found: list[dict[str, Json]] = []
    thinking = reply.message.get("reasoning_content")
    if thinking and request.shows_thinking:
        shown = "" if request.omits_thinking else thinking
        found.append({"type": "thinking", "thinking": shown, "signature": answer.answer_id})
    if reply.content or not reply.tool_calls:
        found.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        function = call["function"]
        found.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return found


def stopped(answer: Answer) -> dict[str, Json]:
    """Why an answer ended."""
    reply = answer.reply
    reason = "end_turn"
    if reply.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif reply.stop_string is not None:
        reason = "stop_sequence"
    elif reply.tool_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": reply.stop_string, "stop_details": None}


def usage(answer: Answer) -> dict[str, Json]:
    """Tokens of an answer and of its prompt. Cached ones are counted apart, as Anthropic does."""
    cached = int(answer.reply.completion.metrics.get("cached_prompt_tokens", 0))
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.reply.completion.num_tokens,
    }
