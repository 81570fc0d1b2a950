"""Figures of evaluations beside training: metrics of one, and every environment's course over the run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tailrace.records import Outcome
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.reporting.summary import EvaluationSummary
from tailrace.scheduling import Evaluation, EvaluationResult

EVALUATED = Outcome.filtered("evaluation")
"""How the files of readable rollouts name what was never meant for training. No ledger knows of it."""
_FIRST, _LAST = "eval/", "/reward/mean"


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The metrics of its line in `metrics.jsonl`."""
    metrics = MetricsAccumulator()
    metrics.add("eval/duration_s", evaluation.duration_s)
    metrics.add("eval/coalesced", evaluation.coalesced)
    for environment, result in evaluation.results.items():
        _add(metrics, f"eval/{environment}", result)
    return metrics.flush()


def _add(metrics: MetricsAccumulator, name: str, result: EvaluationResult) -> None:
    metrics.add(f"{name}/tasks", len(result.rewards))
    metrics.add(f"{name}/failed", sum(result.failed.values()))
    for figure, value in (("mean", result.mean_reward), ("standard_error", result.standard_error)):
        if math.isfinite(value):
            metrics.add(f"{name}/reward/{figure}", value)
    if (versions := result.policy_versions) is not None:
        metrics.add(f"{name}/policy_version/min", versions[0])
        metrics.add(f"{name}/policy_version/max", versions[1])
    for rollout in result.rollouts:
        metrics.add(f"{name}/completion_tokens", rollout.num_completion_tokens)
        metrics.add(f"{name}/truncated_share", float(rollout.truncated))
        for component, value in (rollout.reward.components if rollout.reward else {}).items():
            if math.isfinite(value):
                metrics.add(f"{name}/reward_component/{component}", value)


def evaluated_environments(line: Mapping[str, float]) -> list[str]:
    """The environments that a line of `metrics.jsonl` has an evaluation of in which anything was scored."""
    return [
        name.removeprefix(_FIRST).removesuffix(_LAST)
        for name in line
        if name.startswith(_FIRST) and name.endswith(_LAST)
    ]


def with_evaluation(before: EvaluationSummary | None, line: Mapping[str, float], environment: str) -> EvaluationSummary:
    """An environment's summary with the evaluation of this line."""
    reward, versions = line[f"{_FIRST}{environment}{_LAST}"], f"eval/{environment}/policy_version"
    return EvaluationSummary(
        evaluations=1 if before is None else before.evaluations + 1,
        reward_first=reward if before is None else before.reward_first,
        reward_last=reward,
        reward_best=reward if before is None else max(before.reward_best, reward),
        step_last=int(line.get("step", 0)),
        tasks=int(line.get(f"eval/{environment}/tasks", 0)),
        policy_version_min=int(line.get(f"{versions}/min", 0)),
        policy_version_max=int(line.get(f"{versions}/max", 0)),
    )
