"""Small clusters for tests."""

from __future__ import annotations

from typing import Any

from tailrace.simulation import SimulationPlan


def small_plan(**changes: Any) -> SimulationPlan:
    """Two engines of eight slots, batches of four groups of four, a long tail: a few hundred rollouts."""
    sections: dict[str, dict[str, Any]] = {
        "engines": {"replicas": 2, "slots": 8},
        "trainer": {"train_s": 10.0, "sync_s": 1.0},
        "load": {
            "group_size": 4,
            "max_tokens": 4096,
            "lengths": {"mean_log": 4.5, "sigma": 1.0, "task_sigma": 0.5, "cap": 2048},
        },
        "scheduling": {"batch_size": 16, "row_tokens": 32_768, "buffer_batches": 1.0},
    }
    plan: dict[str, Any] = {"steps": 20, "warmup_steps": 5}
    for name, value in changes.items():
        if isinstance(value, dict) and name in sections:
            sections[name] = {**sections[name], **value}
        else:
            plan[name] = value
    return SimulationPlan.model_validate({**plan, **sections})
