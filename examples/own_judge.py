"""No reward but a judge's, on the policy's own engine, of every group as soon as it is complete.

    tailrace train quickstart --environment.name examples.own_judge:names_by_key
    tailrace train quickstart --environment.name examples.own_judge:names_by_rank \\
        --environment.judge.url http://localhost:8000/v1 --environment.judge.model my-model

Run it from the folder above this one. `names_by_rank` asks the judge for a score of every reply, relative to the
others, which takes a model that can follow a rubric: here one behind an OpenAI-compatible endpoint; without `judge.url`
it is the policy's own engine, if you train such a model. The quickstart's can do nothing but sort names, so
`names_by_key` asks it for just that, once per group, and scores each reply by how much it is like the judge's: the form
of a judge's question and answer is yours to choose. A verdict that is not valid is asked for again, and never a reward.
"""

import itertools
import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from tailrace.environments import EnvironmentSpec, JudgeSettings, Message, Policy, Task
from tailrace.errors import JudgeFailed
from tailrace.records import Group

NAMES = ["Max", "Ada", "Leo", "Eva", "Tom", "Ben", "Zoe", "Ian"]
TASKS = [{"names": list(names)} for names in itertools.permutations(NAMES, 4)]


def question(task: Task) -> list[Message]:
    """What the policy is asked, and the judge."""
    return [{"role": "user", "content": "Sort these names alphabetically, one per line:\n" + "\n".join(task["names"])}]


def names_in(reply: str) -> list[str]:
    """In whatever layout."""
    return re.findall(r"\w+", reply)


async def agent(task: Task, policy: Policy) -> float:
    """One rollout. What it returns has no weight beside the judge's score; `reward_component/own` shows it."""
    reply = await policy.chat(question(task))
    return float(names_in(reply.content) == sorted(task["names"]))


class AnswerKey:
    """The judge answers the question itself; a reply scores by its likeness to that."""

    def prompt(self, group: Group, rubric: str) -> list[Message]:
        """The same question that the rollouts got."""
        return question(group.task)

    def scores(self, answer: str, group: Group) -> Sequence[float]:
        """From 0 to 1 per rollout, in their order."""
        key = names_in(answer)
        if sorted(key) != sorted(group.task["names"]):
            raise JudgeFailed(f"the key {key} does not hold every name once")
        replies = [names_in(rollout.messages[-1]["content"]) for rollout in group.rollouts]
        return [SequenceMatcher(None, reply, key).ratio() ** 4 for reply in replies]


names_by_key = EnvironmentSpec(
    name="names-by-key",
    agent=agent,
    train_tasks=TASKS,
    held_out=8,
    judge=JudgeSettings(temperature=0.8, max_tokens=24, retries=6),
    judge_format=AnswerKey(),
)

names_by_rank = EnvironmentSpec(
    name="names-by-rank",
    agent=agent,
    train_tasks=TASKS,
    held_out=8,
    judge=JudgeSettings(rubric="The names of the question, all of them, in alphabetical order, one per line."),
)
