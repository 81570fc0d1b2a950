"""Processes for users' synchronous environments and reward functions: one that never returns is killed.

In: an environment's settings, tasks, replies, conversations. Out: observations and what reward functions returned, or
an error that costs one rollout. A worker knows nothing of generation, and its parent never runs that code itself.
"""

from tailrace.rollouts.workers.pool import WorkerPool

__all__ = ["WorkerPool"]
