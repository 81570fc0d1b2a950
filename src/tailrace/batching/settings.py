"""Settings of the way from scored groups to batches."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, Field

AdvantageName: TypeAlias = Literal["mean", "mean_std", "rloo", "maxrl", "reward"]


class BatchingSettings(BaseModel, extra="forbid", frozen=True):
    """What a batch is made of."""

    batch_size: int = Field(
        64, ge=1, le=2**20, description="Rollouts per optimizer step; a multiple of rollouts.group_size."
    )
    row_tokens: int = Field(
        8192, ge=16, le=2**24, description="Tokens per packed row; a rollout's longest branch must fit."
    )
    advantage: AdvantageName = Field(
        "mean",
        description="A rollout's reward less its group's mean (mean), divided by its group's standard deviation too"
        " (mean_std) or by that mean (maxrl; rewards of 0 and above), or less the mean of its siblings alone (rloo);"
        " or the reward as it is (reward), for whiten_advantages.",
    )
    whiten_advantages: bool = Field(
        False,
        description="Shift and scale the advantages of each batch so that over its tokens that bear loss their mean is"
        " 0 and their standard deviation 1; with advantage = reward that is REINFORCE++, with mean its variant with a"
        " baseline.",
    )
    filter_zero_spread: bool = Field(
        True,
        description="Leave out groups whose rewards are all equal: they carry no gradient. Counted as filtered. Not"
        " with advantage = reward, where they teach, too.",
    )

    @property
    def leaves_out_equal_rewards(self) -> bool:
        """Whether a group is left out for that. Of rewards as they are it would be groups of zeros alone: a bias."""
        return self.filter_zero_spread and self.advantage != "reward"
