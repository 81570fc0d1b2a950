"""Names of things that flow, kept apart by the type checker."""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
RolloutId = NewType("RolloutId", str)
RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)
SampleId = NewType("SampleId", str)


def session_of(rollout_id: RolloutId, branch: int) -> SessionId:
    """The session of a rollout's branch.

    >>> session_of(RolloutId("task#1.0.0"), 2)
    'task#1.0.0/2'
    """
    return SessionId(f"{rollout_id}/{branch}")


def sample_of(rollout_id: RolloutId, branch: int) -> SampleId:
    """The training sample of a rollout's branch: no other one of the run has this name, whatever start it is of.

    >>> sample_of(RolloutId("task#1.0.0"), 2)
    'task#1.0.0/2'
    """
    return SampleId(f"{rollout_id}/{branch}")
