"""The quickstart learns though its processes are killed again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos import held_out_reward, run_under_fire

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2400),  # three minutes of fire, and then to its last step
    pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc"),
]


def test_a_run_whose_processes_are_killed_every_five_seconds_still_learns(tmp_path: Path) -> None:
    chaos = run_under_fire(tmp_path, seed=0, wall_s=180.0)
    assert (chaos.status, chaos.leaks) == (0, []), chaos.printed
    assert chaos.summary.steps == 160
    assert chaos.summary.ledger.balances
    assert chaos.kills.total() >= 3
    assert held_out_reward(tmp_path, chaos.summary.checkpoint_path) > 0.8
