"""What groups whose rewards are all equal say of the policy: all is learned, it has settled, or it cannot begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tailrace.records import Group, Rollout

CONVERGED_SHARE = 0.8
"""Of the rollouts of such groups: where as many earned the highest reward there was, or hardly less, all is learned."""
SCORED_SHARE = 0.25
"""Of all rollouts in a row that could not be trained on: those of such groups, at least, where they speak for all."""
SAMPLE_REPLIES = 2
"""Shown where rewards never differ."""
HARDLY_LESS = 0.1
"""Share of the highest reward, and of the range of rewards: a long right answer may earn less than a short one.

Of both, since one penalty of -100 makes a range in which all else is high, and 100 may be the lowest of rewards.
"""
HIGHEST = "the highest reward there was, or hardly less"
KEEPS_TRYING = (
    "and nothing moves it any more (a lower trainer.learning_rate, a higher rollouts.temperature or a bonus for "
    "entropy, trainer.loss.entropy, keeps it trying others for longer)"
)
"""What to change where a policy has become certain too soon."""


class EqualRewards:
    """Rewards of groups in a row that could not be trained on because each group's are all equal."""

    def __init__(self, reward_range: Callable[[str], tuple[float, float] | None]) -> None:
        """`reward_range`: the lowest and the highest that an environment ever gave; None while it trained nothing."""
        self._reward_range = reward_range
        self._rollouts: Counter[tuple[str, float]] = Counter()
        """By environment and reward."""
        self._samples: list[Rollout] = []
        """Of the newest groups one rollout each."""

    def add(self, group: Group) -> None:
        """One more group."""
        self._rollouts[group.task.environment, group.rewards[0]] += len(group.rollouts)
        self._samples = [*self._samples, group.rollouts[0]][-SAMPLE_REPLIES:]

    def clear(self) -> None:
        """A group could be trained on."""
        self._rollouts.clear()
        self._samples.clear()

    @property
    def solved(self) -> int:
        """Rollouts that earned the highest reward of their environment, or hardly less."""
        return sum(count for (name, reward), count in self._rollouts.items() if self._is_solved(name, reward))

    def have_converged(self, rollouts: int) -> bool:
        """Whether the last `rollouts`, failed ones among them, leave nothing to learn."""
        scored = self._rollouts.total()
        return scored >= SCORED_SHARE * rollouts and self.solved >= CONVERGED_SHARE * scored

    def describe_converged(self) -> str:
        """What says that nothing is left to learn of them."""
        rewards = {reward for name, reward in self._rollouts if self._is_solved(name, reward)}
        earned = f"{rewards.pop():g}, the highest reward there was" if len(rewards) == 1 else HIGHEST
        return (
            f"{self.solved} of the last {self._rollouts.total()} scored rollouts earned {earned}, and rewards are "
            "equal inside each group"
        )

    def describe(self) -> str:
        """What it says that rewards do not differ inside any group, with sample replies; empty without such groups."""
        if not self._samples:
            return ""
        samples = " and ".join(_sample(rollout) for rollout in self._samples)
        return f": {self._what()}. Replies: {samples}"

    def _what(self) -> str:
        rewards = [reward for _, reward in self._rollouts]
        lowest, highest = min(rewards), max(rewards)
        if any(self._reward_range(name) is not None for name, _ in self._rollouts):
            found = f"rewards, from {lowest:g} to {highest:g}, are equal inside each group"
            found = f"all rewards are {lowest:g}" if lowest == highest else found
            return (
                f"{found}, and {self.solved or 'none'} of the {self._rollouts.total()} rollouts earned {HIGHEST}: "
                f"the policy has settled on one way of answering before it was right, {KEEPS_TRYING}"
            )
        if lowest != highest:
            return f"rewards, from {lowest:g} to {highest:g}, are equal inside each group: replies differ too little"
        means = _MEANINGS.get(lowest, "the reward does not tell replies apart")
        return f"all rewards are {lowest:g}: {means} (a reward by degrees has something to teach either way)"

    def _is_solved(self, environment: str, reward: float) -> bool:
        if (rewards := self._reward_range(environment)) is None:
            return False
        lowest, highest = rewards
        return reward >= highest - HARDLY_LESS * min(highest - lowest, abs(highest))


_MEANINGS = {0.0: "the task is too hard for this model", 1.0: "the task is too easy for this model"}
"""Of one reward for all."""


def _sample(rollout: Rollout) -> str:
    """A rollout's last reply and its reward, for people."""
    replies = [str(message.get("content")) for message in rollout.messages if message["role"] == "assistant"]
    reward = "none" if rollout.reward is None else f"{rollout.reward.value:g}"
    return f"{(replies[-1] if replies else '')[:120]!r} (task {rollout.task.task_id}, reward {reward})"
