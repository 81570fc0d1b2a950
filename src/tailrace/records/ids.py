"""Names of things that flow, kept apart by the type checker."""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
RolloutId = NewType("RolloutId", str)
RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)
