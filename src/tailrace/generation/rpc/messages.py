"""What a generator process and its client tell each other: a msgpack header, then arrays as raw bytes, one a frame.

A client begins with a hello that names its protocol version: whatever else changes, that message stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace import errors
from tailrace.errors import CorruptData, EngineFailed, TailraceError
from tailrace.generation.engines.protocol import EngineStatistics, SampledTokens
from tailrace.records import (
    Array,
    Completion,
    FinishReason,
    Int32Array,
    ModelStateDictRef,
    PayloadChunk,
    RequestId,
    SamplingParams,
)
from tailrace.transport.payloads.slabs import checked_bytes

PROTOCOL = 3
"""Version of what both sides say; a hello of another one is refused."""

TO_ALL = -1
"""The call id of what answers no call: reports, and errors that concern the whole conversation."""

Frames: TypeAlias = Sequence[bytes | memoryview]


class CompletionHeader(msgspec.Struct, frozen=True):
    """A completion without its arrays, which follow as frames: token ids, log-probabilities, policy versions.

    After those come routed experts, where the client shares no payload store with the server (`payload_frames`).
    """

    finish_reason: FinishReason
    metrics: dict[str, float]
    routed_experts: tuple[PayloadChunk, ...] = ()
    mixed_spans: tuple[tuple[int, int], ...] = ()
    payload_frames: int = 0
    """So many of `routed_experts`, the last ones, came along; their references mean nothing but type and shape."""


class _Call(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    call_id: int
    """Chosen by the client, unique on its connection; the reply repeats it."""


class GenerateCall(_Call, frozen=True, kw_only=True):
    """Frames: the prompt's token ids, then the prefix's arrays where there is one."""

    request_id: str
    session_id: str
    group_id: str
    sampling: SamplingParams
    prefix: CompletionHeader | None = None


class HelloCall(_Call, frozen=True, kw_only=True):
    """The first message of a client; from then on it is sent reports. Answered once the engine is built."""

    protocol: int
    epoch: str = ""
    """Of the client's run. A stand-alone generator serves one run at a time, each with the engine's first weights."""


class LeaveCall(_Call, frozen=True, kw_only=True):
    """The client goes, the server stays. Has no reply."""


class UploadCall(_Call, frozen=True, kw_only=True):
    """A piece of a model state dict's file, for a server without shared memory. Frames: the bytes. Pieces in order."""

    version: int
    num_bytes: int
    """Of the whole file."""
    offset: int


class AbortCall(_Call, frozen=True, kw_only=True):
    """Cancels the call of the same id, whose reply nobody waits for any more. Has no reply of its own."""


class LoadCall(_Call, frozen=True, kw_only=True):
    """Install a published model state dict."""

    ref: ModelStateDictRef


class PauseCall(_Call, frozen=True, kw_only=True):
    """Take every running request off the engine, for as long as this client lives or until it resumes."""


class ResumeCall(_Call, frozen=True, kw_only=True):
    """End this client's pause; requests go on once no other client's is left."""


class InterruptCall(_Call, frozen=True, kw_only=True):
    """Hand requests back to their callers as they are."""

    request_ids: frozenset[str] | None = None
    """All where None."""


class StatisticsCall(_Call, frozen=True, kw_only=True):
    """Ask for the engine's statistics; answered once the engine is built."""


class CloseCall(_Call, frozen=True, kw_only=True):
    """End the generator and the server; answered when the engine is closed."""


AnyCall: TypeAlias = (
    HelloCall
    | LeaveCall
    | GenerateCall
    | AbortCall
    | LoadCall
    | UploadCall
    | PauseCall
    | ResumeCall
    | InterruptCall
    | StatisticsCall
    | CloseCall
)


class WelcomeReply(_Call, frozen=True, kw_only=True):
    """The engine is built and serves."""

    protocol: int
    model: str
    """Name of the model that it was started with."""
    statistics: EngineStatistics


class ReportReply(_Call, frozen=True, kw_only=True):
    """How busy the engine is; sent unasked, every so often."""

    statistics: EngineStatistics
    received: int
    """Requests of this client that had arrived by then."""
    is_paused: bool = False
    """Whether requests wait because some client said so."""


class UploadedReply(_Call, frozen=True, kw_only=True):
    """The piece was written; a `LoadCall` may name `uri` once all of them were."""

    uri: str


class ChunkReply(_Call, frozen=True, kw_only=True):
    """Tokens of a request that goes on. Frames: token ids, log-probabilities, policy versions."""

    mixed_cache_tokens: int = 0
    """See `SampledTokens`."""


class CompletionReply(_Call, frozen=True, kw_only=True):
    """The end of a request, whole. Frames: the completion's arrays."""

    completion: CompletionHeader


class LoadedReply(_Call, frozen=True, kw_only=True):
    """The version that is installed now."""

    version: int


class ReleasedReply(_Call, frozen=True, kw_only=True):
    """Pausing, resuming or interrupting is done."""

    requests: int
    """Taken off the engine, or handed back."""


class StatisticsReply(_Call, frozen=True, kw_only=True):
    """The engine's statistics."""

    statistics: EngineStatistics


class ClosedReply(_Call, frozen=True, kw_only=True):
    """The engine is closed."""


class ErrorReply(_Call, frozen=True, kw_only=True):
    """The call raised; `kind` names a class of `tailrace.errors`."""

    kind: str
    message: str


AnyReply: TypeAlias = (
    WelcomeReply
    | ReportReply
    | ChunkReply
    | CompletionReply
    | LoadedReply
    | UploadedReply
    | ReleasedReply
    | StatisticsReply
    | ClosedReply
    | ErrorReply
)


class _CallId(msgspec.Struct):
    call_id: int = TO_ALL


_CALL_IDS = msgspec.msgpack.Decoder(_CallId)
_CALLS: msgspec.msgpack.Decoder[AnyCall] = msgspec.msgpack.Decoder(AnyCall)
_REPLIES: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def unpack_call(header: bytes) -> AnyCall:
    """A call from its header. Raises `CorruptData` for bytes that are none."""
    try:
        return _CALLS.decode(header)
    except msgspec.DecodeError as error:
        raise CorruptData(f"a generator was sent what is no call: {error}") from error


def call_id_of(header: bytes) -> int:
    """Of what may be no call: so that an error reaches the one whom it concerns; `TO_ALL` where there is none."""
    try:
        return _CALL_IDS.decode(header).call_id
    except msgspec.DecodeError:
        return TO_ALL


def unpack_prompt(frames: Frames) -> Int32Array:
    """The prompt of a `GenerateCall`. Raises `CorruptData`."""
    try:
        return np.frombuffer(frames[0], np.int32)
    except (IndexError, ValueError) as error:
        raise CorruptData(f"a call of generate came without its prompt's token ids: {error}") from error


def unpack_reply(header: bytes) -> AnyReply:
    """A reply from its header. Raises `CorruptData` for bytes that are none."""
    try:
        return _REPLIES.decode(header)
    except msgspec.DecodeError as error:
        raise CorruptData(f"a generator answered with what is no reply: {error}") from error


def pack_completion(completion: Completion) -> tuple[CompletionHeader, list[bytes]]:
    """A completion as header and frames."""
    header = CompletionHeader(
        completion.finish_reason, completion.metrics, completion.routed_experts, completion.mixed_spans
    )
    return header, [pack_array(a) for a in (completion.token_ids, completion.logprobs, completion.policy_versions)]


def pack_chunk(call_id: int, chunk: SampledTokens) -> tuple[ChunkReply, list[bytes]]:
    """A chunk as reply and frames."""
    reply = ChunkReply(call_id=call_id, mixed_cache_tokens=chunk.mixed_cache_tokens)
    return reply, [pack_array(a) for a in (chunk.token_ids, chunk.logprobs, chunk.policy_versions)]


def unpack_chunk(request_id: str, reply: ChunkReply, frames: Frames) -> SampledTokens:
    """The chunk that `pack_chunk` took apart; arrays are read-only views of the frames."""
    token_ids, logprobs, policy_versions = frames
    return SampledTokens(
        request_id=RequestId(request_id),
        token_ids=np.frombuffer(token_ids, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        policy_versions=np.frombuffer(policy_versions, np.int32),
        mixed_cache_tokens=reply.mixed_cache_tokens,
    )


def unpack_completion(header: CompletionHeader, frames: Frames) -> Completion:
    """The completion that `pack_completion` took apart; arrays are read-only views of the frames.

    Raises `CorruptData` for frames that are none.
    """
    try:
        token_ids, logprobs, policy_versions, *payloads = frames
        if len(payloads) != header.payload_frames:
            raise ValueError(f"{len(payloads)} payloads came, and {header.payload_frames} were announced")
        for chunk in header.routed_experts:
            _require_sound(chunk)
        return Completion(
            token_ids=np.frombuffer(token_ids, np.int32),
            logprobs=np.frombuffer(logprobs, np.float32),
            policy_versions=np.frombuffer(policy_versions, np.int32),
            finish_reason=header.finish_reason,
            routed_experts=header.routed_experts,
            mixed_spans=header.mixed_spans,
            metrics=header.metrics,
        )
    except ValueError as error:
        raise CorruptData(f"a completion came without its arrays: {error}") from error


def _require_sound(chunk: PayloadChunk) -> None:
    """Raise `CorruptData` for a chunk that goes backwards, or beyond what its reference says of itself."""
    entries = chunk.ref.shape[0] if chunk.ref is not None and len(chunk.ref.shape) == 3 else 0
    if not (0 <= chunk.start <= chunk.end and 0 <= chunk.offset <= entries - (chunk.end - chunk.start)):
        raise CorruptData(f"{chunk} is not within its payload")


def unpack_payloads(header: CompletionHeader, frames: Frames) -> list[tuple[PayloadChunk, NDArray[np.generic]]]:
    """The routed experts that came along with a completion: their chunks, and read-only views of the frames.

    Raises `CorruptData` for frames that are not what their references say.
    """
    if not 0 <= header.payload_frames <= min(len(header.routed_experts), len(frames)):
        raise CorruptData(f"a completion announced {header.payload_frames} payloads and names fewer")
    chunks = header.routed_experts[len(header.routed_experts) - header.payload_frames :]
    unpacked = []
    for chunk, frame in zip(chunks, frames[len(frames) - header.payload_frames :], strict=True):
        if chunk.ref is None or checked_bytes(chunk.ref) != len(frame):
            raise CorruptData(f"routed experts of {len(frame):,} bytes came for {chunk.ref}")
        unpacked.append((chunk, np.frombuffer(frame, chunk.ref.dtype).reshape(chunk.ref.shape)))
    return unpacked


def pack_array(array: Array) -> bytes:
    """An array's bytes."""
    return array.tobytes()


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
    return kind(reply.message)
