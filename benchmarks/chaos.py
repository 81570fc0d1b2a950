"""The case `chaos` of benchmarks/faults.py."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit import progress
from tests.support.chaos import held_out_reward, run_under_fire

QUICK_STEPS = 8
REWARD_AFTER = 0.8


@dataclass(frozen=True)
class ChaosRow:
    """The figures of a run under fire."""

    case: str
    seed: int
    kills: int
    killed: str
    """How often, by role."""
    status: int
    steps: int
    train_s: float
    reward_after: float | None
    """Held-out, at temperature 1; None where the run failed, or was too short."""
    rollouts_failed: int
    """Attempts that went with an agent worker; each was tried again."""
    leaks: int
    target: str
    met: bool | None
    """None where too few steps were taken to tell."""


def run_chaos(seed: int, wall_s: float, *, quick: bool) -> ChaosRow:
    """One run, and the held-out reward of its last checkpoint."""
    steps = ("--max_steps", str(QUICK_STEPS)) if quick else ()
    with tempfile.TemporaryDirectory(prefix="tailrace-chaos-") as temporary:
        folder = Path(temporary).resolve()
        chaos = run_under_fire(folder, seed=seed, wall_s=wall_s, overrides=steps)
        if chaos.status:
            progress(chaos.printed[-4000:])
        is_measured = not (quick or chaos.status)
        reward = held_out_reward(folder, chaos.summary.checkpoint_path) if is_measured else None
    ledger = chaos.summary.ledger
    is_sound = chaos.status == 0 and ledger.balances and not chaos.leaks
    return ChaosRow(
        case="chaos",
        seed=seed,
        kills=chaos.kills.total(),
        killed=", ".join(f"{name} {count}" for name, count in sorted(chaos.kills.items())),
        status=chaos.status,
        steps=chaos.summary.steps,
        train_s=chaos.wall_s,
        reward_after=reward,
        rollouts_failed=ledger.by_state.get("failed", 0),
        leaks=len(chaos.leaks),
        target=f"finishes, held-out reward above {REWARD_AFTER}, no leak",
        met=None if quick and is_sound else is_sound and reward is not None and reward > REWARD_AFTER,
    )
