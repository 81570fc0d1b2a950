"""Answers a reply's tool calls. Whatever is wrong with a call goes back to the policy as a message, so it can learn."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy

from tailrace.environments.callables import settled
from tailrace.errors import ToolError
from tailrace.records import Json, Message, Reply, ToolCall

Tool = Callable[..., str | Awaitable[str]]
"""Takes a call's arguments by keyword, returns what the policy reads; raises `ToolError` to refuse."""

ERROR_PREFIX = "error: "


async def answer_tool_calls(reply: Reply, tools: Mapping[str, Tool]) -> list[Message]:
    """One `tool` message per tool call of the reply, in order; append them after `reply.message`.

    Unknown tools, wrong or malformed arguments and a `ToolError` give a message that begins with `error: `. Any other
    exception of a tool is a bug of the tool and fails the rollout.
    """
    messages = [await _answer(call, tools) for call in reply.tool_calls]
    malformed = f"{ERROR_PREFIX}this tool call is not valid; write JSON with a name and arguments"
    messages += [Message(role="tool", content=malformed) for _ in range(reply.malformed_tool_calls)]
    return messages


async def _answer(call: ToolCall, tools: Mapping[str, Tool]) -> Message:
    name = call["function"]["name"]
    try:
        content = await _run(name, call["function"]["arguments"], tools)
    except ToolError as error:
        content = f"{ERROR_PREFIX}{error}"
    message = Message(role="tool", name=name, content=content)
    if "id" in call:
        message["tool_call_id"] = call["id"]
    return message


async def _run(name: str, arguments: Mapping[str, Json] | str, tools: Mapping[str, Tool]) -> str:
    if name not in tools:
        raise ToolError(f"there is no tool {name!r}; use one of: {', '.join(tools)}")
    keywords = _keywords(arguments)
    try:
        inspect.signature(tools[name]).bind(**keywords)
    except TypeError as error:
        raise ToolError(f"{name}: {error}") from error
    return await settled(tools[name](**keywords))


def _keywords(arguments: Mapping[str, Json] | str) -> Mapping[str, Json]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ToolError(f"the arguments are not valid JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise ToolError("the arguments must be a JSON object")
    return deepcopy(arguments)  # they are part of the conversation, and tools may change theirs in place
