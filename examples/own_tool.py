"""A policy with a tool of your own: it looks up who sits where, then answers.

    tailrace train quickstart --environment.name examples.own_tool:seats

Run it from the folder above this one. `answer_tool_calls` runs the tool calls of a reply; what is wrong with one goes
back to the policy as a message.
"""

from difflib import SequenceMatcher

from tailrace.environments import AgentResult, EnvironmentSpec, Message, Policy, Task, ToolSpec, answer_tool_calls
from tailrace.errors import ToolError

SEATS = dict(
    enumerate(
        [
            "Max",
            "Ada",
            "Leo",
            "Eva",
            "Tom",
            "Ben",
            "Zoe",
            "Iris",
            "Paul",
            "Nina",
            "Hugo",
            "Vera",
            "Sam",
            "Ruth",
            "Karl",
            "Olga",
        ],
        start=1,
    )
)
SITS_AT = ToolSpec(
    name="sits_at",
    description="Who sits at a desk.",
    parameters={"type": "object", "properties": {"desk": {"type": "integer"}}, "required": ["desk"]},
)


def sits_at(desk: int) -> str:
    """The tool: an ordinary function of keyword arguments. A `ToolError` is an answer too."""
    if desk not in SEATS:
        raise ToolError(f"there is no desk {desk}; there are 1 to {len(SEATS)}")
    return SEATS[desk]


async def agent(task: Task, policy: Policy) -> AgentResult:
    """At most four turns: call the tool as often as needed, then answer without a call.

    The reward is by degrees: a model that calls no tool yet learns the form of an answer, and some names by heart.
    """
    first, second = task["desks"]
    question = f"Who sits at the desks {first} and {second}? One name per line."
    messages: list[Message] = [{"role": "user", "content": question}]
    called = 0
    for _ in range(4):
        reply = await policy.chat(messages, tools=[SITS_AT])
        messages.append(reply.message)
        if not reply.tool_calls:
            break
        messages += await answer_tool_calls(reply, {"sits_at": sits_at})
        called += len(reply.tool_calls)
    names = [SEATS[first], SEATS[second]]
    right = SequenceMatcher(None, reply.content.strip(), "\n".join(names)).ratio()
    return AgentResult(0.8 * right + 0.2 * (called > 0), metrics={"right": right, "tool_calls": called})


seats = EnvironmentSpec(
    name="seats",
    agent=agent,
    train_tasks=[{"desks": [first, second]} for first in SEATS for second in SEATS if first != second],
    held_out=16,
    trusted=True,
)
