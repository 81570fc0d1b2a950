"""What a dialect reads and writes. No I/O: bytes come from and go to the server.

body ─read─► ChatRequest ... Answer ─whole─► body
                                   ─events─► server-sent events: begin, more*, end | fail
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import msgspec
from typing_extensions import override

from tailrace.errors import TailraceError
from tailrace.records import Completion, Json, Message, Reply, ToolSpec

ReplyUpdate: TypeAlias = str | Completion
"""What is known of a reply while it is sampled: more of its text, or more of its tokens."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that a client asks for, whatever its dialect. None: the client left it to the server."""

    model: str
    messages: list[Message]
    tools: list[ToolSpec] | None = None
    """What the policy may call; None also where the client forbids calls in this turn."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    form: JsonForm | None = None
    """What the answer's text has to be; None: any text."""
    streams: bool = False
    streams_usage: bool = False
    """Chat completions alone: whether a last chunk tells the usage."""
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    """vLLM's `return_token_ids`: the answer tells `prompt_token_ids` and `token_ids`."""
    follows: str | None = None
    """The `answer_id` of an earlier answer to this client: `messages` go on from there. None: they are all there is."""
    is_followed: bool = False
    """Whether a later request may follow its answer."""
    num_instructions: int = 0
    """Messages at the front that hold for this turn alone: one that follows it leaves them behind."""


class JsonForm(msgspec.Struct, frozen=True):
    """JSON of a schema."""

    schema: str
    """As JSON."""
    parameter: str
    """The field that asks for it."""
    forces_calls: bool = False
    """It is a list of calls, and no text for the client."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy said to a request, and what a client is told beside it."""

    reply: Reply
    answer_id: str
    """Unique, without the prefix that a dialect gives it (`chatcmpl-`, `resp_`, `msg_`)."""
    created_s: int
    """Seconds since the epoch."""
    prompt_tokens: int
    token_texts: tuple[str, ...] = ()
    """Of each sampled token, where the request wants log-probabilities."""
    prompt_token_ids: tuple[int, ...] = ()
    """Where the request wants token ids."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request gets no answer: a dialect makes its own error of it."""

    status: int
    """HTTP status: 400, 401, 404, 405, 408, 410, 413, 415, 422, 429, 500, 503."""
    message: str
    """One sentence: what was refused, and what to do."""
    parameter: str | None = None
    """The field of the request that it is about."""
    code: str | None = None
    """What OpenAI's clients tell its kind by, some of which then ask without that field."""


UNSUPPORTED_VALUE = "unsupported_value"


class RequestInvalid(TailraceError):
    """A request that cannot be read, or asks for what is not supported; `failure` says it by name."""

    def __init__(
        self, message: str, *, parameter: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.failure = Failure(status=status, message=message, parameter=parameter, code=code)

    @classmethod
    def of(cls, failure: Failure) -> RequestInvalid:
        """To raise a failure."""
        return cls(failure.message, parameter=failure.parameter, status=failure.status, code=failure.code)


class Stream(Protocol):
    """The server-sent events of one answer, as bytes that are ready to be sent. Called in order."""

    def begin(self) -> Iterable[bytes]:
        """Once, before anything else."""

    def more(self, heard: Sequence[ReplyUpdate]) -> Iterable[bytes]:
        """More of the reply is known."""

    def end(self, answer: Answer) -> Iterable[bytes]:
        """What has not been sent yet (the rest of the text, tool calls), why it ended, usage, and the end mark."""

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """The dialect's error in a stream that has begun, and its end mark."""

    def keep_alive(self) -> bytes:
        """Sent while nothing is sampled, so that no proxy closes the connection: a comment, which clients skip."""
        return b": nothing sampled yet\n\n"


class Events(Stream, Protocol):
    """Those of a conversation's next message."""

    @override
    def more(self, heard: Sequence[ReplyUpdate]) -> Iterable[bytes]:
        return self.text("".join(one for one in heard if isinstance(one, str)))

    def text(self, delta: str) -> Iterable[bytes]:
        """More of the reply's text."""

    def reasoning(self, delta: str) -> Iterable[bytes]:
        """More of its reasoning; all of it comes before the first text."""


class TurnRequest(Protocol):
    """One turn that a client asks for: of a conversation, or of tokens."""

    @property
    def streams(self) -> bool:
        """Whether it is answered by events."""


RequestT = TypeVar("RequestT", bound=TurnRequest)


class Dialect(Protocol[RequestT]):
    """One way to ask for a turn."""

    name: str

    def read(self, body: Mapping[str, Json]) -> RequestT:
        """A request's body (JSON, decoded). Raises `RequestInvalid`, naming every field that is not supported."""

    def whole(self, request: RequestT, answer: Answer) -> dict[str, Json]:
        """The body of an answer that is not streamed."""

    def events(self, request: RequestT, answer_id: str, created_s: int) -> Stream:
        """The events of one that is."""

    def error(self, failure: Failure) -> dict[str, Json]:
        """The body of an error response."""


class ChatDialect(Dialect[ChatRequest], Protocol):
    """One way to ask for a conversation's next message."""

    @override
    def events(self, request: ChatRequest, answer_id: str, created_s: int) -> Events: ...


class CountsTokens(Protocol):
    """A dialect in which a client may ask how many tokens a prompt has; its other methods are those of `Dialect`."""

    def read_prompt(self, body: Mapping[str, Json]) -> ChatRequest:
        """A request's body. Raises `RequestInvalid`."""

    def counted(self, num_tokens: int) -> dict[str, Json]:
        """The body of the answer."""

    def error(self, failure: Failure) -> dict[str, Json]:
        """The body of an error response."""
