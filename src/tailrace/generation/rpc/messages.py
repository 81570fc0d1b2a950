"""Messages between a generator process and its clients: msgpack, one call or reply, or an array of several.

Requests and completions travel as their records; frames follow for pieces of weights and payloads sent by value, after
a call or reply that is alone. The first message is a hello that names the protocol version, and stays readable across
versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace import errors
from tailrace.errors import CorruptData, EngineFailed, TailraceError
from tailrace.generation.engines.protocol import EngineLimits, EngineStatistics
from tailrace.generation.rpc.uploads import Upload
from tailrace.guards import guarded
from tailrace.models.identity import ModelIdentity
from tailrace.records import Completion, GenerationRequest, ModelStateDictRef, PayloadChunk
from tailrace.transport.channels import decode_array
from tailrace.transport.payloads.slabs import checked_bytes

PROTOCOL = 14
"""Version of what both sides say; a hello of another one is refused."""

TO_ALL = -1
"""The call id of what answers no call: reports, and errors that concern the whole conversation."""

Frames: TypeAlias = Sequence[bytes | memoryview]


class _Call(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    call_id: int
    """Chosen by the client, unique on its connection; the reply repeats it."""


class GenerateCall(_Call, frozen=True, kw_only=True):
    """Sample one completion."""

    request: GenerationRequest
    wants_chunks: bool = False
    """Whether tokens are to be sent while it runs."""


class HelloCall(_Call, frozen=True, kw_only=True):
    """The first message of a client; from then on it is sent reports. Answered once the engine is built."""

    protocol: int
    epoch: str = ""
    """Of the client's run. A stand-alone generator serves one run at a time, each with the engine's first weights."""
    brings_weights: bool = False
    """Whether this run will send weights, under versions that begin at 0 again."""
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of the random streams of requests that bring none; None: they go on."""


class LeaveCall(_Call, frozen=True, kw_only=True):
    """The client goes, the server stays. Has no reply."""


class UploadCall(_Call, frozen=True, kw_only=True):
    """A piece of a model state dict's file, or of a delta, for a server without shared memory. Frames: the bytes.

    Pieces come in order. A delta that cannot be applied is refused, and the sender sends the whole file.
    """

    version: int
    upload: Upload
    offset: int


class AbortCall(_Call, frozen=True, kw_only=True):
    """Cancels the call of the same id. Has no reply."""


class LoadCall(_Call, frozen=True, kw_only=True):
    """Install a published model state dict."""

    ref: ModelStateDictRef


class InterruptCall(_Call, frozen=True, kw_only=True):
    """Hand requests back to their callers as they are."""

    request_ids: frozenset[str] | None = None
    """All where None."""


class CloseCall(_Call, frozen=True, kw_only=True):
    """End the generator and the server; answered when the engine is closed."""

    reason: str = ""
    """Why, for people, where somebody else started it."""
    in_order: bool = True
    """False where it is of no use to the client."""


AnyCall: TypeAlias = (
    HelloCall | LeaveCall | GenerateCall | AbortCall | LoadCall | UploadCall | InterruptCall | CloseCall
)


class WelcomeReply(_Call, frozen=True, kw_only=True):
    """The engine is built and serves."""

    protocol: int
    model: ModelIdentity
    """That it was started with."""
    limits: EngineLimits
    statistics: EngineStatistics


class ReportReply(_Call, frozen=True, kw_only=True):
    """How busy the engine is; sent unasked, every so often."""

    statistics: EngineStatistics
    received: int
    """Requests of this client that had arrived by then."""


class LeavingReply(_Call, frozen=True, kw_only=True):
    """The generator wants to go, and asks to be let go; sent unasked."""

    reason: str


class UploadedReply(_Call, frozen=True, kw_only=True):
    """The piece was written; a `LoadCall` may name `uri` once all of them were."""

    uri: str


class ChunkReply(_Call, frozen=True, kw_only=True):
    """Tokens of a request that goes on."""

    chunk: Completion


class CompletionReply(_Call, frozen=True, kw_only=True):
    """The end of a request, whole. Frames: routed experts, where the client shares no payload store with the server."""

    completion: Completion
    payload_frames: int = 0
    """How many of the completion's `routed_experts`, the last ones, came along; of their references only type and shape
    count."""


class LoadedReply(_Call, frozen=True, kw_only=True):
    """The version that is installed now."""

    version: int


class InterruptedReply(_Call, frozen=True, kw_only=True):
    """The requests are on their way back."""

    requests: int
    """How many."""


class ClosedReply(_Call, frozen=True, kw_only=True):
    """The engine is closed."""


class ErrorReply(_Call, frozen=True, kw_only=True):
    """The call raised; `kind` names a class of `tailrace.errors`."""

    kind: str
    message: str


AnyReply: TypeAlias = (
    WelcomeReply
    | ReportReply
    | LeavingReply
    | ChunkReply
    | CompletionReply
    | LoadedReply
    | UploadedReply
    | InterruptedReply
    | ClosedReply
    | ErrorReply
)


class _CallId(msgspec.Struct):
    call_id: int = TO_ALL


_CALL_IDS = msgspec.msgpack.Decoder(_CallId)
_PARTS: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_CALLS: msgspec.msgpack.Decoder[AnyCall | list[AnyCall]] = msgspec.msgpack.Decoder(
    AnyCall | list[AnyCall], dec_hook=decode_array
)
_REPLIES: msgspec.msgpack.Decoder[AnyReply | list[AnyReply]] = msgspec.msgpack.Decoder(
    AnyReply | list[AnyReply], dec_hook=decode_array
)


def unpack_calls(message: bytes) -> list[AnyCall]:
    """Calls, in order. Raises `CorruptData` for bytes that are none."""
    with guarded("a generator was sent what is no call"):
        calls = _CALLS.decode(message)
    return calls if isinstance(calls, list) else [calls]


def parts_of(message: bytes) -> list[bytes]:
    """What may be calls, one by one; the message itself where it is no array."""
    try:
        with guarded("there are no parts"):
            return [bytes(part) for part in _PARTS.decode(message)]
    except CorruptData:
        return [message]


def call_id_of(message: bytes) -> int:
    """The id in what may be no call, so that an error can answer it; `TO_ALL` where there is none."""
    try:
        with guarded("there is no id"):
            return _CALL_IDS.decode(message).call_id
    except CorruptData:
        return TO_ALL


def unpack_replies(message: bytes) -> list[AnyReply]:
    """Replies, in order. Raises `CorruptData` for bytes that are none, and for payloads that cannot be what they say.

    Arrays are read-only views of a copy.
    """
    with guarded("a generator answered with what is no reply"):
        decoded = _REPLIES.decode(message)
    replies = decoded if isinstance(decoded, list) else [decoded]
    for reply in replies:
        if isinstance(reply, CompletionReply):
            for chunk in reply.completion.routed_experts:
                _require_sound(chunk)
    return replies


def _require_sound(chunk: PayloadChunk) -> None:
    """Raise `CorruptData` for a chunk that goes backwards, or beyond what its reference says of itself."""
    entries = chunk.ref.shape[0] if chunk.ref is not None and len(chunk.ref.shape) == 3 else 0
    if not (0 <= chunk.start <= chunk.end and 0 <= chunk.offset <= entries - (chunk.end - chunk.start)):
        raise CorruptData(f"{chunk} is not within its payload")


def unpack_payloads(reply: CompletionReply, frames: Frames) -> list[tuple[PayloadChunk, NDArray[np.generic]]]:
    """The routed experts that came along with a completion: their chunks, and read-only views of the frames.

    Raises `CorruptData` for frames that are not what their references say.
    """
    named = reply.completion.routed_experts
    if not reply.payload_frames == len(frames) <= len(named):
        raise CorruptData(
            f"a completion names {len(named)} payloads and announced {reply.payload_frames}; {len(frames)} came"
        )
    unpacked = []
    for chunk, frame in zip(named[len(named) - len(frames) :], frames, strict=True):
        if chunk.ref is None or checked_bytes(chunk.ref) != len(frame):
            raise CorruptData(f"routed experts of {len(frame):,} bytes came for {chunk.ref}")
        with guarded(f"routed experts are not {chunk.ref}"):
            unpacked.append((chunk, np.frombuffer(frame, chunk.ref.dtype).reshape(chunk.ref.shape)))
    return unpacked


def pack_error(call_id: int, error: Exception) -> ErrorReply:
    """An error as a reply; whatever is not of Tailrace's tree is the engine's failure."""
    if isinstance(error, TailraceError):
        return ErrorReply(call_id=call_id, kind=type(error).__name__, message=str(error))
    return ErrorReply(call_id=call_id, kind=EngineFailed.__name__, message=f"{type(error).__name__}: {error}")


def unpack_error(reply: ErrorReply) -> TailraceError:
    """The error that `pack_error` took apart. Raises `CorruptData` for a kind that `tailrace.errors` lacks."""
    kind = getattr(errors, reply.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, TailraceError)):
        raise CorruptData(f"the generator answered with an unknown kind of error, {reply.kind!r}: {reply.message}")
    with guarded(f"the generator answered with a {reply.kind} that says {reply.message!r} and no more"):
        return kind(reply.message)
