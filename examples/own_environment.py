"""Your own environment as a class with reset and step: Tailrace asks the policy, you answer.

    tailrace train quickstart --environment.name examples.own_environment:guess_the_name

Run it from the folder above this one. The policy looks for a name and hears whether it comes earlier or later.
"""

from difflib import SequenceMatcher

from tailrace.environments import EnvironmentSpec, Message, Observation, Task

NAMES = ["Ada", "Ben", "Eva", "Ian", "Leo", "Max", "Tom", "Zoe"]


GUESSES = 3


class GuessTheName:
    """Made anew for every rollout, so its state is plain attributes.

    Every step has a reward, so that a rollout whose turns run out (`rollouts.max_turns`) is scored too. It is by
    degrees: a wrong guess earns something for each letter that it shares with the name.
    """

    def reset(self, task: Task) -> Observation:
        """Open the conversation."""
        self.name, self.guesses = task["name"], 0
        return Observation.user("Guess the name:\n" + "\n".join(NAMES))

    def step(self, reply: Message) -> Observation:
        """Judge the guess. A right one earns the guesses that it saves as well."""
        guess, self.guesses = reply["content"].strip(), self.guesses + 1
        likeness = SequenceMatcher(None, guess, self.name).ratio()
        if guess == self.name or self.guesses == GUESSES:
            return Observation.end(reward=likeness * (GUESSES + 1 - self.guesses) / GUESSES)
        return Observation.user("earlier" if guess > self.name else "later", reward=likeness / GUESSES)


guess_the_name = EnvironmentSpec(
    name="guess-the-name",
    environment=GuessTheName,
    train_tasks=[{"name": name} for name in NAMES],
    held_out=2,
    columns=("guesses",),  # saved with every rollout
    trusted=True,  # its synchronous code returns at once, so it needs no worker process
)
