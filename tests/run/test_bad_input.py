"""What cannot work is told in one message: before anything starts where it can be known, else it costs one rollout."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.config import load_settings
from tailrace.errors import DataError, ModelError, SettingsError
from tailrace.free_ports import free_port
from tailrace.records import RunStatus
from tailrace.reporting.summary import RunSummary
from tailrace.rollouts import ChatRenderer
from tailrace.run.folder import open_run_folder, record_settings
from tailrace.run.parts import load_environments, within_own_context
from tailrace.run.training import train
from tests.run.runs import RESUMED, TINY, environment, records, rollouts, run_inline, tiny_settings
from tests.support.bundled_models import copy_bundled
from tests.support.chat_models import save_chat_model
from tests.support.state_models import save_state_model

TROUBLES = """
max_epochs = 1
placement = "inline"
model.name = "bundled:quickstart"
rollouts = { group_size = 2, max_tokens = 6, max_turns = 1, timeout_s = 300 }
scheduling = { batch_size = 4, row_tokens = 512, filter_zero_spread = false, max_retries = 0 }
generator = { max_cache_tokens = 512, slots = 8 }
observability = { live = "off", report = false }

[[environments]]
name = "tests.support.run_environments:troubled"

[[environments]]
name = "tests.support.run_environments:hanging"
timeout_s = 0.2  # of nobody else, who may take their time
"""


def fails(summary: RunSummary) -> dict[str, int]:
    assert summary.ledger.balances
    return summary.ledger.by_reason["failed"]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def troubled(parent: Path) -> RunSummary:
    (parent / "run.toml").write_text(TROUBLES)
    return asyncio.run(train(load_settings(str(parent / "run.toml")), parent))


def test_what_goes_wrong_in_one_rollout_costs_that_rollout(troubled: RunSummary) -> None:
    summary = troubled
    assert (summary.status, summary.exit_code) == (RunStatus.FINISHED, 0)
    assert summary.ledger.by_state["trained"] == 2 * 4
    assert fails(summary) == {
        "environment_failed": 2,  # raises
        "invalid_reward": 4,  # NaN, and a text
        "timeout": 2,  # hangs
        "budget_exceeded": 2,  # a prompt longer than the model's context
    }


@pytest.mark.parametrize(
    "message",
    [
        "task troubled/train/0: ZeroDivisionError: of the user",
        "(environment.timeout_s)",
        "more of 'invalid_reward' are only counted",
    ],
)
def test_the_first_failure_of_each_kind_is_told(troubled: RunSummary, parent: Path, message: str) -> None:
    assert (parent / "run" / "logs" / "orchestrator.log").read_text().count(message) == 1


def test_failed_rollouts_are_written_with_their_error_and_counted_by_environment(
    troubled: RunSummary, parent: Path
) -> None:
    failed = [one for one in rollouts(parent / "run") if one["outcome"]["state"] == "failed"]
    assert Counter(one["outcome"]["reason"] for one in failed) == fails(troubled)
    raised = [one for one in failed if one["outcome"]["reason"] == "environment_failed"]
    for one in raised:
        assert one["error"].endswith("ZeroDivisionError: of the user")
        assert "in trouble" in one["error"]  # the traceback
        assert one["messages"][-1]["role"] == "assistant"
    assert {one["environment"] for one in failed if one["outcome"]["reason"] == "timeout"} == {"hanging"}
    assert not any(one["error"] for one in rollouts(parent / "run") if one["outcome"]["state"] == "trained")
    lines = records(parent / "run" / "metrics.jsonl")
    told = [one for one in failed if one["step"] <= lines[-1]["step"]]  # the others ended after the last step
    assert Counter(f"environment/{one['environment']}/failed/{one['outcome']['reason']}" for one in told) == {
        name: sum(line.get(name, 0) for line in lines)
        for name in {name for line in lines for name in line if "/failed/" in name and name.startswith("environment/")}
    }
    assert told


async def test_a_column_that_no_row_has_is_told_after_the_first_tasks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"wrod": "{number}"}}\n' for number in range(64)))
    summary = await run_inline(tmp_path, *environment("answer"), "--environment.data", str(rows))
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FAILED, 1, 0)
    assert "environment 'answer' does not work: the rollouts of its first 4 tasks all failed" in summary.reason
    assert "has no column 'word'; its columns are: wrod" in summary.reason
    assert summary.ledger.balances


async def test_a_synchronous_reward_that_never_returns_is_killed_and_costs_its_rollout(tmp_path: Path) -> None:
    data = (*environment("never_returning"), "--max_steps", "unset", "--max_epochs", "1")
    limits = ("--rollouts.worker_timeout_s", "3", "--scheduling.max_retries", "0", "--rollouts.workers", "2")
    summary = await run_inline(tmp_path, *data, *limits)
    assert (summary.status, summary.exit_code) == (RunStatus.FINISHED, 0)
    assert sum(fails(summary).values()) == 2
    assert summary.ledger.by_state["trained"] == 4


SAME_NAME = """[
  { name = "tests.support.run_environments:hanging" },
  { name = "tests.support.run_environments:hanging_when_evaluated" },
]"""


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (environment("empty"), DataError, "has no task to train on"),
        (environment("nowhere"), SettingsError, "has no 'nowhere'"),
        (environment("without_column"), DataError, "has no column 'word'"),
        ((*environment("never_returning"), "--rollouts.workers", "0"), SettingsError, "rollouts.workers is 0"),
        (
            ("--scheduling.group_release", "early", "--environment.judge.rubric", "which is best"),
            *(SettingsError, "environment 'words' scores whole groups"),
        ),
        (environment("judged_coolly"), SettingsError, r"environments.0.judge.temperature asks for .* 0.001, and eng"),
        (("--environments", SAME_NAME), SettingsError, "two environments are called 'hanging'"),
        (("--environment.name", "alfabet-sort"), SettingsError, "did you mean 'alphabet-sort'"),
        (("--model.name", "bundled:slowstart"), ModelError, "no such bundled model; bundled are: quickstart"),
        (("--model.name", "./nowhere"), ModelError, "is no folder"),
    ],
)
async def test_what_can_be_known_before_is_told_before_anything_is_made(
    tmp_path: Path, overrides: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await run_inline(tmp_path, "--max_steps", "1", *overrides)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--environment.judge.temperature", "0.001"), "a temperature of 0.001, and engines sample at 0.01 or above"),
        (
            ("--environment.judge.temperature", "3", "--generator.engine", "vllm"),
            "a temperature of 3, and generator.engine = 'vllm' samples at 2 at most: write less, or choose the torch",
        ),
        ((*environment("judged_hotly"), "--generator.engine", "vllm"), "a temperature of 3, and generator.engine ="),
    ],
)
def test_a_temperature_of_a_judge_that_the_runs_engine_does_not_take_is_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=rf"^environments.0.judge.temperature asks for {message}") as refused:
        load_environments(tiny_settings(*overrides))
    assert refused.value.key == ("environments", 0, "judge", "temperature")


def test_a_judge_that_its_environment_has_elsewhere_may_have_any_temperature() -> None:
    judge = (*environment("judged_elsewhere"), "--environment.judge.temperature", "0.001")
    (loaded,) = load_environments(tiny_settings(*judge)).values()
    assert loaded.spec.judge is not None
    assert (loaded.spec.judge.url, loaded.spec.judge.temperature) == ("http://judge/v1", 0.001)


async def test_an_environment_that_no_worker_can_load_fails_the_run_once(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, *environment("loading_only_here"), "--max_steps", "1")
    assert (summary.status, summary.exit_code, summary.ledger.admitted) == (RunStatus.FAILED, 1, 0)
    assert "not in a worker" in summary.reason


async def test_what_only_the_trainer_can_know_ends_the_run_before_its_first_rollout(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, "--trainer.loss.name", "math:pi", "--max_steps", "1")
    assert (summary.status, summary.exit_code, summary.ledger.admitted) == (RunStatus.FAILED, 2, 0)
    assert summary.reason == "trainer.loss.name is 'math:pi': that is 3.141592653589793, not a function"


async def test_an_advantage_that_the_rewards_do_not_suit_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    summary = await run_inline(
        tmp_path, *environment("grudging"), "--scheduling.advantage", "maxrl", "--max_steps", "1"
    )
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 2)
    assert "'maxrl' is for rewards of 0 and above, and a rollout has -" in summary.reason


async def test_an_architecture_that_the_engine_cannot_run_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    model = save_state_model(tmp_path / "mamba")
    with pytest.raises(ModelError, match="MambaForCausalLM cannot run on the torch engine: it has layers of type"):
        await run_inline(tmp_path / "runs", "--model.name", str(model), "--max_steps", "1")
    assert not (tmp_path / "runs").exists()


async def test_a_model_that_is_refused_leaves_what_an_earlier_start_left_where_it_is(tmp_path: Path) -> None:
    settings, model = tiny_settings("--max_steps", "1"), save_chat_model(tmp_path / "model")
    with open_run_folder(settings, tmp_path) as paths:
        record_settings(settings, paths, None)
    with pytest.raises(ModelError, match="holds no weights"):
        await run_inline(tmp_path, "--max_steps", "1", "--model.name", str(model))
    assert paths.settings.is_file()
    assert not paths.superseded.exists()


def test_the_model_s_own_context_is_used_and_not_to_be_exceeded(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 256}))
    renderer = ChatRenderer(folder)
    assert within_own_context(tiny_settings(), renderer).max_model_tokens == 256
    shorter = tiny_settings("--model.max_model_tokens", "100")
    assert within_own_context(shorter, renderer) == shorter
    with pytest.raises(SettingsError, match=r"max_model_tokens is 300, but .* was made for 256"):
        within_own_context(tiny_settings("--model.max_model_tokens", "300"), renderer)


async def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model", template=None)
    with pytest.raises(ModelError, match="has no chat template"):
        await run_inline(tmp_path / "runs", "--max_steps", "1", "--model.name", str(model))
    assert not (tmp_path / "runs").exists()


async def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model")
    with pytest.raises(ModelError, match="holds no weights"):
        await run_inline(tmp_path / "runs", "--max_steps", "1", "--model.name", str(model))
    assert not (tmp_path / "runs").exists()


async def test_a_reference_that_cannot_score_what_is_sampled_is_refused(tmp_path: Path) -> None:
    other = save_chat_model(tmp_path / "other")
    key = "trainer.loss.reference_kl.model"
    for name, message in (
        (str(other), "holds no weights"),
        ("bundled:slowstart", "no such bundled model"),
        (
            str(copy_bundled(tmp_path / "short", max_position_embeddings=64)),
            "which was made for 64 tokens, and a .* 512",
        ),
        (str(copy_bundled(tmp_path / "renamed", drop_token=True)), f"{key} is .* has another vocabulary than 'bundled"),
    ):
        with pytest.raises(ModelError, match=message):
            await run_inline(tmp_path / "runs", "--max_steps", "1", f"--{key}", name)
    assert not (tmp_path / "runs" / "run" / "summary.json").exists()


async def test_an_empty_file_and_a_row_without_its_column_are_told_with_their_place(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    for text, message in (("", "is empty"), ('{"word": "a"}\n{"wrod": "b"}\n', r"has no column 'word'")):
        data.write_text(text)
        with pytest.raises(DataError, match=message):
            await run_inline(
                tmp_path / "runs", *environment("troubled"), "--environment.data", str(data), "--max_steps", "5"
            )
    assert not (tmp_path / "runs").exists()


async def test_a_run_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot write the run folder"):
        await run_inline(tmp_path / "runs", "--max_steps", "1")


async def test_a_checkpoint_of_other_environments_is_refused(tmp_path: Path) -> None:
    await run_inline(tmp_path, "--max_steps", "1")
    summary = await run_inline(tmp_path, *environment("troubled"), "--max_steps", "2", *RESUMED)
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 2)
    assert "resume with the same environments" in summary.reason


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_port_that_is_taken_is_told_before_any_role_is_started(tmp_path: Path, workers: int) -> None:
    """That of the orchestrator, or of the last agent worker."""
    port = free_port(count=1 + workers)
    asked = ("--gateway.port", str(port), "--rollouts.agent_workers", str(workers), "--observability.live", "off")
    taken = port + workers
    where = f"at {taken}, as agent worker {workers} has to" if workers else "there"
    refused = pytest.raises(SettingsError, match=rf"gateway.port = {port}: cannot listen {where} \(Address already")
    with socket.create_server(("127.0.0.1", taken)), refused:
        await train(tiny_settings("--max_steps", "1", *asked, parent=tmp_path), tmp_path)
    assert not (tmp_path / "run" / "events.jsonl").exists()


async def test_a_disk_that_takes_neither_the_scheduler_s_state_nor_a_last_save_is_told_of_both(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("scheduler", "checkpoints"):
        (tmp_path / "run" / name).write_text("a file where the folder should be")
    summary = await run_inline(tmp_path, "--max_steps", "1", *RESUMED)
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    first, _, then = summary.reason.partition("; then ")
    assert first.startswith(f"orchestrator: cannot write {tmp_path / 'run/scheduler/step_000001.json'} (")
    assert "cannot be written" in then


async def test_a_disk_that_takes_no_checkpoint_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the folder should be")
    summary = await run_inline(tmp_path, "--max_steps", "1", *RESUMED)
    assert (summary.status, summary.exit_code, summary.checkpoint_path) == (RunStatus.FAILED, 1, "")
    assert "cannot be written" in summary.reason
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


DRY = ("train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", "--dry-run")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            ("--generator.batch_invariant", "true", "--generator.kv_cache", "recompute"),
            "generator.batch_invariant: the torch engine's sums depend",
        ),
        (
            ("--generator.connect", "tcp://127.0.0.1:1", "--generator.connect_key", "/nowhere/key"),
            "generator.connect_key: cannot read the key file /nowhere/key: No such file or directory",
        ),
    ],
)
def test_a_dry_run_refuses_what_a_role_would(
    wrong: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DRY, *wrong]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_generators_that_run_already_may_have_an_engine_that_is_batch_invariant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    invariant = ("--generator.batch_invariant", "true", "--generator.kv_cache", "recompute")
    assert main([*DRY, *invariant, "--generator.connect", "tcp://127.0.0.1:1"]) == 0, capsys.readouterr().err


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if they were not installed."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in packages else find_spec(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find)


def test_a_dry_run_says_that_parquet_needs_an_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "pyarrow")
    assert main([*DRY, "--export-tokens", "parquet"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert 'trainer.export_tokens = "parquet" needs pyarrow: pip install "tailrace[parquet]", or choose "jsonl"' in said


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (("--gateway.port", "8123"), "gateway.port"),
        (("--environment.name", "examples.own_outside:sorting"), "environment 'sorting', which clients outside play,"),
    ],
)
def test_a_dry_run_says_that_http_from_the_start_needs_an_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], what: str
) -> None:
    hide(monkeypatch, "httptools")
    assert main([*DRY, *asked]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f'{what} needs httptools: pip install "tailrace[gateway]", or leave it out' in said


def test_what_a_trainer_needs_is_asked_for_on_its_machine_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "pyarrow", "peft")
    elsewhere = ("--placement", "redis", "--transport.redis.url", "redis://host")
    for wants in (("--export-tokens", "parquet"), ("--trainer.lora.rank", "4")):
        assert main([*DRY, *wants]) == 2
        assert main([*DRY, *wants, *elsewhere]) == 0, capsys.readouterr().err


def test_a_dry_run_has_no_trainer_for_a_stream_within_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text(
        'placement = "inline"\ntrainer.feed = "stream"\nmodel.name = "bundled:quickstart"\n'
        '[[environments]]\nname = "alphabet-sort"\n'
    )
    assert main(["train", str(tmp_path / "own.toml"), "--dry-run"]) == 2
    assert "which placement = 'inline' would have in this process" in " ".join(capsys.readouterr().err.split())
