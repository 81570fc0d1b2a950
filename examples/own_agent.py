"""Your own environment as a plain coroutine: ask the policy, return a number.

    tailrace train quickstart --environment.name examples.own_agent:first_names

Run it from the folder above this one. The reward is the share of names that are in the reply, in order.
"""

from difflib import SequenceMatcher
from random import Random

from tailrace.environments import EnvironmentSpec, Policy, Task


async def agent(task: Task, policy: Policy) -> float:
    """One rollout: one question, one answer, one reward."""
    question = "Sort these names by their last letter, one per line:\n" + "\n".join(task["names"])
    reply = await policy.chat([{"role": "user", "content": question}])
    return SequenceMatcher(None, reply.content.split("\n"), sorted(task["names"], key=backwards)).ratio()


def backwards(name: str) -> str:
    """What a name is sorted by."""
    return name[::-1].lower()


# fmt: off
NAMES = [
    "Aaron", "Ada", "Amy", "Ben", "Clara", "Emma", "Eric", "Eva", "Felix", "Fiona", "Grace", "Harry",
    "Ian", "Ivan", "Jane", "Julia", "Leo", "Luke", "Max", "Nina", "Olga", "Oscar", "Paul", "Rosa",
    "Tom", "Will", "Zoe",
]
# fmt: on
RANDOM = Random(0)
TASKS = [{"names": RANDOM.sample(NAMES, 4)} for _ in range(4000)]

first_names = EnvironmentSpec(name="first-names", agent=agent, train_tasks=TASKS, held_out=32)
