"""Several environments in one run, the examples among them: each through the whole pipeline, with its own metrics."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from tailrace.config import load_settings
from tailrace.records import RunStatus
from tailrace.reporting.summary import RunSummary
from tailrace.run.training import train
from tests.run.runs import ROOT, environment, records, rollouts, run_inline

SETTINGS = """
max_steps = 2
placement = "inline"
schedule = "sync"  # with one group of each environment in a batch
model.name = "bundled:quickstart"
rollouts = {{ group_size = 2, max_tokens = 12, max_turns = 3 }}
scheduling = {{ batch_size = 10, row_tokens = 1024, filter_zero_spread = false }}
generator = {{ max_cache_tokens = 1024, slots = 16 }}
observability = {{ live = "off" }}
environments = [
    {{ name = "examples.own_agent:first_names" }},
    {{ name = "examples.own_environment:guess_the_name" }},
    {{ name = "examples.own_dataset:rest", data = "{root}/examples/names.jsonl", eval_tasks = 4 }},
    {{ name = "examples.own_tool:seats" }},
    {{ name = "calculator" }},
]
"""
NAMES = {"first-names", "guess-the-name", "rest", "seats", "calculator"}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def summary(parent: Path) -> RunSummary:
    settings = parent / "mixed.toml"
    settings.write_text(SETTINGS.format(root=ROOT))
    return asyncio.run(train(load_settings(str(settings)), parent))


def test_every_example_and_the_calculator_is_trained_on(parent: Path, summary: RunSummary) -> None:
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FINISHED, 0, 2)
    assert summary.ledger.by_reason["failed"] == {}
    for step in (1, 2):
        written = records(parent / "mixed" / "rollouts" / f"step_{step:06d}.jsonl")
        assert {record["environment"] for record in written if record["outcome"]["state"] == "trained"} == NAMES


def test_each_environment_has_reward_metrics_of_its_own(parent: Path, summary: RunSummary) -> None:
    for line in records(parent / "mixed" / "metrics.jsonl"):
        written = records(parent / "mixed" / "rollouts" / f"step_{line['step']:06d}.jsonl")
        for name in NAMES:
            rewards = [record["reward"] for record in written if record["environment"] == name]
            assert line[f"reward/{name}/mean"] == pytest.approx(statistics.fmean(rewards))
            assert line[f"reward/{name}/std"] == pytest.approx(statistics.pstdev(rewards))
            assert line[f"reward/{name}/zero_spread_share"] == float(len(set(rewards)) == 1)


def test_the_report_draws_the_environments_apart(parent: Path, summary: RunSummary) -> None:
    page = (parent / "mixed" / "report.html").read_text()
    assert "Reward by environment" in page
    assert "guess-the-name" in page


async def test_what_scoring_and_agents_set_for_tokens_reaches_the_loss(tmp_path: Path) -> None:
    loss = ("--trainer.loss.name", "tests.support.losses:of_weighing")
    summary = await run_inline(tmp_path, *environment("weighing"), *loss, "--max_steps", "2")
    assert (summary.status, summary.steps, summary.reason) == (RunStatus.FINISHED, 2, "max_steps = 2 reached")


@pytest.mark.parametrize("sampled", [True, False])
async def test_what_agents_demonstrate_is_learned_beside_what_is_rewarded(tmp_path: Path, sampled: bool) -> None:
    """Groups whose rewards are all equal are trained on for their demonstrations' sake."""
    given = ("--environment.args", f"{{ sampled = {str(sampled).lower()} }}", "--trainer.learning_rate", "3e-3")
    loss = ("--trainer.loss.cross_entropy.coefficient", "1.0", "--scheduling.filter_zero_spread", "true")
    evaluation = ("--evaluation.every_steps", "3", "--evaluation.tasks", "2") if sampled else ()
    summary = await run_inline(
        tmp_path, *environment("demonstrating"), *given, *loss, *evaluation, "--max_steps", "4", "--schedule", "sync"
    )
    assert (summary.status, summary.steps, summary.policy_version) == (RunStatus.FINISHED, 4, 4)
    assert summary.ledger.by_state["trained"] == 4 * 4
    lines = [line for line in records(tmp_path / "run" / "metrics.jsonl") if "batch/samples" in line]
    assert [line["batch/samples"] for line in lines] == [4 * (1 + sampled)] * 4
    assert all(line["batch/cross_entropy_tokens"] > 0 for line in lines)
    assert all(("training/kl" in line) == sampled for line in lines)
    found = [line["training/demonstrating/cross_entropy"] for line in lines]
    assert found[-1] < 0.8 * found[0]


async def test_demonstrations_that_nothing_learns_from_end_the_run(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, *environment("demonstrating"), "--max_steps", "1")
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 2)
    assert "'demonstrating' demonstrates replies, and nothing would learn from them: write" in summary.reason


@pytest.mark.parametrize("row_tokens", [16, 512])
async def test_a_demonstration_may_be_as_long_as_a_row(tmp_path: Path, row_tokens: int) -> None:
    shown = ("--environment.args", "{ sampled = false }", "--trainer.loss.cross_entropy.coefficient", "1.0")
    lengths = ("--rollouts.max_rollout_tokens", "16", "--scheduling.row_tokens", str(row_tokens))
    ends = ("--rollouts.rollout_errors.on_error", "raise", "--max_steps", "1")
    summary = await run_inline(tmp_path, *environment("demonstrating"), *shown, *lengths, *ends)
    if row_tokens == 512:
        assert (summary.status, summary.steps) == (RunStatus.FINISHED, 1)
    else:
        assert summary.status is RunStatus.FAILED
        assert "tokens does not fit a row of scheduling.row_tokens = 16" in summary.reason


async def test_turns_at_temperatures_of_their_own_that_end_at_a_string_are_trained_on(tmp_path: Path) -> None:
    limits = ("--rollouts.max_turns", "2", "--rollouts.max_tokens", "32")
    summary = await run_inline(tmp_path, *environment("cooling"), *limits, "--max_steps", "2")
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 2)
    trained = [one for one in rollouts(tmp_path / "run") if one["outcome"]["state"] == "trained"]
    assert len(trained) == 8
    assert [one["branches"] for one in trained] == [2] * 8
    assert not any("\n" in one["columns"]["said"] for one in trained)
    assert records(tmp_path / "run" / "metrics.jsonl")[0]["training/logprob_difference"] < 1e-3
