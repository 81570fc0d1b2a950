"""Your own environment as a class with reset and step: Tailrace asks the policy, you answer.

    tailrace train quickstart --environment.name examples.own_environment:guess_the_name

Run it from the folder above this one. The policy looks for the middle one of five names in the alphabet, and hears
whether it comes earlier or later.
"""

import random
import re
from difflib import SequenceMatcher

from tailrace.environments import EnvironmentSpec, Message, Observation, Task

NAMES = ["Ada", "Ben", "Carl", "Daisy", "Eva", "Felix", "Grace", "Hugo", "Iris", "Jane", "Leo", "Max", "Nina", "Zoe"]
GUESSES = 3


def tasks(count: int) -> list[dict[str, list[str]]]:
    """Five names each; the same ones every time, as every process makes them anew."""
    draw = random.Random(0)
    return [{"names": draw.sample(NAMES, 5)} for _ in range(count)]


class GuessTheName:
    """Made anew for every rollout, so its state is plain attributes.

    Every step has a reward, so that a rollout whose turns run out (`rollouts.max_turns`) is scored too. It is by
    degrees: a reply that holds the name among others earns a part of it.
    """

    def reset(self, task: Task) -> Observation:
        """Open the conversation."""
        self.name, self.guesses = sorted(task["names"])[2], 0
        return Observation.user("Guess the middle one:\n" + "\n".join(task["names"]))

    def step(self, reply: Message) -> Observation:
        """Judge the guess. A right one earns the guesses that it saves as well."""
        guess, self.guesses = reply["content"].strip(), self.guesses + 1
        likeness = SequenceMatcher(None, re.findall(r"\w+", guess), [self.name]).ratio()
        if guess == self.name or self.guesses == GUESSES:
            return Observation.end(reward=likeness * (GUESSES + 1 - self.guesses) / GUESSES)
        return Observation.user("earlier" if guess > self.name else "later", reward=likeness / GUESSES)


guess_the_name = EnvironmentSpec(
    name="guess-the-name",
    environment=GuessTheName,
    train_tasks=tasks(512),
    held_out=32,
    columns=("name", "guesses"),  # saved with every rollout
    trusted=True,  # its synchronous code returns at once, so it needs no worker process
)
