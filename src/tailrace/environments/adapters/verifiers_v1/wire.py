"""What verifiers 0.4's environment server is told, and what it answers: messages of msgpack over ZMQ.

    client  ─► [request id, b"health" | b"run" | b"cancel", request]
    server  ─► [request id, b"delta", delta]*, then [request id, b"reply", reply]

While a rollout runs, its traces grow by deltas; the reply has what is left, and how long each trace must have become.
Of a trace only what is scored and recorded is kept here: the tokens were sampled by this very process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.errors import EnvironmentFailed
from tailrace.guards import guarded
from tailrace.records import Json

HEALTH, RUN, CANCEL = b"health", b"run", b"cancel"
DELTA = b"delta"


class TraceError(msgspec.Struct, frozen=True):
    """Something that went wrong, where it was caught."""

    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


class Reward(msgspec.Struct, frozen=True):
    """One of a trace's weighted sum."""

    score: float
    weight: float = 1.0


class Scalars(msgspec.Struct, frozen=True):
    """What of a trace is sent again whenever it changes; what has not changed is unset."""

    rewards: dict[str, Reward | None] | msgspec.UnsetType = msgspec.UNSET
    """None: it was not scored."""
    metrics: dict[str, float | None] | msgspec.UnsetType = msgspec.UNSET
    info: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    ok: bool | msgspec.UnsetType = msgspec.UNSET
    stop_condition: str | msgspec.UnsetType | None = msgspec.UNSET


class _Delta(msgspec.Struct, frozen=True):
    trace: str
    discard: bool = False
    nodes: list[msgspec.Raw] = []
    calls: list[msgspec.Raw] = []
    errors: list[TraceError] = []
    changed: Scalars = msgspec.field(name="set", default_factory=Scalars)


class _Length(msgspec.Struct, frozen=True):
    id: str
    nodes: int
    calls: int


class _Head(msgspec.Struct, frozen=True):
    errors: list[TraceError] = []


class _Reply(msgspec.Struct, frozen=True):
    success: bool = True
    error: str | None = None
    head: _Head | None = None
    traces: list[_Length] = []


class Trace:
    """One attempt of one agent, as far as it is known."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        """What its requests carry as `X-Session-ID`."""
        self.nodes, self.calls = 0, 0
        self.errors: list[TraceError] = []
        self.rewards: dict[str, Reward | None] = {}
        self.metrics: dict[str, float | None] = {}
        self.info: dict[str, Any] = {}
        self.ok = False
        self.stop_condition: str | None = None

    def grow(self, delta: _Delta) -> None:
        """Take what is new."""
        self.nodes += len(delta.nodes)
        self.calls += len(delta.calls)
        self.errors += delta.errors
        for name in Scalars.__struct_fields__:
            if (value := getattr(delta.changed, name)) is not msgspec.UNSET:
                setattr(self, name, value)


class Episode:
    """A rollout, put together from its deltas."""

    def __init__(self) -> None:
        self._traces: dict[str, Trace] = {}

    def hear(self, data: bytes) -> None:
        """A delta. Raises `EnvironmentFailed` for bytes that are none."""
        with guarded("verifiers sent a delta that cannot be read", EnvironmentFailed):
            delta = msgspec.msgpack.decode(data, type=_Delta)
        if delta.discard:
            self._traces.pop(delta.trace, None)
        else:
            self._traces.setdefault(delta.trace, Trace(delta.trace)).grow(delta)

    def finished(self, data: bytes) -> Trace:
        """The one trace, once the reply came. Raises `EnvironmentFailed` where it failed, or a delta was lost."""
        with guarded("verifiers sent a reply that cannot be read", EnvironmentFailed):
            reply = msgspec.msgpack.decode(data, type=_Reply)
        if not reply.success:
            raise EnvironmentFailed(f"verifiers: {reply.error}")
        failures = reply.head.errors if reply.head is not None else []
        if len(reply.traces) != 1:
            said = failures[-1] if failures else f"it ended with {len(reply.traces)} traces, and must have one"
            raise EnvironmentFailed(f"verifiers: {said}")
        (length,) = reply.traces
        trace = self._traces.get(length.id)
        if trace is None or (trace.nodes, trace.calls) != (length.nodes, length.calls):
            raise EnvironmentFailed(f"verifiers: a part of what trace {length.id} said never came")
        if not trace.ok or failures:
            said = (trace.errors or failures or [TraceError("unknown", "it is not ok, and says nothing of why")])[-1]
            raise EnvironmentFailed(f"verifiers: {said}")
        return trace


def run_request(task: Mapping[str, Json], client: Mapping[str, Json]) -> bytes:
    """A request to play a task, whose policy answers where `client` says. Sampling is the run's own."""
    request = {"task_data": dict(task), "client": dict(client), "model": "policy", "sampling": {}}
    return msgspec.msgpack.encode(request)


def cancel_request(request_id: bytes) -> bytes:
    """A request to end what another one began."""
    return msgspec.msgpack.encode({"request_id": request_id.decode()})
