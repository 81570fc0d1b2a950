"""OpenAI's Responses, the request: `input`, `instructions` and tools become messages and tools of the policy.

items of one reply          reasoning, message, function_call ... ─► one message of the assistant
message of another one      function_call behind it ─► a message of its own
function_call_output        ─► one message of a tool, behind all calls of the reply
previous_response_id        ─► the answer that the new items follow; instructions are left behind, as OpenAI does it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from tailrace.gateway.dialects.fields import (
    LEAVE_IT_OUT,
    Neutral,
    arguments_of,
    function_of,
    number,
    objects,
    of_type,
    optional,
    require_known,
    require_messages,
    require_results,
    shown,
    text_of,
    whole_number,
)
from tailrace.gateway.dialects.forced_calls import offered, openai_choice
from tailrace.gateway.dialects.json_form import read_form
from tailrace.gateway.dialects.protocol import ChatRequest, RequestInvalid
from tailrace.gateway.tool_call_ids import answer_of, are_of_one_reply
from tailrace.records import Json, Message, ToolSpec

_READ = frozenset(
    {
        *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens"),
        *("temperature", "top_p", "stream", "store", "metadata", "reasoning", "include", "text"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        "client_metadata",  # Codex's own names of its turns
    }
)
_UNSHORTENED = "a conversation is never shortened here, since its tokens are trained on"
_NEUTRAL: Neutral = {
    "background": ((False,), "an answer comes with its own request"),
    "context_management": (([],), _UNSHORTENED),
    "conversation": ((), "send the conversation itself, or previous_response_id"),
    "max_tool_calls": ((), "no tool is called here: clients call theirs"),
    "moderation": ((), "nothing here moderates"),
    "parallel_tool_calls": ((True,), "calls are not guided: a reply may have several calls"),
    "prompt": ((), "send instructions and input"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "stream_options": (({}, {"include_obfuscation": False}), "events are not padded"),
    "top_logprobs": ((0,), "log-probabilities are recorded, and not sent"),
    "truncation": (("disabled",), _UNSHORTENED),
}
_TOOL_NEUTRAL: Neutral = {
    "async": ((False,), LEAVE_IT_OUT),
    "defer_loading": ((False,), LEAVE_IT_OUT),
    "allowed_callers": ((["direct"],), LEAVE_IT_OUT),
    "output_schema": ((), LEAVE_IT_OUT),
}
_TEXT_NEUTRAL: Neutral = {
    "verbosity": (("medium",), "how much the policy says is what it learns; set max_output_tokens"),
}
_REASONING_NEUTRAL: Neutral = {
    "effort": ((), "how long the policy thinks is what it learns; set max_output_tokens"),
}
_ITEM = ("type", "id", "status")
_DIRECT: Neutral = {"caller": (({"type": "direct"},), LEAVE_IT_OUT), "namespace": ((), LEAVE_IT_OUT)}
_ENCRYPTED = "reasoning.encrypted_content"

ID_PREFIX, MESSAGE_PREFIX = "resp_", "msg_"
_OWN_MESSAGE = re.compile(rf"{MESSAGE_PREFIX}([0-9a-f]{{32}})")

Summary = Literal["auto", "detailed"]


class ResponsesRequest(ChatRequest, frozen=True, kw_only=True):
    """A turn, and what of the request its answer tells again."""

    echo: dict[str, Json]
    summarizes: bool
    """Whether reasoning goes out as a summary, all of it, in place of content."""
    encrypts: bool
    """Whether reasoning goes out as `encrypted_content` as well, which clients without a store send back."""


def read_request(body: Mapping[str, Json]) -> ResponsesRequest:
    """A request's body. Raises `RequestInvalid`."""
    require_known(body, read=_READ, neutral=_NEUTRAL, without_effect=_WITHOUT_EFFECT)
    text = optional(body, "text", dict) or {}
    require_known(text, read=("format",), neutral=_TEXT_NEUTRAL, within="text")
    instructions, given = optional(body, "instructions", str), _input(body.get("input"))
    require_messages(given, "input")
    require_results(given, "input")
    own: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    tools, tool_choice = _tools(body), body.get("tool_choice") or "auto"
    may_call, forced = offered(tools, openai_choice(tool_choice))
    summary, stores = _summary(body), optional(body, "store", bool) is not False
    model = of_type(body.get("model", ""), str, "model")
    max_tokens, temperature = whole_number(body, "max_output_tokens", least=1), number(body, "temperature")
    top_p = number(body, "top_p")
    echo = {
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "metadata": optional(body, "metadata", dict) or {},
        "model": model,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": summary},
        "store": stores,
        "temperature": temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": tool_choice,
        "tools": [{"type": "function", "strict": False, **tool} for tool in tools],
        "top_p": top_p,
    }
    return ResponsesRequest(
        model=model,
        messages=[*own, *given],
        tools=may_call,
        form=read_form(text.get("format"), "text.format", tools=may_call) or forced,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        streams=optional(body, "stream", bool) or False,
        follows=_follows(body),
        is_followed=stores,
        num_instructions=len(own),
        echo=echo,
        summarizes=summary is not None,
        encrypts=_encrypts(body),
    )


def _follows(body: Mapping[str, Json]) -> str | None:
    """The answer that the request goes on from, by the name that the dialect gave it."""
    name = optional(body, "previous_response_id", str)
    if name is not None and not name.startswith(ID_PREFIX):
        why = "no response has that name; send the whole conversation"
        raise RequestInvalid(f"previous_response_id = {shown(name)}: {why}", parameter="previous_response_id")
    return None if name is None else name.removeprefix(ID_PREFIX)


# ---- input


def _input(given: Json) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    before: Mapping[str, Json] = {}
    for name, item in objects(given, "input"):
        _add_item(item, name, messages, before)
        before = item
    return messages


def _add_item(item: Mapping[str, Json], name: str, messages: list[Message], before: Mapping[str, Json]) -> None:
    """Add an item to the messages that the items before it made; `before` is the last one of these."""
    match item.get("type", "message"):
        case "message":
            _add_message(item, name, messages)
        case "reasoning":
            known = (*_ITEM, "content", "summary", "encrypted_content")
            require_known(item, read=known, neutral={}, within=name)
            if thoughts := _reasoning(item, name):
                _open_reply(messages)["reasoning_content"] = thoughts
        case "function_call":
            _add_call(item, name, messages, before)
        case "function_call_output":
            known = (*_ITEM, "call_id", "output", "name")
            require_known(item, read=known, neutral=_DIRECT, within=name)
            output = text_of(item.get("output"), f"{name}.output", kinds=("input_text", "output_text"))
            call_id = of_type(item.get("call_id"), str, f"{name}.call_id")
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        case kind:
            raise RequestInvalid(f"{name}.type = {shown(kind)} is not supported", parameter=f"{name}.type")


def _add_message(item: Mapping[str, Json], name: str, messages: list[Message]) -> None:
    require_known(item, read=(*_ITEM, "role", "content", "phase"), neutral={}, within=name)
    content = text_of(item.get("content"), f"{name}.content", kinds=("input_text", "output_text"))
    match item.get("role"):
        case "assistant":
            _open_reply(messages)["content"] = content
        case "system" | "developer":
            messages.append({"role": "system", "content": content})
        case "user":
            messages.append({"role": "user", "content": content})
        case role:
            expected = "it must be system, developer, user or assistant"
            raise RequestInvalid(f"{name}.role is {shown(role)}; {expected}", parameter=f"{name}.role")


def _add_call(item: Mapping[str, Json], name: str, messages: list[Message], before: Mapping[str, Json]) -> None:
    require_known(item, read=(*_ITEM, "call_id", "name", "arguments"), neutral=_DIRECT, within=name)
    call_id = of_type(item.get("call_id"), str, f"{name}.call_id")
    _reply_that_calls(call_id, messages, before).setdefault("tool_calls", []).append(
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": of_type(item.get("name"), str, f"{name}.name"),
                "arguments": arguments_of(item.get("arguments"), f"{name}.arguments"),
            },
        }
    )


def _reply_that_calls(call_id: str, messages: list[Message], before: Mapping[str, Json]) -> Message:
    """The reply that a call belongs to: the one before it, also where results of its other calls stand between."""
    reply = next((message for message in reversed(messages) if message["role"] != "tool"), None)
    if reply is None or reply["role"] != "assistant":
        return _open_reply(messages)
    is_next = reply is messages[-1] and not _is_of_another(before, call_id, messages[:-1])
    if is_next or any(are_of_one_reply(call_id, call["id"]) for call in reply.get("tool_calls", ())):
        return reply
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _is_of_another(item: Mapping[str, Json], call_id: str, earlier: Sequence[Message]) -> bool:
    """Whether an item is an assistant's message, and none of the policy's reply that makes the call behind it.

    It is another answer's by its id. Without one it may be what a client wrote in place of the conversation so far, as
    the Agents SDK does where an agent hands over to another: text before which nobody else has said anything.
    """
    item_id, answer = item.get("id"), answer_of(call_id)
    if item.get("role") != "assistant" or answer is None:
        return False
    if isinstance(item_id, str):
        own = _OWN_MESSAGE.fullmatch(item_id)
        return own is not None and not own[1].startswith(answer)
    return isinstance(item["content"], str) and all(message["role"] == "assistant" for message in earlier)


def _open_reply(messages: list[Message]) -> Message:
    """The reply that text or reasoning belongs to: one that has only reasoning yet, else a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or last["content"] or last.get("tool_calls"):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: Mapping[str, Json], name: str) -> str:
    """What an item of reasoning says: its content, else what was sent as encrypted, else the summary."""
    if content := item.get("content"):
        return text_of(content, f"{name}.content", kinds=("reasoning_text",))
    if encrypted := item.get("encrypted_content"):
        return of_type(encrypted, str, f"{name}.encrypted_content")
    return text_of(item.get("summary") or [], f"{name}.summary", kinds=("summary_text",))


# ---- tools, reasoning, include


def _tools(body: Mapping[str, Json]) -> list[ToolSpec]:
    """The tools. `strict` is taken as a wish: the answer says that none of them is."""
    tools: list[ToolSpec] = []
    for name, tool in objects(body.get("tools"), "tools"):
        if tool.get("type") != "function":
            kind = shown(tool.get("type"))
            raise RequestInvalid(f"{name} is of type {kind}: the policy calls functions only", parameter=name)
        known = ("type", "name", "description", "parameters")
        require_known(tool, read=known, neutral=_TOOL_NEUTRAL, without_effect=("strict",), within=name)
        tools.append(function_of(tool, name))
    return tools


def _summary(body: Mapping[str, Json]) -> Summary | None:
    """Which summary of the reasoning is asked for: all of it is sent as one."""
    reasoning = optional(body, "reasoning", dict) or {}
    known = ("summary", "generate_summary")
    require_known(reasoning, read=known, neutral=_REASONING_NEUTRAL, within="reasoning")
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    if summary not in (None, "auto", "detailed"):
        why = "nothing here shortens what the policy thinks; it may be auto or detailed"
        raise RequestInvalid(f"reasoning.summary = {shown(summary)} is not supported: {why}", parameter="reasoning")
    return cast(Summary | None, summary)


def _encrypts(body: Mapping[str, Json]) -> bool:
    """Whether encrypted reasoning is asked for."""
    include = optional(body, "include", list) or []
    for one in include:
        if one != _ENCRYPTED:
            raise RequestInvalid(f"include has {shown(one)}, which is not supported", parameter="include")
    return bool(include)
