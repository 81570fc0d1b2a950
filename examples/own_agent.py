"""Your own environment as a plain coroutine: ask the policy, return a number.

    tailrace train quickstart --environment.name examples.own_agent:first_names

Run it from the folder above this one. The reward is the share of names that are in the reply, in order.
"""

from difflib import SequenceMatcher
from itertools import islice, permutations

from tailrace.environments import EnvironmentSpec, Policy, Task


async def agent(task: Task, policy: Policy) -> float:
    """One rollout: one question, one answer, one reward."""
    question = "Sort these names alphabetically, one per line:\n" + "\n".join(task["names"])
    reply = await policy.chat([{"role": "user", "content": question}])
    return SequenceMatcher(None, reply.content.split("\n"), sorted(task["names"])).ratio()


NAMES = ["Max", "Ada", "Leo", "Eva", "Tom", "Ben", "Zoe", "Ian"]
TASKS = [{"names": list(names)} for names in islice(permutations(NAMES, 5), 0, None, 13)]

first_names = EnvironmentSpec(name="first-names", agent=agent, train_tasks=TASKS, held_out=32)
