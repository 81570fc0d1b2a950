"""Lines of verifiers' files: episodes of `traces.jsonl`, and rollouts of the older `results.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from tailrace.dashboard.others.placed import Placed, digest, finite, messages_of
from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import Json, Outcome
from tailrace.reporting.evaluation_figures import EVALUATED
from tailrace.reporting.rollout_records import RolloutRecord, VersionRange
from tailrace.reporting.sinks import Kind

_CUT_BY = frozenset({"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length"})


class _Named(msgspec.Struct):
    id: str = ""
    name: str | None = None


class _Policy(msgspec.Struct):
    start: int
    end: int


class _Work(msgspec.Struct):
    type: str = "eval"
    step: int = 0
    policy: _Policy | None = None


class _Run(msgspec.Struct):
    work: _Work = msgspec.field(default_factory=_Work)


class _Task(msgspec.Struct):
    data: dict[str, Json] = {}
    key: str | None = None
    hash: str | None = None


class _Error(msgspec.Struct):
    type: str = "error"
    message: str = ""


class _Reward(msgspec.Struct):
    score: float
    weight: float = 1.0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Call(msgspec.Struct):
    model: str | None = None
    finish_reason: str | None = None
    usage: _Usage | None = None
    error: _Error | None = None


class _Node(msgspec.Struct):
    message: dict[str, Json]
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []


class _Span(msgspec.Struct):
    start: float = 0.0
    end: float = 0.0


class _Timing(msgspec.Struct):
    start: float = 0.0
    agent: _Span = msgspec.field(default_factory=_Span)
    scoring: _Span = msgspec.field(default_factory=_Span)


class _Agent(msgspec.Struct):
    name: str = "agent"


class _Trace(msgspec.Struct):
    id: str
    task: _Task = msgspec.field(default_factory=_Task)
    agent: _Agent = msgspec.field(default_factory=_Agent)
    nodes: list[_Node] = []
    calls: list[_Call] = []
    rewards: dict[str, _Reward | None] = {}
    metrics: dict[str, float | None] = {}
    info: dict[str, Json] = {}
    ok: bool = False
    stop_condition: str | None = None
    errors: list[_Error] = []
    timing: _Timing = msgspec.field(default_factory=_Timing)


class _Episode(msgspec.Struct):
    traces: list[_Trace]
    id: str = ""
    env: _Named = msgspec.field(default_factory=_Named)
    group: _Named | None = None
    run: _Run | None = None
    task: _Task = msgspec.field(default_factory=_Task)
    errors: list[_Error] = []


class _Tokens(msgspec.Struct):
    input_tokens: float = 0.0
    output_tokens: float = 0.0


class _Times(msgspec.Struct):
    start_time: float = 0.0
    generation: _Span = msgspec.field(default_factory=_Span)


class _Result(msgspec.Struct):
    example_id: int | str
    prompt: Json = None
    completion: Json = None
    reward: float | None = None
    metrics: dict[str, float | None] = {}
    answer: Json = None
    info: Json = None
    task: Json = None
    error: Json = None
    is_truncated: bool = False
    stop_condition: str | None = None
    token_usage: _Tokens | None = None
    timing: _Times = msgspec.field(default_factory=_Times)


def placed_of_line(line: bytes, number: int, environment: str) -> list[Placed]:
    """The rollouts of a line: of an episode each agent's. `environment` is what it is called where the line says not.

    Raises `DataError` for a line that is neither.
    """
    with guarded("no line of verifiers'", DataError):
        given = _decoded(line)
        if "traces" in given:
            return list(_of_episode(msgspec.convert(given, _Episode), environment))
        return [_of_result(msgspec.convert(given, _Result), number, environment)]


def _decoded(line: bytes) -> dict[str, Json]:
    """Python's own JSON writes NaN, which is none."""
    try:
        return msgspec.json.decode(line, type=dict[str, Json])
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(line), dict[str, Json])


def _of_episode(episode: _Episode, environment: str) -> Iterator[Placed]:
    work = _Work() if episode.run is None else episode.run.work
    for trace in episode.traces:
        yield _of_trace(trace, episode, work, episode.env.name or episode.env.id or environment)
    if not episode.traces:  # it failed before there was one
        yield _of_trace(_Trace(id=episode.id, task=episode.task, errors=episode.errors), episode, work, environment)


def _of_trace(trace: _Trace, episode: _Episode, work: _Work, environment: str) -> Placed:
    kind: Kind = "step" if work.type == "train" else "evaluation"
    task = trace.task if trace.task.data or trace.task.key else episode.task
    task_id = f"{environment}/{task.key or task.hash or digest(task.data)}"
    rewards = {name: None if reward is None else reward.score * reward.weight for name, reward in trace.rewards.items()}
    given = [reward for reward in rewards.values() if reward is not None]
    leaf, num_branches = _branches(trace.nodes)
    logprobs = [value for node in trace.nodes for value in node.logprobs]
    errors = trace.errors or episode.errors
    sampled = sum(sum(node.mask) for node in trace.nodes) or sum(
        call.usage.completion_tokens for call in trace.calls if call.usage is not None
    )
    ended_s = max(trace.timing.scoring.end, trace.timing.agent.end)
    record = RolloutRecord(
        rollout_id=trace.id,
        group_id=episode.group.id if episode.group is not None else f"{task_id}#{work.step}",
        task_id=task_id,
        environment=environment,
        step=work.step,
        outcome=_outcome(kind, work.step, errors if not trace.ok else []),
        error="" if not errors else f"{errors[-1].type}: {errors[-1].message}",
        reward=finite(sum(given)) if given else None,
        reward_components={name: finite(value) for name, value in rewards.items()},
        messages=messages_of([node.message for node in _path(trace.nodes, leaf)], "user"),
        task=task.data,
        metadata={"agent": trace.agent.name, "stopped by": trace.stop_condition, **trace.info},
        turns=sum(node.sampled for node in trace.nodes),
        branches=num_branches,
        tokens=sum(len(node.token_ids) for node in trace.nodes) or sampled,
        completion_tokens=sampled,
        truncated=trace.stop_condition in _CUT_BY
        or next((call.finish_reason for call in reversed(trace.calls) if call.error is None), None) == "length",
        versions=None if work.policy is None else _versions(work.policy),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        started_s=trace.timing.start,
        duration_s=max(0.0, ended_s - trace.timing.start) if ended_s else 0.0,
        metrics=trace.metrics,
    )
    return Placed(kind, record, next((call.model for call in trace.calls if call.model), ""))


def _outcome(kind: Kind, step: int, errors: list[_Error]) -> Outcome:
    if errors:
        return Outcome.failed(errors[-1].type)
    return EVALUATED if kind == "evaluation" else Outcome.trained(step)


def _versions(policy: _Policy) -> VersionRange:
    return VersionRange(policy.start, policy.end, (policy.start + policy.end) / 2)


def _branches(nodes: list[_Node]) -> tuple[int | None, int]:
    """The newest message that nothing follows, and how many such there are."""
    followed = {node.parent for node in nodes}
    leaves = [place for place in range(len(nodes)) if place not in followed]
    return (leaves[-1] if leaves else None), len(leaves)


def _path(nodes: list[_Node], leaf: int | None) -> list[_Node]:
    """From the first message to this one. Parents stand before what follows them."""
    found: list[_Node] = []
    while leaf is not None:
        found.append(nodes[leaf])
        parent = nodes[leaf].parent
        leaf = parent if parent is not None and 0 <= parent < leaf else None
    return found[::-1]


def _of_result(result: _Result, number: int, environment: str) -> Placed:
    name = result.task if isinstance(result.task, str) else environment
    task_id = f"{name}/{result.example_id}"
    usage, answer = result.token_usage or _Tokens(), messages_of(result.completion, "assistant")
    error = _error_text(result.error)
    record = RolloutRecord(
        rollout_id=f"{task_id}#{number}",
        group_id=task_id,
        task_id=task_id,
        environment=name,
        step=0,
        outcome=Outcome.failed(error.partition(":")[0][:80]) if error else EVALUATED,
        error=error,
        reward=finite(result.reward),
        reward_components={name: finite(value) for name, value in result.metrics.items()},
        messages=[*messages_of(result.prompt, "user"), *answer],
        task={key: value for key, value in (("answer", result.answer), ("info", result.info)) if value},
        metadata={"stopped by": result.stop_condition},
        turns=sum(message.get("role") == "assistant" for message in answer),
        branches=1,
        tokens=int(usage.input_tokens + usage.output_tokens),
        completion_tokens=int(usage.output_tokens),
        truncated=result.is_truncated,
        started_s=result.timing.start_time,
        duration_s=max(0.0, result.timing.generation.end - result.timing.generation.start),
    )
    return Placed("evaluation", record)


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return f"{error.get('error', 'error')}: {error.get('message', '')}"
    return str(error) if error else ""
