"""Messages between the orchestrator and an agent worker: length-prefixed msgpack over a pair of sockets, no pickle.

orchestrator ── Hello; Play, Score, Cancel; Answer, AnswerChunk, AnswerError; Taken; Close ──► worker
orchestrator ◄── Ready; Opened; Ask, Withdraw; Played, Scored; Beat ─────────────────── worker

A rollout is known by its id, a request by a number that the worker chose. Values that users' code made travel as bytes
inside a message: they may be anything that msgpack knows, NumPy's numbers and arrays included.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from tailrace import errors
from tailrace.environments import AgentResult
from tailrace.errors import CorruptData, LifecycleError, RolloutError, TailraceError
from tailrace.guards import guarded
from tailrace.records import (
    Completion,
    FirstReply,
    GenerationRequest,
    GroupId,
    Message,
    RolloutId,
    SamplingParams,
    Task,
)
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.agent_workers.groups import GroupChanges, GroupData
from tailrace.rollouts.agent_workers.segments import Placed
from tailrace.rollouts.agent_workers.values import pack_values, require_shallow
from tailrace.rollouts.chat.rendering import RendererSource
from tailrace.rollouts.endpoints import EndpointsEntry
from tailrace.rollouts.run_facts import RunFacts
from tailrace.rollouts.scoring.usage import JudgeUsage
from tailrace.tracing.phase_totals import PhaseUsage
from tailrace.transport.channels import decode_array


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class Hello(_Message, frozen=True, kw_only=True):
    """The first message: where modules are found, and all that rollouts are played with."""

    name: str
    module_path: list[str]
    rollouts: str
    """Section `rollouts` of the settings, as JSON."""
    environments: dict[str, str]
    """Settings of every environment by its name, as JSON."""
    needs_all: bool
    """Whether the worker is of no use where it cannot load one of them."""
    renderer: RendererSource
    facts: RunFacts
    endpoints: EndpointsEntry | None
    lag_interval_s: float
    stall_s: float
    trace_folder: str
    """Where its part of the trace goes; empty: nowhere."""
    trace_bytes: int


class Play(_Message, frozen=True, kw_only=True):
    """Play a rollout."""

    number: int
    """By which the process says, when it ends, that it ran this."""
    rollout_id: RolloutId
    group_id: GroupId
    task: bytes
    sampling: SamplingParams
    attempt: int
    is_evaluation: bool


class ScoredBy(enum.StrEnum):
    """What scores a group."""

    SCORE_GROUP = "score_group"
    REWARDS = "rewards"
    """Named reward functions for whole groups."""
    JUDGE = "judge"


class Score(_Message, frozen=True, kw_only=True):
    """Score a group."""

    number: int
    """As of `Play`."""
    key: str
    task: bytes
    group: GroupData
    by: ScoredBy


class Cancel(_Message, frozen=True, kw_only=True):
    """End a rollout or a score; answered with `Played` or `Scored` once that has ended."""

    key: str
    """The rollout's id, or the score's key."""


class Answer(_Message, frozen=True, kw_only=True):
    """The completion of a request."""

    call_id: int
    completion: Completion


class AnswerChunk(_Message, frozen=True, kw_only=True):
    """Tokens of a request that goes on."""

    call_id: int
    chunk: Completion


class AnswerError(_Message, frozen=True, kw_only=True):
    """The request failed."""

    call_id: int
    failure: Failure


class Taken(_Message, frozen=True, kw_only=True):
    """Branches that lay in shared memory were read."""

    segment: int


class Close(_Message, frozen=True, kw_only=True):
    """End the process."""


class Ready(_Message, frozen=True, kw_only=True):
    """Environments and renderer are loaded, or why they are not."""

    thread_id: int
    """Of the thread that runs the event loop."""
    failure: Failure | None = None
    not_loaded: dict[str, Failure] = {}
    """Environments that are played elsewhere, where not all are needed."""


class Opened(_Message, frozen=True, kw_only=True):
    """A rollout that a client outside has claimed is open to it."""

    rollout_id: RolloutId
    answer: bytes
    """What the client is answered: see `AnswerClient`."""


class Ask(_Message, frozen=True, kw_only=True):
    """Sample a completion."""

    call_id: int
    key: str
    """Of the rollout or score that asks, as in `Cancel`."""
    request: GenerationRequest
    wants_chunks: bool


class Withdraw(_Message, frozen=True, kw_only=True):
    """A request is wanted no more."""

    call_id: int
    key: str
    """As in `Ask`."""
    has_enough: bool
    """Its chunks had all that is wanted of it, and it counts as no waste."""


class Played(_Message, frozen=True, kw_only=True):
    """A rollout has ended: what it has sampled, and what came of it."""

    rollout_id: RolloutId
    branches: list[BranchData]
    placed: Placed | None
    """Where branches lie that are too large for the message; it has none then."""
    turns: int
    truncated: bool
    report: bytes
    """`RolloutReport`."""
    first_reply: FirstReply | None = None
    failure: Failure | None = None
    """It is lost."""
    score_failure: Failure | None = None
    """It was played to its end, and its reward failed."""


class Scored(_Message, frozen=True, kw_only=True):
    """What came of a score."""

    key: str
    judge: JudgeUsage
    """What a judge took for it."""
    changes: GroupChanges | None = None
    failure: Failure | None = None


class Beat(_Message, frozen=True, kw_only=True):
    """Its event loop runs; sent every so often."""

    lag_max_s: float
    """Since the last one."""
    phases: dict[str, PhaseUsage]
    """What each took since the last one."""


class Failure(msgspec.Struct, frozen=True):
    """An error that was raised in a worker; `kind` names a class of `tailrace.errors`."""

    kind: str
    message: str
    reason: str = ""
    may_pass: bool = False
    is_mistake: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Whatever is not of Tailrace's tree is a defect of its own code, and concerns the run."""
        if isinstance(error, RolloutError):
            kind = error.known_kind().__name__
            return cls(kind, str(error), error.reason, error.may_pass, error.is_mistake)
        if isinstance(error, TailraceError):
            return cls(error.known_kind().__name__, str(error))
        return cls(LifecycleError.__name__, f"an agent worker failed: {type(error).__name__}: {error}")

    def error(self) -> TailraceError:
        """The error that `of` took apart. Raises `CorruptData` for a kind that `tailrace.errors` lacks."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, TailraceError)):
            raise CorruptData(f"an agent worker told of an unknown kind of error, {self.kind!r}: {self.message}")
        with guarded(f"an agent worker told of a {self.kind} that says {self.message!r} and no more"):
            error = kind(self.message)
        if isinstance(error, RolloutError):
            error.reason, error.may_pass, error.is_mistake = self.reason, self.may_pass, self.is_mistake
        return error


class RolloutReport(msgspec.Struct, frozen=True):
    """What users' code made of a rollout."""

    messages: list[Message]
    metrics: dict[str, float]
    reported: AgentResult | None
    """By its agent or environment; None where that did not end."""
    scored: AgentResult | None
    """By reward functions, in place of it."""
    sampled_texts: dict[int, str] = {}


class _UncheckedReport(msgspec.Struct):
    """`RolloutReport` before its values are checked, which is done where they are used."""

    messages: Any
    metrics: dict[str, float]
    reported: dict[str, Any] | None
    scored: dict[str, Any] | None
    sampled_texts: dict[int, str]


Order: TypeAlias = Hello | Play | Score | Cancel | Answer | AnswerChunk | AnswerError | Taken | Close
Report: TypeAlias = Ready | Opened | Ask | Withdraw | Played | Scored | Beat

_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order, dec_hook=decode_array)
_REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report, dec_hook=decode_array)
_TASKS = msgspec.msgpack.Decoder(Task)
_UNCHECKED = msgspec.msgpack.Decoder(_UncheckedReport)


def unpack_order(body: bytes) -> Order:
    """In a worker, which trusts the orchestrator."""
    return _ORDERS.decode(body)


def unpack_report(body: bytes) -> Report:
    """Raises `CorruptData` for bytes that are none: users' code lives beside what writes them."""
    with guarded("an agent worker sent what is no message"):
        return _REPORTS.decode(body)


def pack_task(task: Task) -> bytes:
    """Raises `EnvironmentFailed` for a row that cannot be sent."""
    return pack_values(task, f"the row of task {task.task_id}")


def unpack_task(packed: bytes) -> Task:
    """The task that was packed."""
    return _TASKS.decode(packed)


def pack_rollout_report(report: RolloutReport) -> bytes:
    """Raises `EnvironmentFailed` for values that cannot be sent."""
    return pack_values(report, "what the rollout reported")


def unpack_rollout_report(packed: bytes) -> RolloutReport:
    """Raises `CorruptData` for bytes that are none."""
    with guarded("an agent worker sent what is no result of a rollout"):
        fields = _UNCHECKED.decode(packed)
        require_shallow([fields.messages, fields.reported, fields.scored])
        reported, scored = _as_result(fields.reported), _as_result(fields.scored)
        return RolloutReport(fields.messages, fields.metrics, reported, scored, fields.sampled_texts)


def first_reply_of(played: Played) -> FirstReply | None:
    """Where its conversation has its first reply. Raises `CorruptData` for a branch that was not sent."""
    first = played.first_reply
    if first is not None and first.branch is not None and not 0 <= first.branch < len(played.branches):
        raise CorruptData(
            f"an agent worker sent {len(played.branches)} branches of a rollout, and says that branch {first.branch} "
            "holds its conversation"
        )
    return first


def _as_result(fields: Mapping[str, Any] | None) -> AgentResult | None:
    return None if fields is None else AgentResult(**fields)
