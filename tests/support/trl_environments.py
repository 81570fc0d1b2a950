"""Environment classes in TRL's form: `IncrementEnv` is the one that TRL's documentation shows, unchanged."""

from __future__ import annotations

import random
import time
from enum import Enum
from typing import Any, Literal

from tailrace.environments import NamedReward, trl_environment


class IncrementEnv:
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class Given:
    """The data set owns the task: its columns are keywords of `reset`."""

    def __init__(self, bonus: float = 0.0) -> None:
        self._bonus = bonus

    def reset(self, target: int, hint: str = "") -> str:
        self.counter, self.target = 0, target
        return hint

    def get_reward(self) -> float:
        return float(self.counter == self.target) + self._bonus

    async def later(self, step: int) -> str:
        """Increment, in a while.

        Args:
            step: Value to add.
        """
        self.counter += step
        return f"{self.counter}"

    def fail(self) -> None:
        """Fail."""
        raise RuntimeError("broken on purpose")

    def look(self, at: str) -> list[dict[str, Any]]:
        """Look.

        Args:
            at: text or image
        """
        return [{"type": "text", "text": "it is "}, {"type": at, at: "there"}]


class Coroutines:
    """Runs on the event loop: all of it is async."""

    async def reset(self, **row: Any) -> str:
        self.pushed = 0
        return "Push."

    async def get_reward(self) -> float:
        return self.pushed / 4

    async def push(self) -> str:
        """Push."""
        self.pushed += 1
        return "pushed"

    async def order(self, numbers: list[int]) -> str:
        """Sort.

        Args:
            numbers: In any order.
        """
        numbers.sort()
        return f"{numbers}"


class Scoreless:
    def reset(self, **row: Any) -> str:
        self.said = "nothing"
        return "Say it."

    def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: What to say.
        """
        if word == "stall":
            time.sleep(600)
        self.said = word
        return word


class Untold:
    def reset(self) -> str:
        return "Do it."

    def get_reward(self) -> float:
        return 0.0

    def increment(self, step: int) -> int:
        return step


class Level(Enum):
    LOW = "low"
    HIGH = "high"


def set_everything(  # noqa: PLR0917
    flag: bool,
    level: Level,
    mode: Literal["fast", "slow", 3],
    names: list[str],
    sizes: dict[str, int],
    pair: tuple[int, str],
    either: int | str,
    perhaps: float | None = None,
    anything: Any = None,
    bare: list = (),  # type: ignore[type-arg, assignment]
    mixed: list[int] | dict[str, float] | None = None,
    drink: str = "tea",
) -> dict[str, str]:
    """
    Set everything there is,
    over two lines.

    Args:
        flag: Whether to.
        level: How much: a level
            that goes on in a second line.
        mode: The mode.
        names: Some names.

        sizes: Their sizes.
        pair: Two things.
        either: One or the other.
        perhaps: Or nothing.
        anything: At all.
        bare: A list.
        mixed: Both.
        drink: The beverage (choices: ["tea", "coffee"])

    Returns:
        What was set.

    Raises:
        ValueError: never
    """
    raise ValueError


def said_so(environments: list[Any], **columns: Any) -> list[float]:
    return [float(environment.said == "yes") for environment in environments]


def brief(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float]:
    return [1.0 / len(completion) for completion in completions]


def last_words(environments: list[Any], prompts: list[list[Any]], completions: list[list[Any]]) -> list[float]:
    """Thousands of messages in the prompt, and of characters of the first message of the completion."""
    return [
        1000 * len(prompt) + len(completion[0]["content"])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def given_state(environments: list[Any], completion_ids: list[list[int]]) -> list[float]:
    return [0.0]


given = trl_environment(
    Given,
    train_tasks=[
        {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "To 3"}], "target": 3},
        {"prompt": "To 2", "target": 2, "hint": ", please"},
    ],
)
shown_before = trl_environment(
    Scoreless,
    name="shown_before",
    train_tasks=[{"prompt": [{"role": role, "content": role} for role in ("user", "assistant", "user")]}],
    rewards={"last_words": last_words},
)
said = trl_environment(Scoreless, name="said", rewards={"said_so": NamedReward(said_so, 0.5), "brief": brief})
