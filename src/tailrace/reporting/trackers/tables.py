"""Rollouts as rows of a table, for trackers that have tables and no conversations."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.reporting.conversations import message_text, outcome_text
from tailrace.reporting.rollout_records import RolloutRecord

ROLLOUT_COLUMNS = [
    *("step", "rollout_id", "task_id", "environment", "outcome", "reward", "advantage"),
    *("turns", "completion_tokens", "truncated", "conversation"),
]


def rollout_rows(rollouts: Sequence[RolloutRecord]) -> list[list[str | int | float | bool | None]]:
    """One each, in the order of `ROLLOUT_COLUMNS`; long messages are cut."""
    return [
        [
            *(one.step, one.rollout_id, one.task_id, one.environment),
            outcome_text(one.outcome),
            *(one.reward, one.advantage, one.turns, one.completion_tokens, one.truncated),
            "\n\n".join(map(message_text, one.messages)),
        ]
        for one in rollouts
    ]
