"""What others wrote is trained on: a few steps of a whole run with the bundled model."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import tailrace
from tailrace.records import RunStatus

CHANGES = {
    "placement": "inline",
    "observability": {"live": "off", "report": False},
    "max_steps": 2,
    "rollouts": {"group_size": 4, "max_tokens": 24, "max_turns": 3, "workers": 1},
    "scheduling": {"batch_size": 8, "row_tokens": 2048, "filter_zero_spread": False},
    "generator": {"slots": 16, "max_cache_tokens": 2048},
}


@pytest.mark.parametrize("example", ["trl_increment:increment", "mcp_agent:seats", "verifiers_gym:chain_sums"])
async def test_an_adapted_environment_is_trained_on(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if needs := {"mcp": "mcp", "verifiers": "verifiers"}.get(example.partition("_")[0]):
        pytest.importorskip(needs)
    result = await tailrace.train_async("quickstart", {**CHANGES, "environment": {"name": f"examples.{example}"}})
    assert result.status is RunStatus.FINISHED, result.summary.reason
    assert [line["step"] for line in result.metrics()] == [1, 2]
    assert not [one for one in psutil.Process().children() if "mcp_seats_server.py" in " ".join(one.cmdline())]
