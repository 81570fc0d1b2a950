"""Groups without a run or a trainer: tasks and a coroutine that plays one in, scored groups out.

Counts them and shows their progress. Scoring and failures are those of a run, by `scoring`.
"""

from tailrace.rollouts.gathering.progress import GroupBars, GroupCounts
from tailrace.rollouts.gathering.stream import gather_groups, stream_groups

__all__ = ["GroupBars", "GroupCounts", "gather_groups", "stream_groups"]
