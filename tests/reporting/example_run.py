"""A synthetic run folder, written with the real sinks, for the tests of the report (and for looking at it)."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np

from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    GroupId,
    Message,
    Outcome,
    Reward,
    Rollout,
    RolloutId,
    RunStatus,
    SamplingParams,
    Task,
    TaskId,
)
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.sinks import JsonlSink, RolloutWriter
from tailrace.reporting.summary import LedgerSummary, RunSummary, write_summary
from tailrace.tracing.background import BackgroundWriter

NAMES = ["Ada", "Boole", "Curie", "Dirac", "Euler", "Fermi", "Gauss"]
HOSTILE = (
    "</div></script><script>alert('x')</script><img src=\"http://evil.example/x.png\"> & \x1b[31m \u202e {{ 7*7 }}"
)


def a_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}  # type: ignore[typeddict-item]


def a_rollout(step: int, place: int, reward: float, messages: list[Message]) -> RolloutEntry:
    branch = Branch()
    branch.extend_context(list(range(20)))
    count = 30 + place
    branch.extend_completion(
        Completion(
            token_ids=np.arange(count, dtype=np.int32),
            logprobs=np.full(count, -0.7, np.float32),
            policy_versions=np.linspace(max(0, step - 2), step, count).astype(np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    rollout = Rollout(
        rollout_id=RolloutId(f"g{step}/{place}"),
        group_id=GroupId(f"g{step}"),
        task=Task(TaskId(f"alphabet-sort/{step}"), "alphabet-sort", step, {"names": NAMES, "turns": 2}),
        sampling=SamplingParams(max_tokens=96),
        branches=[branch],
        messages=messages,
        reward=Reward(reward, components={"ratio": reward**0.25}),
        turns=2,
        started_s=100.0,
        ended_s=101.0 + place / 3,
    )
    return RolloutEntry(rollout, Outcome.trained(step), advantage=(reward - 0.5) * 2)


def a_conversation(good: bool) -> list[Message]:
    shuffled = ", ".join(["Curie", "Ada", "Dirac", "Boole"])
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}}],
    }
    return [
        a_message("system", "You sort names. Answer with one name a line, nothing else."),
        a_message("user", f"Sort these names: {shuffled}"),
        a_message("assistant", "Ada\nBoole\nCurie\nDirac" if good else "Curie\nAda\nAda\nAda\nAda"),
        a_message("user", "Here are more names: Fermi, Euler. Give the merged list and mark the new ones."),
        call,
        a_message("tool", "84"),
        a_message("assistant", "Ada\nBoole\nCurie\nDirac\nEuler // new\nFermi // new" if good else "Fermi Fermi Fermi"),
    ]


def write_example_run(folder: Path, *, steps: int = 60, hostile: bool = False) -> None:
    """A run folder as `tailrace train` leaves it, from a fixed seed."""
    draw = random.Random(3)
    writer = BackgroundWriter(queue_records=1024)
    metrics, rollouts = JsonlSink(folder / "metrics.jsonl", writer), RolloutWriter(folder / "rollouts", writer)
    for step in range(1, steps + 1):
        reward = 0.2 + 0.74 * (1 - math.exp(-step / 16)) + draw.gauss(0, 0.03)
        metrics.write(_row(step, reward, draw))
        messages = a_conversation(reward > 0.5)
        if hostile:
            messages = [*messages, a_message(HOSTILE, HOSTILE)]
        spread = [min(1.0, max(0.0, reward + draw.gauss(0, 0.15))) for _ in range(8)]
        rollouts.write(step, [a_rollout(step, place, value, messages) for place, value in enumerate(spread)])
    assert writer.close()
    name = HOSTILE if hostile else "quickstart"
    (folder / "config.toml").write_text(f'name = "quickstart"\nmax_steps = {steps}\n[trainer]\nlearning_rate = 1e-3\n')
    write_summary(folder, _summary(name, steps))


def _row(step: int, reward: float, draw: random.Random) -> dict[str, float]:
    generated = 4000 + 12 * step + draw.gauss(0, 200)
    return {
        "step": step,
        "wall_s": 5 + 1.8 * step,
        "reward/mean": reward,
        "reward/std": 0.22 * math.exp(-step / 50),
        "group/zero_spread_share": min(0.8, 0.02 + step / 90),
        "rollout/turns": 2.4 + draw.gauss(0, 0.05),
        "rollout/branches": 1.0,
        "rollout/tokens": 190 + draw.gauss(0, 5),
        "rollout/completion_tokens": 80 + 20 * math.exp(-step / 10) + draw.gauss(0, 3),
        "rollout/truncated_share": 0.4 * math.exp(-step / 8),
        "rollout/failed_share": 0.001 * draw.random(),
        "generation/tokens_per_s": generated,
        "training/tokens_per_s": generated * 2.1,
        "training/loss": draw.gauss(0, 0.02),
        "training/grad_norm": 0.3 + 0.1 * draw.random(),
        "training/kl": 0.002 + 0.001 * draw.random(),
        "training/entropy": 0.2 + 0.8 * math.exp(-step / 20),
        "training/logprob_difference": 0.004 + 0.001 * draw.random(),
        "training/logprob_difference_fresh": 2e-4 + 5e-5 * draw.random(),
        "staleness/mean": min(step, 1.2) + draw.gauss(0, 0.1),
        "staleness/max": min(step, 2 + (draw.random() > 0.8)),
        "policy/version": step,
        "phase/generate/wall_s": 1.5 + draw.gauss(0, 0.1),
        "phase/generate/cpu_s": 0.02,
        "phase/train/wall_s": 0.9 + draw.gauss(0, 0.05),
        "phase/train/cpu_s": 0.8,
        "phase/train/moved_bytes": 9_437_184.0,
        "phase/score/wall_s": 0.02,
        "phase/score/cpu_s": 0.01,
        "phase/score/held_s": 0.011,
        "phase/score/lag_p50_s": 1e-3,
        "phase/score/lag_p99_s": 4e-3,
        "phase/score/lag_max_s": 0.012,
        "phase/publish/wall_s": 0.05,
        "lag/p50_s": 2e-4,
        "lag/p99_s": 4e-3 + 2e-3 * draw.random(),
        "lag/max_s": 0.01 + 0.05 * draw.random() ** 4,
    }


def _summary(name: str, steps: int) -> RunSummary:
    ledger = LedgerSummary(
        admitted=4_000,
        by_state={"trained": 3_840, "filtered": 152, "failed": 8},
        by_reason={"filtered": {"zero_spread": 152}, "failed": {"timeout": 8}},
    )
    return RunSummary(
        name=name,
        status=RunStatus.FINISHED,
        reason="max_steps reached",
        model="tailrace-tiny (1.3 M)",
        environments=["alphabet-sort"],
        steps=steps,
        policy_version=steps,
        wall_s=118.0,
        started_at="2025-06-01 12:00 UTC",
        ledger=ledger,
        reward_first=0.24,
        reward_last=0.93,
        reward_best=0.95,
        tokens_generated=420_000,
        tokens_trained=398_000,
        generation_tokens_per_s=3_800.0,
        training_tokens_per_s=3_600.0,
        length_ratio=0.984,
        wasted_tokens=9_400,
        masked_tokens=120,
        masked_share=0.0003,
        staleness_mean=1.2,
        staleness_max=3,
        peak_rss_bytes={"orchestrator": 310_000_000, "trainer": 720_000_000, "generator": 640_000_000},
        checkpoint_path=f"checkpoints/step_{steps:06d}",
    )
