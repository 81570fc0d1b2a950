"""A policy with the tools of an MCP server: it looks up who sits beside whom, then answers.

    pip install "tailrace[mcp]"
    tailrace train quickstart --environment.name examples.mcp_agent:seats

Run it from the folder above this one. The server is started once for all rollouts (`shared`), since its tool has no
state; without that every rollout has one of its own. `mcp_agent` asks the task's `prompt` and calls tools until a reply
calls none.
"""

from difflib import SequenceMatcher
from pathlib import Path

from tailrace.environments import AgentResult, EnvironmentSpec, McpServer, Message, Task, mcp_agent

NAMES = ["Max", "Ada", "Leo", "Eva", "Tom", "Ben", "Zoe", "Iris", "Paul", "Nina", "Hugo", "Vera", "Sam", "Ruth", "Karl"]
NEIGHBOURS = dict(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
server = McpServer(command=["python", str(Path(__file__).with_name("mcp_seats_server.py"))], shared=True)


def reward(task: Task, messages: list[Message]) -> AgentResult:
    """By degrees, letter by letter: a model that calls no tool yet learns the form of an answer."""
    reply = messages[-1]["content"].strip() if messages[-1]["role"] == "assistant" else ""
    right = SequenceMatcher(None, reply, "\n".join(NEIGHBOURS[name] for name in task["names"])).ratio()
    called = any(message["role"] == "tool" for message in messages)
    return AgentResult(0.8 * right + 0.2 * called, metrics={"right": right})


seats = EnvironmentSpec(
    name="mcp-seats",
    agent=mcp_agent(server),
    check=server.check,
    close=server.close,
    reward=reward,
    train_tasks=[
        {"names": [first, second], "prompt": f"Who sits beside them? One name per line:\n{first}\n{second}"}
        for first in NAMES
        for second in NAMES
        if first != second
    ],
    held_out=16,
    trusted=True,
)
