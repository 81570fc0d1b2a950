"""What came back from scoring a group, and what did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.records import Group, Rollout

SCORE_DROPPED = "score_dropped"
UNSCORED = "unscored"


@dataclass(frozen=True, slots=True)
class Scored:
    """The members of one group after its scoring; each is in exactly one of these."""

    groups: list[Group]
    """Only of rollouts with a reward, none empty."""
    unscored: list[Rollout]
    """Came back without a reward: their scoring failed and `on_error = keep_unscored` keeps them to be read."""
    dropped: list[Rollout]
    """Did not come back."""


def sort_scored(members: Sequence[Rollout], groups: Sequence[Group]) -> Scored:
    """Tell apart what may be trained on. `members` are those that were scored, `groups` what came of them."""
    unscored = [rollout for group in groups for rollout in group.rollouts if rollout.reward is None]
    kept = {rollout.rollout_id for group in groups for rollout in group.rollouts}
    for group in groups if unscored else ():
        group.rollouts = [rollout for rollout in group.rollouts if rollout.reward is not None]
    dropped = [rollout for rollout in members if rollout.rollout_id not in kept]
    return Scored([group for group in groups if group.rollouts], unscored, dropped)
