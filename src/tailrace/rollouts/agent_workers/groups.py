"""Groups as agent workers score them: a group goes there whole, and what its `score_group` made of it comes back.

Rollouts keep their identity: what came back is laid over those that went out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from tailrace.environments import AgentResult
from tailrace.environments.results import as_agent_result
from tailrace.errors import EnvironmentFailed
from tailrace.guards import guarded
from tailrace.records import FirstReply, Float32Array, Group, GroupId, Reward, Rollout, RolloutId, SamplingParams, Task
from tailrace.rollouts.agent_workers.branches import BranchData, ColumnData, columns_of, set_columns
from tailrace.rollouts.agent_workers.values import pack_values, unpack_values
from tailrace.rollouts.scoring.scorer import adopted, results_in, with_finite_numbers


class RolloutData(msgspec.Struct, frozen=True, array_like=True):
    """One rollout of a group that is to be scored."""

    rollout_id: RolloutId
    sampling: SamplingParams
    branches: list[BranchData]
    turns: int
    truncated: bool
    started_s: float
    ended_s: float
    attempt: int
    first_reply: FirstReply | None
    values: bytes

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutData:
        """Raises `EnvironmentFailed` for values that cannot be sent."""
        return cls(
            rollout.rollout_id,
            rollout.sampling,
            [BranchData.of(branch) for branch in rollout.branches],
            rollout.turns,
            rollout.truncated,
            rollout.started_s,
            rollout.ended_s,
            rollout.attempt,
            rollout.first_reply,
            _values_of(rollout),
        )

    def rollout(self, group_id: GroupId, task: Task) -> Rollout:
        """The rollout, in memory of its own."""
        made = Rollout(
            self.rollout_id,
            group_id,
            task,
            self.sampling,
            [data.branch() for data in self.branches],
            turns=self.turns,
            truncated=self.truncated,
            started_s=self.started_s,
            ended_s=self.ended_s,
            attempt=self.attempt,
            first_reply=self.first_reply,
        )
        _set_values(made, self.values)
        return made


class GroupData(msgspec.Struct, frozen=True, array_like=True):
    """A group, without its task."""

    group_id: GroupId
    index: int
    rollouts: list[RolloutData]
    values: bytes

    @classmethod
    def of(cls, group: Group) -> GroupData:
        """Raises `EnvironmentFailed` for values that cannot be sent."""
        return cls(
            group.group_id,
            group.index,
            [RolloutData.of(rollout) for rollout in group.rollouts],
            _values_of_group(group),
        )

    def group(self, task: Task) -> Group:
        """The group, in memory of its own."""
        rollouts = [data.rollout(self.group_id, task) for data in self.rollouts]
        return Group(self.group_id, task, rollouts, index=self.index, **unpack_values(self.values))


class RolloutChanges(msgspec.Struct, frozen=True, array_like=True):
    """What scoring may have changed of a rollout."""

    values: bytes
    columns: list[tuple[ColumnData, ...]]
    """Of each of its branches."""


class PartData(msgspec.Struct, frozen=True, array_like=True):
    """One of the groups that `score_group` returned."""

    is_same: bool
    """It is the very group that was scored."""
    rollout_ids: list[RolloutId]
    advantages: list[float | bytes] | None
    """A number for a rollout, or float32 [num_tokens]."""
    values: bytes


class GroupChanges(msgspec.Struct, frozen=True, array_like=True):
    """What scoring made of a group."""

    rollouts: dict[RolloutId, RolloutChanges]
    results: bytes | None
    """`AgentResult`s, one per rollout, where it returned those."""
    parts: list[PartData]
    """The group itself beside results; none where the group was discarded."""

    @classmethod
    def of(cls, returned: object, group: Group, members: Sequence[Rollout]) -> GroupChanges:
        """`returned` is what `score_group` made of `group`, which had these members.

        Raises `ScoringFailed` for what is no group of these and for advantages of which no batch can be made,
        `InvalidReward` for rewards that are none and cannot be sent, and `EnvironmentFailed` for other such values.
        """
        changes = {
            member.rollout_id: RolloutChanges(_values_of(member), [columns_of(branch) for branch in member.branches])
            for member in members
        }
        results = results_in(returned)
        parts = adopted(returned if results is None else group, group, members)
        packed = None
        if results is not None:
            packed = _pack_rewarded(results, f"group {group.group_id}", zip(results, members, strict=False))
        return cls(changes, packed, [_part(part, group) for part in parts])

    def applied(self, group: Group) -> list[Group] | list[AgentResult]:
        """Lay it over the group that was sent; what its `score_group` would have returned here.

        Raises `CorruptData` for what is none of it.
        """
        known = {rollout.rollout_id: rollout for rollout in group.rollouts}
        with guarded("an agent worker sent what is no score of this group"):
            for rollout_id, changes in self.rollouts.items():
                _set_values(known[rollout_id], changes.values)
                for branch, columns in zip(known[rollout_id].branches, changes.columns, strict=True):
                    set_columns(branch, columns)
            groups = [_applied(part, group, known) for part in self.parts]
            if self.results is None:
                return groups
            return [AgentResult(**fields) for fields in unpack_values(self.results)]


def _part(part: Group, group: Group) -> PartData:
    return PartData(
        part is group,
        [rollout.rollout_id for rollout in part.rollouts],
        None if part.advantages is None else [_packed(one) for one in part.advantages],
        _values_of_group(part),
    )


def _applied(data: PartData, group: Group, known: Mapping[RolloutId, Rollout]) -> Group:
    rollouts, values = [known[rollout_id] for rollout_id in data.rollout_ids], unpack_values(data.values)
    advantages = None if data.advantages is None else [_unpacked(one) for one in data.advantages]
    if not data.is_same:
        return Group(group.group_id, group.task, rollouts, advantages, **values)
    group.rollouts, group.advantages = rollouts, advantages
    group.metadata, group.metrics = values["metadata"], values["metrics"]
    return group


def _packed(advantage: float | Float32Array) -> float | bytes:
    return np.asarray(advantage, np.float32).tobytes() if isinstance(advantage, np.ndarray) else float(advantage)


def _unpacked(advantage: float | bytes) -> float | Float32Array:
    return np.frombuffer(advantage, np.float32) if isinstance(advantage, bytes) else advantage


def _values_of_group(group: Group) -> bytes:
    return pack_values({"metadata": group.metadata, "metrics": group.metrics}, f"group {group.group_id}")


def _values_of(rollout: Rollout) -> bytes:
    """Its reward is whatever users' code has set as one; its numbers are checked where it arrives."""
    result = None if rollout.reward is None else as_agent_result(rollout.reward)
    return _pack_rewarded(
        {
            "messages": rollout.messages,
            "sampled_texts": rollout.sampled_texts,
            "metrics": rollout.metrics,
            "metadata": rollout.metadata,
            "reward": None if result is None else Reward(cast(float, result.reward), result.metrics, result.info),
        },
        f"rollout {rollout.rollout_id}",
        () if result is None else [(result, rollout)],
    )


def _pack_rewarded(values: object, what: str, rewards: Iterable[tuple[AgentResult, Rollout]]) -> bytes:
    """`values`, with these rewards among them. Where they cannot be sent, a reward that is none is told of first.

    Raises `InvalidReward` for that, as beside the orchestrator, and `EnvironmentFailed`.
    """
    try:
        return pack_values(values, what)
    except EnvironmentFailed:
        for result, rollout in rewards:
            with_finite_numbers(result, rollout)
        raise


def _set_values(rollout: Rollout, packed: bytes) -> None:
    values: dict[str, Any] = unpack_values(packed)
    rollout.messages, rollout.metrics, rollout.metadata = values["messages"], values["metrics"], values["metadata"]
    rollout.sampled_texts = values["sampled_texts"]
    rollout.reward = None if values["reward"] is None else Reward(**values["reward"])
