"""OpenAI's chat completions: `POST /v1/chat/completions`.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from typing_extensions import override

from tailrace.gateway.dialects.fields import (
    UNMODIFIED,
    Neutral,
    arguments_of,
    function_of,
    number,
    of_type,
    optional,
    require_known,
    require_messages,
    require_results,
    shown,
    stop_strings,
    streams_usage,
    text_of,
    vllm_top_k,
)
from tailrace.gateway.dialects.forced_calls import offered, openai_choice
from tailrace.gateway.dialects.json_form import read_form
from tailrace.gateway.dialects.openai_errors import openai_error
from tailrace.gateway.dialects.protocol import Answer, ChatDialect, ChatRequest, Events, Failure, RequestInvalid
from tailrace.gateway.dialects.server_sent import unsent
from tailrace.gateway.dialects.tool_calls import arguments_text
from tailrace.gateway.dialects.usage import usage
from tailrace.records import FinishReason, Json, Message, ToolCall, ToolSpec

_READ = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
        *("top_k", "seed", "stop", "stream", "stream_options", "logprobs", "return_token_ids", "response_format"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options"),
    }
)
_MESSAGE_WITHOUT_EFFECT = frozenset({"provider_specific_fields", "annotations", "thinking_blocks", "cache_control"})
"""Of messages: what clients of many providers hand back, and nothing that the policy reads."""
_NEUTRAL: Neutral = {
    "n": ((1,), "a request is one turn; ask again for another one"),
    "frequency_penalty": ((0,), UNMODIFIED),
    "presence_penalty": ((0,), UNMODIFIED),
    "repetition_penalty": ((1,), UNMODIFIED),
    "logit_bias": (({},), UNMODIFIED),
    "top_logprobs": ((0,), "engines tell the log-probability of the sampled token alone"),
    "min_p": ((0,), UNMODIFIED),
    "parallel_tool_calls": ((True,), "calls are not guided: a reply may have several calls"),
    "modalities": ((["text"],), "the policy writes text only"),
    "functions": (([],), "offer them as tools"),
    "function_call": (("none",), "offer functions as tools"),
    "audio": ((), "the policy writes text only"),
    "prediction": ((), "replies are sampled, never predicted"),
    "web_search_options": ((), "offer a tool of your own"),
    "reasoning_effort": ((), "how long the policy thinks is what it learns; set max_tokens"),
    "verbosity": ((), "how much the policy says is what it learns; set max_tokens"),
    "moderation": ((), "nothing here moderates"),
}
_EMPTY: tuple[Json, ...] = (None, [], "", {})


class ChatCompletions(ChatDialect):
    """Reads and writes chat completions; also what vLLM adds to them for training (`return_token_ids`)."""

    name = "chat"

    @override
    def read(self, body: Mapping[str, Json]) -> ChatRequest:
        require_known(body, read=_READ, neutral=_NEUTRAL, without_effect=_WITHOUT_EFFECT)
        messages = [
            _message(one, f"messages[{place}]")
            for place, one in enumerate(of_type(body.get("messages"), list, "messages"))
        ]
        require_messages(messages, "messages")
        require_results(messages, "messages")
        streams = optional(body, "stream", bool) or False
        wants_logprobs = optional(body, "logprobs", bool) or False
        if streams and wants_logprobs:
            raise RequestInvalid("logprobs with stream is not supported: leave one of them out", parameter="logprobs")
        tools, forced = offered(_tools(body), openai_choice(body.get("tool_choice")))
        asked = [optional(body, name, int) for name in ("max_completion_tokens", "max_tokens")]
        return ChatRequest(
            model=of_type(body.get("model", ""), str, "model"),
            messages=messages,
            tools=tools,
            form=read_form(body.get("response_format"), "response_format", tools=tools) or forced,
            max_tokens=min((one for one in asked if one is not None), default=None),
            temperature=number(body, "temperature"),
            top_p=number(body, "top_p"),
            top_k=vllm_top_k(body),
            seed=optional(body, "seed", int),
            stop=stop_strings(body.get("stop"), "stop"),
            streams=streams,
            streams_usage=streams_usage(body),
            wants_logprobs=wants_logprobs,
            wants_token_ids=optional(body, "return_token_ids", bool) or False,
        )

    @override
    def whole(self, request: ChatRequest, answer: Answer) -> dict[str, Json]:
        reply = answer.reply
        message: dict[str, Json] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reasoning := reply.message.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        if reply.tool_calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [_call(call) for call in reply.tool_calls]
        choice: dict[str, Json] = {
            "index": 0,
            "message": message,
            "finish_reason": _finish_reason(answer),
            "logprobs": _logprobs(answer) if request.wants_logprobs else None,
        }
        whole: dict[str, Json] = {
            **_head("chat.completion", request, answer.answer_id, answer.created_s),
            "choices": [choice],
            "usage": usage(answer),
        }
        if request.wants_token_ids:
            choice["token_ids"] = reply.completion.token_ids.tolist()
            whole["prompt_token_ids"] = list(answer.prompt_token_ids)
        return whole

    @override
    def events(self, request: ChatRequest, answer_id: str, created_s: int) -> Events:
        return _Chunks(request, answer_id, created_s)

    @override
    def error(self, failure: Failure) -> dict[str, Json]:
        return openai_error(failure)


class _Chunks(Events):
    """One answer as `chat.completion.chunk` events."""

    def __init__(self, request: ChatRequest, answer_id: str, created_s: int) -> None:
        self._request = request
        head = _head("chat.completion.chunk", request, answer_id, created_s)
        self._usage = {"usage": None} if request.streams_usage else {}
        self._head = b"data: " + msgspec.json.encode({**head, **self._usage})[:-1]
        self._sent_text = ""
        self._sent_reasoning = ""

    @override
    def begin(self) -> Iterable[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    @override
    def text(self, delta: str) -> Iterable[bytes]:
        self._sent_text += delta
        yield self._chunk({"content": delta})

    @override
    def reasoning(self, delta: str) -> Iterable[bytes]:
        self._sent_reasoning += delta
        yield self._chunk({"reasoning_content": delta})

    @override
    def end(self, answer: Answer) -> Iterable[bytes]:
        reply = answer.reply
        if rest := unsent(self._sent_reasoning, reply.message.get("reasoning_content") or ""):
            yield from self.reasoning(rest)
        if rest := unsent(self._sent_text, reply.content):
            yield from self.text(rest)
        for place, call in enumerate(reply.tool_calls):
            yield self._chunk({"tool_calls": [{"index": place, **_call(call)}]})
        more: dict[str, Json] = {}
        if self._request.wants_token_ids:
            more["token_ids"] = reply.completion.token_ids.tolist()
            more["prompt_token_ids"] = list(answer.prompt_token_ids)
        yield self._chunk({}, finish_reason=_finish_reason(answer), **more)
        if self._request.streams_usage:
            head = self._head[: -len(b',"usage":null')]
            yield head + b',"choices":[],"usage":' + msgspec.json.encode(usage(answer)) + b"}\n\n"
        yield b"data: [DONE]\n\n"

    @override
    def fail(self, failure: Failure) -> Iterable[bytes]:
        yield b"data: " + msgspec.json.encode(ChatCompletions().error(failure)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Json], *, finish_reason: str | None = None, **more: Json) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
        return self._head + b',"choices":[' + msgspec.json.encode(choice) + b"]}\n\n"


def _message(message: Json, name: str) -> Message:
    given = of_type(message, dict, name)
    read = _of_role(given, name)
    if read["role"] != "tool" and (who := given.get("name")):  # a tool's may take the place of its role
        read["name"] = of_type(who, str, f"{name}.name")
    return read


def _of_role(given: Mapping[str, Json], name: str) -> Message:
    role = given.get("role")
    match role:
        case "system" | "developer":
            return {"role": "system", "content": _content(given, name)}
        case "user":
            return {"role": "user", "content": _content(given, name)}
        case "assistant":
            return _assistant(given, name)
        case "tool":
            call_id = of_type(given.get("tool_call_id"), str, f"{name}.tool_call_id")
            return {"role": "tool", "content": _content(given, name, "tool_call_id"), "tool_call_id": call_id}
    raise RequestInvalid(
        f"{name}.role is {shown(role)}; it must be system, developer, user, assistant or tool", parameter=f"{name}.role"
    )


def _content(message: Mapping[str, Json], name: str, *more: str) -> str:
    _require_known(message, ("role", "content", "name", *more), name)
    return text_of(message.get("content"), f"{name}.content")


def _assistant(given: Mapping[str, Json], name: str) -> Message:
    _require_known(given, ("role", "content", "name", "tool_calls", "reasoning_content", "reasoning"), name)
    content = given.get("content")
    message: Message = {
        "role": "assistant",
        "content": "" if content is None else text_of(content, f"{name}.content"),
    }
    if reasoning := given.get("reasoning_content") or given.get("reasoning"):
        message["reasoning_content"] = of_type(reasoning, str, f"{name}.reasoning_content")
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [
            _read_call(call, f"{name}.tool_calls[{place}]")
            for place, call in enumerate(of_type(calls, list, f"{name}.tool_calls"))
        ]
    return message


def _require_known(message: Mapping[str, Json], known: tuple[str, ...], name: str) -> None:
    for field, value in message.items():
        if field not in known and field not in _MESSAGE_WITHOUT_EFFECT and value not in _EMPTY:
            raise RequestInvalid(f"{name}.{field} is not supported: leave it out", parameter=f"{name}.{field}")


def _read_call(call: Json, name: str) -> ToolCall:
    given = of_type(call, dict, name)
    if given.get("type", "function") != "function":
        raise RequestInvalid(f"{name} is no call of a function: the policy calls functions only", parameter=name)
    function = of_type(given.get("function"), dict, f"{name}.function")
    return {
        "id": of_type(given.get("id", ""), str, f"{name}.id"),
        "type": "function",
        "function": {
            "name": of_type(function.get("name"), str, f"{name}.function.name"),
            "arguments": arguments_of(function.get("arguments"), f"{name}.function.arguments"),
        },
    }


def _tools(body: Mapping[str, Json]) -> list[ToolSpec]:
    tools = []
    for place, tool in enumerate(optional(body, "tools", list) or []):
        name = f"tools[{place}]"
        if of_type(tool, dict, name).get("type") != "function":
            raise RequestInvalid(
                f"{name} is of type {shown(tool.get('type'))}: the policy calls functions only", parameter=name
            )
        tools.append(function_of(of_type(tool.get("function"), dict, f"{name}.function"), f"{name}.function"))
    return tools


def _head(kind: str, request: ChatRequest, answer_id: str, created_s: int) -> dict[str, Json]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": created_s, "model": request.model}


def _call(call: ToolCall) -> dict[str, Json]:
    """As clients expect it: arguments are JSON."""
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments_text(call)},
    }


def _finish_reason(answer: Answer) -> str:
    if answer.reply.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if answer.reply.tool_calls else "stop"


def _logprobs(answer: Answer) -> dict[str, Json]:
    logprobs = answer.reply.completion.logprobs.tolist()
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
            for text, logprob in zip(answer.token_texts, logprobs, strict=True)
        ],
        "refusal": None,
    }


def _bytes(text: str) -> list[int] | None:
    """Those of a token; None where its text does not tell them, since it is part of a character."""
    return None if "\ufffd" in text else list(text.encode())
