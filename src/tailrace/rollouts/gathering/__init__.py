"""Groups without a run or a trainer: tasks and a coroutine that plays one in, scored groups out.

Counts and shows where they are. What runs here and how it fails is `scoring`, as in a run.
"""

from tailrace.rollouts.gathering.progress import GroupBars, GroupCounts
from tailrace.rollouts.gathering.stream import gather_groups, stream_groups

__all__ = ["GroupBars", "GroupCounts", "gather_groups", "stream_groups"]
