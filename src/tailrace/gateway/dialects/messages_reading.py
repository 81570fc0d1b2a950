"""Anthropic's Messages, the request: blocks of content become messages of the policy.

a reply's blocks     thinking, text, tool_use ... ─► one message of the assistant
a user's blocks      tool_result ─► one message of a tool each; text before, between and after them ─► the user's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from tailrace.gateway.dialects.anthropic_errors import THREAD
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
    shown,
    stop_strings,
    text_of,
    whole_number,
)
from tailrace.gateway.dialects.forced_calls import Kind, offered, refused_choice
from tailrace.gateway.dialects.json_form import read_form
from tailrace.gateway.dialects.protocol import ChatRequest, RequestInvalid
from tailrace.records import Json, Message, ToolSpec

_READ = frozenset(
    {
        *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p"),
        "top_k",
        *("stop_sequences", "stream", "thinking", "output_config"),
    }
)
_WITHOUT_EFFECT = frozenset({"cache_control", "inference_geo", "metadata", "service_tier"})
_UNGUIDED = "calls are not guided"
_NEUTRAL: Neutral = {
    "container": ((), "nothing here runs code"),
    "context_management": (
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "a conversation is never shortened here, since its tokens are trained on",
    ),
    "mcp_servers": (([],), "no tool is called here: clients call theirs"),
    "speed": (("standard",), "there is one speed"),
    THREAD: ((), "send the whole conversation"),
}
_TOOL_NEUTRAL: Neutral = {
    "allowed_callers": ((["direct"],), "only the policy calls tools"),
    "defer_loading": ((False,), "tools are offered from the start"),
    "input_examples": (([],), "show them in the tool's description"),
    "strict": ((False,), f"{_UNGUIDED}, so arguments may break the schema"),
}
_CHOICES: Mapping[str, Kind] = {"auto": "auto", "none": "none", "any": "forced", "tool": "forced"}
_CHOICE_NEUTRAL: Neutral = {"disable_parallel_tool_use": ((False,), f"{_UNGUIDED}: a reply may have several calls")}
_LABELS = ("cache_control", "citations")
_BETWEEN = "\n\n"
"""Blocks are paragraphs."""

Block: TypeAlias = tuple[str, Mapping[str, Json]]
"""A block of content, after its name."""


class MessagesRequest(ChatRequest, frozen=True, kw_only=True):
    """A turn, and how its answer is to look."""

    shows_thinking: bool = False
    """Whether blocks of thinking are handed out; they are sampled, and recorded, in any case."""
    omits_thinking: bool = False
    """Whether those blocks are empty."""


def read_request(body: Mapping[str, Json], *, counts: bool = False) -> MessagesRequest:
    """A request's body; one that only `counts` tokens has no `max_tokens`. Raises `RequestInvalid`."""
    require_known(body, read=_READ, neutral=_NEUTRAL, without_effect=_WITHOUT_EFFECT)
    output = optional(body, "output_config", dict) or {}
    require_known(
        output,
        read=("format",),
        neutral={},
        without_effect=("effort",),  # Claude Code sends it with every request
        within="output_config",
    )
    messages = [*_system(body.get("system")), *_messages(body.get("messages"))]
    require_messages(messages, "messages")
    if messages[-1]["role"] == "assistant" and not counts:
        why = "messages ends with an assistant's message: replies cannot be begun for the policy"
        raise RequestInvalid(why, parameter="messages")
    tools, forced = offered(_tools(body), _choice(body))
    shows, omits = _thinking(body)
    max_tokens = whole_number(body, "max_tokens", least=1)
    if max_tokens is None and not counts:
        raise RequestInvalid("max_tokens is missing", parameter="max_tokens")
    return MessagesRequest(
        model=of_type(body.get("model"), str, "model"),
        messages=messages,
        tools=tools,
        form=read_form(output.get("format"), "output_config.format", tools=tools) or forced,
        max_tokens=max_tokens,
        temperature=number(body, "temperature"),
        top_p=number(body, "top_p"),
        top_k=whole_number(body, "top_k", least=0),
        stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
        streams=optional(body, "stream", bool) or False,
        shows_thinking=shows,
        omits_thinking=omits,
    )


def _thinking(body: Mapping[str, Json]) -> tuple[bool, bool]:
    """Whether blocks of thinking are handed out, and whether they are empty."""
    thinking = optional(body, "thinking", dict)
    if thinking is None:
        return False, False
    require_known(thinking, read=("type", "display"), neutral={}, without_effect=("budget_tokens",), within="thinking")
    kind, display = thinking.get("type"), thinking.get("display")
    if kind not in ("enabled", "adaptive", "disabled") or display not in (None, "summarized", "omitted"):
        why = "its type may be enabled, adaptive or disabled, and its display summarized or omitted"
        raise RequestInvalid(f"thinking = {shown(thinking)} is not supported: {why}", parameter="thinking")
    return kind != "disabled", display == "omitted"


# ---- messages


def _system(system: Json) -> list[Message]:
    content = "" if system is None else text_of(system, "system", between=_BETWEEN)
    return [{"role": "system", "content": content}] if content else []


def _messages(given: Json) -> Iterator[Message]:
    for name, message in objects(given, "messages"):
        require_known(message, read=("role", "content"), neutral={}, within=name)
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        match message.get("role"):
            case "assistant":
                yield _reply(objects(blocks, f"{name}.content"))
            case "user":
                yield from _said("user", objects(blocks, f"{name}.content"))
            case "system":
                yield from _said("system", objects(blocks, f"{name}.content"))
            case role:
                expected = "it must be user, assistant or system"
                raise RequestInvalid(f"{name}.role is {shown(role)}; {expected}", parameter=f"{name}.role")


def _reply(blocks: Sequence[Block]) -> Message:
    """The assistant's message that some blocks tell again."""
    message: Message = {"role": "assistant", "content": ""}
    texts: list[str] = []
    thoughts: list[str] = []
    for name, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_text(name, block))
            case "thinking":
                require_known(block, read=("type", "thinking"), neutral={}, without_effect=("signature",), within=name)
                thoughts.append(of_type(block.get("thinking"), str, f"{name}.thinking"))
            case "tool_use":
                _add_call(message, name, block)
            case kind:
                raise _refused(name, kind)
    message["content"] = _BETWEEN.join(texts)
    if thinking := _BETWEEN.join(thoughts):
        message["reasoning_content"] = thinking
    return message


def _add_call(message: Message, name: str, block: Mapping[str, Json]) -> None:
    neutral: Neutral = {"caller": (({"type": "direct"},), LEAVE_IT_OUT)}
    require_known(block, read=("type", "id", "name", "input"), neutral=neutral, without_effect=_LABELS, within=name)
    message.setdefault("tool_calls", []).append(
        {
            "id": of_type(block.get("id"), str, f"{name}.id"),
            "type": "function",
            "function": {
                "name": of_type(block.get("name"), str, f"{name}.name"),
                "arguments": arguments_of(of_type(block.get("input"), dict, f"{name}.input"), f"{name}.input"),
            },
        }
    )


def _said(role: Literal["user", "system"], blocks: Sequence[Block]) -> Iterator[Message]:
    """What the user and tools say, in order; neighbouring texts are one message."""
    texts: list[str] = []
    for name, block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(name, block))
        elif kind == "tool_result" and role == "user":
            if texts:
                yield {"role": role, "content": _BETWEEN.join(texts)}
                texts = []
            yield _tool_result(name, block)
        else:
            raise _refused(name, kind)
    if texts:
        yield {"role": role, "content": _BETWEEN.join(texts)}


def _text(name: str, block: Mapping[str, Json]) -> str:
    require_known(block, read=("type", "text"), neutral={}, without_effect=_LABELS, within=name)
    return of_type(block.get("text"), str, f"{name}.text")


def _tool_result(name: str, block: Mapping[str, Json]) -> Message:
    known = ("type", "tool_use_id", "content", "is_error")
    require_known(block, read=known, neutral={}, without_effect=_LABELS, within=name)
    content = block.get("content")
    text = "" if content is None else text_of(content, f"{name}.content", between=_BETWEEN)
    if block.get("is_error"):
        text = f"Error: {text}"
    call_id = of_type(block.get("tool_use_id"), str, f"{name}.tool_use_id")
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def _refused(name: str, kind: Json) -> RequestInvalid:
    return RequestInvalid(f"{name} is of type {shown(kind)}, which is not supported here", parameter=name)


# ---- tools


def _tools(body: Mapping[str, Json]) -> list[ToolSpec]:
    tools: list[ToolSpec] = []
    for name, tool in objects(body.get("tools"), "tools"):
        if (kind := tool.get("type")) not in (None, "custom"):
            why = "the policy calls tools with an input_schema only"
            raise RequestInvalid(f"{name} is of type {shown(kind)}: {why}", parameter=name)
        require_known(
            tool,
            read=("type", "name", "description", "input_schema"),
            neutral=_TOOL_NEUTRAL,
            without_effect=("cache_control", "eager_input_streaming"),
            within=name,
        )
        tools.append(function_of(tool, name, parameters="input_schema"))
    return tools


def _choice(body: Mapping[str, Json]) -> tuple[Kind, str | None]:
    choice = optional(body, "tool_choice", dict)
    if choice is None:
        return "auto", None
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise refused_choice(choice, "its type may be auto, none, any or tool")
    read = ("type", "name") if kind == "tool" else ("type",)
    require_known(choice, read=read, neutral=_CHOICE_NEUTRAL, within="tool_choice")
    return _CHOICES[kind], of_type(choice.get("name"), str, "tool_choice.name") if kind == "tool" else None
