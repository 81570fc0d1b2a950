"""An agent that is a program: `seats_program.py`, which looks up who sits beside whom and knows nothing of Tailrace.

    tailrace train quickstart --environment.name examples.own_program:seats

Run it from the folder above this one. Each rollout is a process, which finds the model where OpenAI's clients look for
theirs; what it earned is worked out from the conversation when it has ended.
"""

from __future__ import annotations

import sys
from difflib import SequenceMatcher
from pathlib import Path

from tailrace.environments import AgentResult, EnvironmentSpec, ProgramEnd, ProgramLimits, command_agent

TABLE = ["Max", "Ada", "Leo", "Eva", "Tom", "Ben", "Zoe", "Iris", "Paul", "Nina", "Hugo", "Vera", "Sam", "Ruth", "Karl"]
"""Round it: the last one sits beside the first."""


def reward(end: ProgramEnd) -> AgentResult:
    """By degrees, letter by letter: a model that calls no tool yet learns the form of an answer."""
    called = sum(len(message.get("tool_calls", ())) for message in end.messages)
    neighbours = "\n".join(TABLE[TABLE.index(name) - len(TABLE) + 1] for name in end.task["names"])
    right = SequenceMatcher(None, end.messages[-1]["content"].strip(), neighbours).ratio()
    return AgentResult(0.8 * right + 0.2 * (called > 0), metrics={"right": right, "tool_calls": called})


seats = EnvironmentSpec(
    name="seats",
    agent=command_agent(
        [sys.executable, Path(__file__).with_name("seats_program.py")],
        reward=reward,
        limits=ProgramLimits(time_s=60, memory_bytes=500_000_000),
    ),
    train_tasks=[{"names": [one, other], "table": TABLE} for one in TABLE for other in TABLE if one != other],
    held_out=16,
)
