"""OpenAI's Responses, the answer: a reply as a response with its items."""

from __future__ import annotations

from tailrace.gateway.dialects.protocol import Answer
from tailrace.gateway.dialects.responses_reading import ID_PREFIX, MESSAGE_PREFIX, ResponsesRequest
from tailrace.gateway.dialects.tool_calls import arguments_text
from tailrace.records import FinishReason, Json, ToolCall


def response(request: ResponsesRequest, answer: Answer) -> dict[str, Json]:
    """The response to a request, with its output."""
    finished = begun_response(request, answer.answer_id, answer.created_s)
    is_cut = answer.reply.finish_reason is FinishReason.LENGTH
    finished["status"] = status_of(answer)
    finished["completed_at"] = None if is_cut else answer.created_s
    finished["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    finished["output"] = output_items(request, answer)
    finished["usage"] = _usage(answer)
    return finished


def begun_response(request: ResponsesRequest, answer_id: str, created_s: int) -> dict[str, Json]:
    """A response before anything of it is there."""
    return {
        "id": f"{ID_PREFIX}{answer_id}",
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "usage": None,
        **request.echo,
    }


def output_items(request: ResponsesRequest, answer: Answer) -> list[dict[str, Json]]:
    """The items of an answer, in order."""
    reply, answer_id = answer.reply, answer.answer_id
    reasoning = reply.message.get("reasoning_content")
    items: list[dict[str, Json]] = []
    if reasoning:
        items.append(reasoning_item(request, answer_id, reasoning, "completed"))
    if reply.content or not reply.tool_calls:
        items.append(message_item(answer_id, reply.content, status_of(answer)))
    items += [call_item(answer_id, number, call) for number, call in enumerate(reply.tool_calls)]
    return items


def reasoning_item(request: ResponsesRequest, answer_id: str, text: str | None, status: str) -> dict[str, Json]:
    """Reasoning, as content or as a summary; None: nothing of it yet."""
    summary = [] if text is None or not request.summarizes else [summary_part(text)]
    content = [] if text is None or request.summarizes else [reasoning_part(text)]
    encrypted = {"encrypted_content": text} if request.encrypts else {}
    item_id = reasoning_id(answer_id)
    return {"id": item_id, "type": "reasoning", "summary": summary, "content": content, "status": status, **encrypted}


def message_item(answer_id: str, text: str | None, status: str) -> dict[str, Json]:
    """What the policy says; None: nothing yet."""
    content = [] if text is None else [text_part(text)]
    return {"id": message_id(answer_id), "type": "message", "role": "assistant", "status": status, "content": content}


def call_item(answer_id: str, number: int, call: ToolCall, *, begun: bool = False) -> dict[str, Json]:
    """A tool call; one that has just `begun` has no arguments yet."""
    return {
        "id": call_item_id(answer_id, number),
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": "" if begun else arguments_text(call),
        "status": "in_progress" if begun else "completed",
    }


def text_part(text: str) -> dict[str, Json]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> dict[str, Json]:
    """A part of an item of reasoning."""
    return {"type": "reasoning_text", "text": text}


def summary_part(text: str) -> dict[str, Json]:
    """A part of an item of reasoning that goes out as a summary."""
    return {"type": "summary_text", "text": text}


def reasoning_id(answer_id: str) -> str:
    """Of an answer's item of reasoning."""
    return f"rs_{answer_id}"


def message_id(answer_id: str) -> str:
    """Of an answer's message."""
    return f"{MESSAGE_PREFIX}{answer_id}"


def call_item_id(answer_id: str, number: int) -> str:
    """Of an answer's tool calls."""
    return f"fc_{answer_id}_{number}"


def status_of(answer: Answer) -> str:
    """How an answer ended."""
    return "incomplete" if answer.reply.finish_reason is FinishReason.LENGTH else "completed"


def _usage(answer: Answer) -> dict[str, Json]:
    """Tokens of reasoning are part of the output, and not counted apart."""
    sampled = answer.reply.completion.num_tokens
    cached = int(answer.reply.completion.metrics.get("cached_prompt_tokens", 0))
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + sampled,
    }
