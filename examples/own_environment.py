"""Your own environment as a class with reset and step: Tailrace asks the policy, you answer.

    tailrace train quickstart --environment.name examples.own_environment:guess_the_name

Run it from the folder above this one. The policy looks for a name and hears whether it comes earlier or later.
"""

from tailrace.environments import EnvironmentSpec, Message, Observation, Task

NAMES = ["Ada", "Ben", "Eva", "Ian", "Leo", "Max", "Tom", "Zoe"]


class GuessTheName:
    """Made anew for every rollout, so its state is plain attributes.

    Every step has a reward, so that a rollout whose turns run out (`rollouts.max_turns`) is scored too.
    """

    def reset(self, task: Task) -> Observation:
        """Open the conversation."""
        self.name, self.guesses = task["name"], 0
        return Observation.user("Guess the name:\n" + "\n".join(NAMES))

    def step(self, reply: Message) -> Observation:
        """Judge the guess: the sooner the name is found, the more it earns."""
        guess, self.guesses = reply["content"].strip(), self.guesses + 1
        if guess == self.name or self.guesses == 4:
            return Observation.end(reward=(guess == self.name) / self.guesses)
        return Observation.user("earlier" if guess > self.name else "later", reward=0.0)


guess_the_name = EnvironmentSpec(
    name="guess-the-name",
    environment=GuessTheName,
    train_tasks=[{"name": name} for name in NAMES],
    held_out=2,
    columns=("guesses",),  # saved with every rollout
    trusted=True,  # its synchronous code returns at once, so it needs no worker process
)
