"""What docs/agents.md says of programs and of agents elsewhere runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tailrace.environments import EnvironmentSpec, ProgramEnd
from tailrace.environments.outside import OutsideAgent
from tailrace.environments.programs import CommandAgent
from tailrace.environments.programs.process import ProgramLimits

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()


def defined_by(word: str) -> dict[str, Any]:
    """Names that the page's blocks with this word define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE):
        if word in block:
            exec(block, names)
    return names


def test_the_program_on_the_page_is_scored_by_the_file_that_it_writes(tmp_path: Path) -> None:
    shop: EnvironmentSpec = defined_by("command_agent(")["shop"]
    assert isinstance(shop.agent, CommandAgent)
    assert shop.agent.reward is not None
    end = ProgramEnd(shop.train_task(0), [], str(tmp_path), 0, "")
    assert shop.agent.reward(end) == 0.0
    (tmp_path / "answer.txt").write_text("12\n")
    assert shop.agent.reward(end) == 1.0


def test_the_agent_elsewhere_on_the_page_is_one() -> None:
    assert isinstance(defined_by("outside_agent(")["support"].agent, OutsideAgent)


def test_the_page_tells_every_limit_of_a_program() -> None:
    limits = ProgramLimits()
    assert f"`processes` ({limits.processes})" in PAGE
    assert f"`output_bytes` ({limits.output_bytes / 1e6:.0f} MB)" in PAGE
    for name in ("time_s", "memory_bytes"):
        assert name in PAGE
