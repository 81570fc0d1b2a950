"""vLLM's tokens in, tokens out, streamed: tokens as they are sampled, each of them once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from typing_extensions import override

from tailrace.gateway.dialects.protocol import Answer, Failure, ReplyUpdate, Stream
from tailrace.gateway.dialects.token_output import ended, tokens
from tailrace.gateway.dialects.usage import usage
from tailrace.generation.completions import tail
from tailrace.records import Completion, Json

_encode = msgspec.json.Encoder().encode
_RUNNING: Mapping[str, Json] = {"finish_reason": None, "weight_versions": None}


class TokenEvents(Stream):
    """One answer in parts; the last one has what no other did, the finish reason and the versions of all tokens."""

    def __init__(self, request_id: str, error: Callable[[Failure], dict[str, Json]], *, tells_usage: bool) -> None:
        self._request_id, self._error, self._tells_usage = request_id, error, tells_usage
        self._sent = 0

    @override
    def begin(self) -> Iterable[bytes]:
        return ()

    @override
    def more(self, heard: Sequence[ReplyUpdate]) -> Iterable[bytes]:
        for chunk in heard:
            if isinstance(chunk, Completion):
                self._sent += chunk.num_tokens
                yield self._event([{**tokens(chunk), **_RUNNING}])

    @override
    def end(self, answer: Answer) -> Iterable[bytes]:
        completion = answer.reply.completion
        yield self._event([{**tokens(tail(completion, self._sent)), **ended(completion)}])
        if self._tells_usage:
            yield self._event([], usage=usage(answer))
        yield b"data: [DONE]\n\n"

    @override
    def fail(self, failure: Failure) -> Iterable[bytes]:
        yield b"data: " + _encode(self._error(failure)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Json]], **more: Json) -> bytes:
        return b"data: " + _encode({"request_id": self._request_id, "choices": choices, **more}) + b"\n\n"
