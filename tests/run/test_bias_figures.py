"""What a real run says of its own bias is what its rollouts say: ledger, waste, masked tokens, staleness, lengths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tailrace.records import RunStatus
from tailrace.reporting.summary import RunSummary
from tailrace.scheduling import Verdict
from tests.run.runs import environment, records, rollouts, run_inline, warm_from

STALE = (
    *("--schedule", "one-step-off", "--max_steps", "12", "--scheduling.filter_zero_spread", "true"),
    *("--rollouts.max_turns", "4", "--rollouts.max_tokens", "8", "--scheduling.max_retries", "0"),
)

pytestmark = pytest.mark.xdist_group("bias figures")
"""One run serves them all: in one of the test command's processes."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def summary(parent: Path) -> RunSummary:
    told = ("--environment.args.metrics", str(parent / "run" / "metrics.jsonl"), "--environment.args.max_steps", "12")
    return asyncio.run(run_inline(parent, *environment("uneven"), *told, *STALE))


@pytest.fixture(scope="module")
def written(parent: Path, summary: RunSummary) -> list[dict[str, Any]]:
    assert summary.status is RunStatus.FINISHED
    return rollouts(parent / "run")


def ended(written: list[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    return [record for record in written if record["outcome"]["state"] == state]


def test_the_ledger_tells_the_rollouts_that_were_written(summary: RunSummary, written: list[dict[str, Any]]) -> None:
    assert summary.ledger.balances
    for state in ("trained", "filtered"):
        assert summary.ledger.by_state[state] == len(ended(written, state)) > 0
    assert summary.ledger.by_reason["failed"]["environment_failed"] == summary.ledger.by_state["failed"] > 0


def test_wasted_are_the_tokens_of_filtered_and_of_failed_rollouts(
    parent: Path, summary: RunSummary, written: list[dict[str, Any]]
) -> None:
    wasted = sum(record["completion_tokens"] for state in ("filtered", "failed") for record in ended(written, state))
    assert summary.wasted_tokens == wasted > 0
    lines = records(parent / "run" / "metrics.jsonl")
    assert sum(line.get("bias/wasted_tokens", 0) for line in lines) <= summary.wasted_tokens
    assert summary.tokens_generated >= sum(record["completion_tokens"] for record in written)


def test_trained_and_masked_tokens_add_up(parent: Path, summary: RunSummary, written: list[dict[str, Any]]) -> None:
    trained = sum(record["completion_tokens"] for record in ended(written, "trained"))
    assert summary.tokens_trained + summary.masked_tokens == trained
    assert summary.masked_tokens > 0
    tokens = sum(line["batch/tokens"] for line in records(parent / "run" / "metrics.jsonl"))
    assert summary.masked_share == pytest.approx(summary.masked_tokens / tokens)


def test_the_length_ratios_are_those_of_the_rollouts(
    parent: Path, summary: RunSummary, written: list[dict[str, Any]]
) -> None:
    assert summary.length_ratio is not None
    assert summary.loss_length_ratio is not None
    assert warm_from(written, summary.length_ratio)
    lines = records(parent / "run" / "metrics.jsonl")
    counted = ("trained_rollouts", "trained_tokens", "loss_tokens", "ended_rollouts", "ended_tokens")
    rollouts_counted, tokens, loss_tokens, ended_rollouts, ended_tokens = (
        sum(line[f"bias/{name}"] for line in lines) for name in counted
    )
    assert 0 < rollouts_counted < summary.ledger.by_state["trained"]  # some finished before it was warm
    assert summary.loss_length_ratio / summary.length_ratio == pytest.approx(loss_tokens / tokens)
    told = (loss_tokens / rollouts_counted) / (ended_tokens / ended_rollouts)
    assert lines[-1]["bias/loss_length_ratio"] == pytest.approx(told)
    assert loss_tokens < tokens


def test_staleness_is_within_the_bound_and_the_waits_have_causes(parent: Path, summary: RunSummary) -> None:
    assert summary.staleness_max == 1
    assert summary.staleness_mean is not None
    lines = records(parent / "run" / "metrics.jsonl")
    weighted = sum(line["staleness/mean"] * line["batch/loss_tokens"] for line in lines)
    assert summary.staleness_mean == pytest.approx(weighted / summary.tokens_trained)
    assert set(summary.admission_waits_s) <= {str(verdict) for verdict in Verdict}
    assert sum(summary.admission_waits_s.values()) > 0
    for name, told in (
        ("scheduler/trainer_wait_s", summary.trainer_wait_s),
        ("scheduler/budget_wait_s", summary.admission_waits_s.get("budget_spent", 0.0)),
        ("scheduler/buffer_wait_s", summary.admission_waits_s.get("buffer_full", 0.0)),
    ):
        assert sum(line[name] for line in lines) == pytest.approx(told)


async def test_stragglers_set_aside_go_on_in_the_next_step_of_a_real_run(tmp_path: Path) -> None:
    edges = ("--scheduling.over_sampling", "2", "--scheduling.on_straggler", "resume_next_step")
    summary = await run_inline(tmp_path, *edges, "--scheduling.max_staleness", "9", "--max_steps", "3")
    assert (summary.exit_code, summary.steps) == (0, 3)
    assert summary.ledger.by_state["trained"] == 12
