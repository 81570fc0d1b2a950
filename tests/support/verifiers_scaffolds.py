"""Packages as `vf-init` of verifiers 0.4 writes them, with the two steps done that its README names."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tailrace.environments.installed import pinned

VERIFIERS = pinned("verifiers==0.4.0")

_LOAD = "raise NotImplementedError(\n            \"Return this taskset's tasks"
_REWARD = 'raise NotImplementedError("Score the rollout'


def scaffold(folder: Path, name: str, *options: str, load: str, reward: str) -> Path:
    """A package in a folder of its own, which is returned; `load` and `reward` are what its two methods return."""
    command = [VERIFIERS.folder / "bin" / "vf-init", name, "--path", str(folder), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    written = folder / name / name / "taskset.py"
    text = written.read_text()
    for begins, returned in ((_REWARD, reward), (_LOAD, load)):
        start = text.index(begins)
        end = text.index("\n\n", start) if "\n\n" in text[start:] else len(text)
        text = f"{text[:start]}return {returned}\n{text[end:]}"
    written.write_text(text)
    return folder / name


def greeting(folder: Path) -> Path:
    """One turn: the policy is to say a number."""
    return scaffold(
        folder,
        "greeting",
        load='[GreetingTask(GreetingData(prompt=f"Say {i}."), self.config.task) for i in range(self.config.num_tasks)]',
        reward="1.0 / (1.0 + abs(len(trace.last_reply) - 3))",
    )


def echoing(folder: Path) -> Path:
    """Several turns, with the tool that the scaffold has."""
    return scaffold(
        folder,
        "echoing",
        "--add-tool",
        load='[EchoingTask(EchoingData(prompt="Echo hush.", system_prompt="Be brief."), self.config.task)]',
        reward='float("hush" in trace.last_reply)',
    )
