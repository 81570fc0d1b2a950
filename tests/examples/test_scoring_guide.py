"""The Python blocks of docs/scoring.md run, and do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tailrace.environments import EnvironmentSettings
from tests.support.judge_endpoint import endpoint, verdict

PAGE = Path(__file__).parents[2] / "docs" / "scoring.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Names that the page's blocks define; they run event loops of their own."""
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, names)
    return names


def test_the_groups_on_the_page_are_scored(page: dict[str, Any]) -> None:
    assert [group.rewards for group in page["groups"]] == [[0.0] * 4] * 2
    assert page["first"].rewards == [3.0] * 4
    assert [len(group.rollouts) for group in page["smaller"]] == [4, 4, 4, 3, 4, 4, 4, 4]


async def test_the_judge_on_the_page_judges(page: dict[str, Any]) -> None:
    async with endpoint(verdict({"1": 0.5})) as serving:
        groups = await page["judged"](serving.url)
    assert [group.rewards for group in groups] == [[0.5] * 4] * 2


def test_the_rewards_on_the_page_have_weights(page: dict[str, Any]) -> None:
    assert {name: reward.weight for name, reward in page["first_name"].rewards.items()} == {"right": 1.0, "brief": 0.1}


def test_the_settings_on_the_page_are_settings() -> None:
    import tomllib

    for block in blocks("toml"):
        told = tomllib.loads(block.replace("[environments.", "["))
        EnvironmentSettings.model_validate({"name": "any", **told})
