"""Environments whose agent is a program, for tests that load them by name."""

from __future__ import annotations

import sys
from pathlib import Path

from tailrace.environments import EnvironmentSpec, ProgramEnd, command_agent

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
