"""A policy with a tool of your own: it looks up who sits beside whom, then answers.

    tailrace train quickstart --environment.name examples.own_tool:seats

Run it from the folder above this one. `answer_tool_calls` runs the tool calls of a reply; what is wrong with one goes
back to the policy as a message.
"""

from difflib import SequenceMatcher

from tailrace.environments import AgentResult, EnvironmentSpec, Message, Policy, Task, ToolSpec, answer_tool_calls
from tailrace.errors import ToolError

NAMES = ["Max", "Ada", "Leo", "Eva", "Tom", "Ben", "Zoe", "Iris", "Paul", "Nina", "Hugo", "Vera", "Sam", "Ruth", "Karl"]
NEIGHBOURS = dict(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
SITS_BY = ToolSpec(
    name="sits_by",
    description="Who sits beside somebody.",
    parameters={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)


def sits_by(name: str) -> str:
    """The tool: an ordinary function of keyword arguments. A `ToolError` is an answer too."""
    if name not in NEIGHBOURS:
        raise ToolError(f"nobody is called {name}; there are: {', '.join(NEIGHBOURS)}")
    return NEIGHBOURS[name]


async def agent(task: Task, policy: Policy) -> AgentResult:
    """At most four turns: call the tool as often as needed, then answer without a call.

    The reward is by degrees, letter by letter: a model that calls no tool yet learns the form of an answer.
    """
    question = "Who sits beside them? One name per line:\n" + "\n".join(task["names"])
    messages: list[Message] = [{"role": "user", "content": question}]
    called = 0
    for _ in range(4):
        reply = await policy.chat(messages, tools=[SITS_BY])
        messages.append(reply.message)
        if not reply.tool_calls:
            break
        messages += await answer_tool_calls(reply, {"sits_by": sits_by}, [SITS_BY])
        called += len(reply.tool_calls)
    neighbours = "\n".join(NEIGHBOURS[name] for name in task["names"])
    right = SequenceMatcher(None, reply.content.strip(), neighbours).ratio()
    return AgentResult(0.8 * right + 0.2 * (called > 0), metrics={"right": right, "tool_calls": called})


seats = EnvironmentSpec(
    name="seats",
    agent=agent,
    train_tasks=[{"names": [first, second]} for first in NAMES for second in NAMES if first != second],
    held_out=16,
    trusted=True,
)
