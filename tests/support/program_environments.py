"""Environments whose agent is a program, for tests that load them by name."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

from tailrace.environments import EnvironmentSpec, ProgramEnd, brought_tasks, command_agent, outside_agent
from tests.support.framework_environments import LONGEST

PROGRAM = Path(__file__).with_name("asking_program.py")
ROWS = [{"word": "hush", "behave": "well"}]


def told(end: ProgramEnd) -> float:
    """In a worker process: it sees the conversation, the folder and the status."""
    if end.task["behave"] == "hang the reward":
        while True:
            pass
    said = (end.folder / "said.txt").read_text()
    assert said == end.messages[-1]["content"]
    return len(said) + end.status / 100


scored_apart = EnvironmentSpec(
    name="scored_apart", agent=command_agent([sys.executable, PROGRAM], reward=told), train_tasks=ROWS
)


async def unlike(end: ProgramEnd) -> float:
    """A reward that differs between replies, whatever they are."""
    return zlib.crc32(end.messages[-1]["content"].encode()) % 97 / 97


def asking(behave: str = "well", held_out: int = 2) -> EnvironmentSpec:
    """Programs that ask once and then behave; each is scored by what it was answered."""
    rows = [{"word": f"word {number}", "behave": behave} for number in range(64)]
    agent = command_agent([sys.executable, PROGRAM], reward=unlike)
    return EnvironmentSpec(name="asking", agent=agent, train_tasks=rows, held_out=held_out)


async def brevity(end: ProgramEnd) -> float:
    """The shorter, the better, as for the agents of others."""
    return max(0.0, 1 - len((end.folder / "said.txt").read_text()) / LONGEST)


brief = EnvironmentSpec(
    name="brief",
    agent=command_agent([sys.executable, "-E", "-S", PROGRAM.with_name("brief_program.py")], reward=brevity),
    train_tasks=[{"question": f"Sort these names: Zoe, Bob, Ada, Max. {number}"} for number in range(512)],
)
missing = EnvironmentSpec(name="missing", agent=command_agent(["no-such-program-here"]), train_tasks=ROWS)
outside = EnvironmentSpec(name="outside", agent=outside_agent(), train_tasks=ROWS, held_out=0)
bringing = EnvironmentSpec(name="bringing", agent=outside_agent(), train_tasks=brought_tasks("word"))
