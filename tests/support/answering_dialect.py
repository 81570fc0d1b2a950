"""A dialect behind a client's own transport: what a request gets where a test says what the policy replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx2
import numpy as np

from tailrace.gateway.dialects.protocol import Answer, ChatDialect, ChatRequest, Failure, RequestInvalid
from tailrace.records import Completion, FinishReason, Json, Message, Reply, ToolCall

PROMPT_TOKENS = 11


def reply(
    text: str = "",
    *,
    calls: Sequence[tuple[str, dict[str, Json]]] = (),
    reasoning: str | None = None,
    finish_reason: FinishReason = FinishReason.STOP,
    stop_string: str | None = None,
    tokens: int = 7,
) -> Reply:
    """What a policy says, as the gateway hands it to a dialect."""
    message: Message = {"role": "assistant", "content": text}
    tool_calls: list[ToolCall] = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    ids, logprobs = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    return Reply(
        message=message,
        finish_reason=finish_reason,
        completion=Completion(ids, logprobs, ids, finish_reason),
        tool_calls=tool_calls,
        stop_string=stop_string,
    )


@dataclass
class Answering:
    """Answers every request with the next of `replies`, the last one again and again."""

    dialect: ChatDialect
    replies: Sequence[Reply | Failure]
    pieces: Callable[[str], Sequence[str]] = lambda text: [text] if text else []
    """How a streamed text comes; what its pieces leave out comes with the end."""
    requests: list[ChatRequest] = field(default_factory=list)
    bodies: list[dict[str, Json]] = field(default_factory=list)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        """As an `httpx2.MockTransport` calls it."""
        self.bodies.append(json.loads(request.content))
        number = len(self.requests)
        said, answer_id = self.replies[min(number, len(self.replies) - 1)], f"{number:032x}"
        try:
            read = self.dialect.read(self.bodies[-1])
        except RequestInvalid as error:
            said = error.failure
        else:
            self.requests.append(read)
            if read.streams:
                events = b"".join(self._events(read, answer_id, said))
                return httpx2.Response(200, content=events, headers={"content-type": "text/event-stream"})
        if isinstance(said, Failure):
            return httpx2.Response(said.status, json=self.dialect.error(said), headers={"x-should-retry": "false"})
        return httpx2.Response(200, json=self.dialect.whole(read, _answer(said, answer_id)))

    def transport(self) -> httpx2.MockTransport:
        """For a client of OpenAI's or Anthropic's package."""
        return httpx2.MockTransport(self)

    def _events(self, request: ChatRequest, answer_id: str, said: Reply | Failure) -> Iterator[bytes]:
        events = self.dialect.events(request, answer_id, 1_795_000_000)
        yield from events.begin()
        yield events.keep_alive()
        if isinstance(said, Failure):
            yield from events.fail(said)
            return
        reasoning = said.message.get("reasoning_content", "")
        heard = self.pieces(reasoning)
        for piece in heard:
            yield from events.reasoning(piece)
        if "".join(heard) == reasoning:
            for piece in self.pieces(said.content):
                yield from events.text(piece)
        yield from events.end(_answer(said, answer_id))


def _answer(said: Reply, answer_id: str) -> Answer:
    return Answer(reply=said, answer_id=answer_id, created_s=1_795_000_000, prompt_tokens=PROMPT_TOKENS)
