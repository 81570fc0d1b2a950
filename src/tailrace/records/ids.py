"""Names of things that flow, kept apart by the type checker."""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
RolloutId = NewType("RolloutId", str)
RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)


def rollout_of(request_id: str) -> RolloutId:
    """Of the rollout for which a request was made: its name is `<rollout>/<branch>/<turn>`.

    >>> rollout_of("sort/7#3.0.1/0/2")
    'sort/7#3.0.1'
    """
    return RolloutId(request_id.rsplit("/", 2)[0])


def session_of(rollout_id: RolloutId, branch: int) -> SessionId:
    """The session of a rollout's branch.

    >>> session_of(RolloutId("task#1.0.0"), 2)
    'task#1.0.0/2'
    """
    return SessionId(f"{rollout_id}/{branch}")


def rollout_of_session(session_id: str) -> RolloutId:
    """Whose session it is.

    >>> rollout_of_session("task#1.0.0/2")
    'task#1.0.0'
    """
    return RolloutId(session_id.rpartition("/")[0])
