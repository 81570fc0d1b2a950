"""An environment class and a reward function as they were written for TRL; nothing in them is of Tailrace.

    tailrace train quickstart --environment.name examples.trl_increment:increment --trainer.learning_rate 2e-4

Run it from the folder above this one. The quickstart's model was never shown a tool, so it learns to be brief and no
more; with the recipe's own, higher learning rate it may settle on one reply before that is as brief as can be. The
class alone, `examples.trl_increment:IncrementEnv`, is an environment too.
"""

import random
from typing import Any

from tailrace.environments import NamedReward, trl_environment


class IncrementEnv:
    """Reach a number by adding."""

    def reset(self, **row: Any) -> str | None:
        """Draw a task; what is returned is the user's message."""
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        """Score the rollout from the state of the environment."""
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def brief(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float]:
    """A little for few letters, so that a model that calls no tool yet has something to learn."""
    return [1.0 / (1 + sum(len(message["content"]) for message in completion)) for completion in completions]


increment = trl_environment(IncrementEnv, rewards={"brief": NamedReward(brief, weight=0.1)})
