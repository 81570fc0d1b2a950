"""Runs whose trainer is several processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tailrace.cli import main
from tailrace.errors import SettingsError
from tailrace.free_ports import free_port
from tailrace.lifecycle.early_signals import EXIT_CODES
from tailrace.lifecycle.roles import RoleSpec
from tailrace.records import RunStatus
from tailrace.reporting.summary import RunSummary, read_summary
from tailrace.run.devices import role_devices
from tailrace.run.ranks import Rank
from tailrace.run.trainer_ranks import LaunchedRanks, launched_rank
from tailrace.training.settings.trainer import TrainerSettings
from tests.run.runs import (
    IMPORTS,
    PATIENCE_S,
    RESUMED,
    TINY,
    command,
    environment,
    records,
    run_inline,
    tiny_settings,
)
from tests.run.served import TORCHRUN
from tests.support.exported_tokens import read_tokens

pytestmark = pytest.mark.xdist_group("trainer ranks")

TWO = ("--trainer.ranks", "2", "--trainer.collective_timeout_s", "60")
LEARNING = (
    *(*environment("demonstrating"), "--trainer.loss.cross_entropy.coefficient", "1.0"),
    *("--trainer.loss.reference_kl.coefficient", "0.1"),
)
Told: TypeAlias = tuple[RunSummary, list[dict[str, Any]]]
"""What a run's summary and its metrics say."""


def run(parent: Path, *overrides: str) -> Told:
    with command(parent, *overrides) as process:
        status, printed = process.wait()
        logs = "".join(path.read_text() for path in (process.folder / "logs").glob("trainer*.log"))
        assert (status, process.leftovers()) == (0, []), printed + logs
    return told(process.folder)


def told(folder: Path) -> Told:
    summary = read_summary(folder)
    assert summary is not None
    return summary, records(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def killed(parent: Path) -> Told:
    """Two ranks that save after every step, one of which is killed in the middle."""
    saving = ("--trainer.checkpoint_every_steps", "1", "--restarts.per_role", "0", "--max_steps", "100000")
    with command(parent, *LEARNING, *TWO, *saving) as process:
        process.wait_for_steps(3)
        process.role("trainer-1").kill()
        status, printed = process.wait()
        assert (status, process.leftovers()) == (1, []), printed
    return told(process.folder)


@pytest.fixture(scope="module")
def saved(parent: Path, killed: Told) -> Path:
    """Their newest checkpoint."""
    return max((parent / "runs" / "run" / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def step(saved: Path) -> int:
    """Its step."""
    return int(saved.name.removeprefix("step_"))


@pytest.fixture(scope="module")
def alone(parent: Path, step: int) -> RunSummary:
    """One rank that goes on from there for a step."""
    one = ("--trainer.ranks", "1", "--max_steps", str(step + 1), *RESUMED)
    return asyncio.run(run_inline(parent / "runs", *LEARNING, *one))


@pytest.fixture(scope="module")
def together(parent: Path, step: int, alone: RunSummary) -> Told:
    """Two ranks that share every row, and go on from there for two steps."""
    sharing = ("--trainer.sequence_parallel", "2", "--trainer.export_tokens", "jsonl", "--placement", "local")
    return run(parent, *LEARNING, *TWO, *sharing, "--max_steps", str(step + 3), *RESUMED)


def test_a_rank_that_is_killed_while_others_wait_for_it_is_named(killed: Told) -> None:
    summary, _ = killed
    assert summary.status is RunStatus.FAILED
    assert "the trainer-1 left early, killed by SIGKILL" in summary.reason


def test_every_rank_saves_its_share(saved: Path) -> None:
    assert len([*(saved / "optimizer").glob("*.distcp")]) == 2


def test_two_ranks_share_a_reference_and_learn_from_demonstrations(killed: Told) -> None:
    _, metrics = killed
    for line in metrics:
        assert line["batch/cross_entropy_tokens"] > 0
        assert line["training/demonstrating/cross_entropy"] == line["training/cross_entropy"] > 0
    first, second, *_ = (line["training/reference_kl"] for line in metrics)
    assert first == pytest.approx(0, abs=1e-6)  # the initial model is its own reference
    assert second > 0


def test_one_rank_goes_on_where_two_were(step: int, alone: RunSummary) -> None:
    assert (alone.status, alone.steps) == (RunStatus.FINISHED, step + 1)


def test_two_ranks_go_on_where_one_was(step: int, together: Told) -> None:
    summary, metrics = together
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, step + 3)
    assert [line["step"] for line in metrics] == [*range(1, step + 4)]
    assert summary.ledger.balances


def test_ranks_that_share_every_row_export_each_token_once(parent: Path, step: int, together: Told) -> None:
    lines = together[1][step + 1 :]
    assert len(lines) == 2
    for line in lines:
        files = [*(parent / "runs" / "run" / "tokens").glob(f"step_{line['step']:06d}_rank_*.jsonl")]
        tokens = [one for path in files for one in read_tokens(path)]
        places = {(one["rollout_id"], one["branch"], one["position"]) for one in tokens}
        assert len(files) == 2
        assert len(places) == len(tokens) == line["batch/loss_tokens"] + line["batch/cross_entropy_tokens"]


@pytest.mark.long
def test_a_rank_that_is_killed_is_started_again_with_all_others_and_names_itself_once_that_is_too_often(
    tmp_path: Path,
) -> None:
    """Each time: `trainer1-step-killed` of the fault matrix, and the rank above that is killed and named."""
    with command(tmp_path, *TWO, "--max_steps", "100000", "--restarts.per_role", "1") as process:
        process.wait_for_steps(2)
        ranks = {name: process.role(name).pid for name in ("trainer", "trainer-1")}
        process.role("trainer-1").kill()
        process.wait_until(lambda: records(process.folder / "metrics.jsonl")[-1].get("training/restarts") == 1)
        assert all(process.role(name).pid != pid for name, pid in ranks.items())
        process.role("trainer-1").kill()
        status, printed = process.wait()
        assert (status, process.leftovers()) == (1, [])
    summary = read_summary(process.folder)
    assert summary.status is RunStatus.FAILED
    assert re.search(r"the trainer-1 left early, killed by SIGKILL", summary.reason), printed


def test_an_error_of_one_rank_alone_ends_the_run_as_one_of_rank_0_does(tmp_path: Path) -> None:
    failing = ("--trainer.loss.name", "tests.support.losses:failing_on_rank_1", "--max_steps", "2")
    with command(tmp_path, *TWO, *failing) as process:
        status, printed = process.wait()
        assert (status, process.leftovers()) == (1, []), printed
    assert "is started again" not in printed
    summary = read_summary(process.folder)
    assert summary.status is RunStatus.FAILED
    assert re.match(r"trainer-1: trainer\.loss\.name .* raised ValueError: these rows cannot be judged", summary.reason)


def test_settings_that_ranks_cannot_have_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    on_gpus = ("--trainer.device", "cuda")
    refused = {
        ("--trainer.ranks", "2", "--placement", "inline"): "needs a process for each rank",
        ("--trainer.ranks", "2", *on_gpus, "--trainer.devices", "0,1,2"): "names 3 GPUs, and trainer.ranks = 2",
        ("--trainer.ranks", "2", *on_gpus, "--trainer.devices", "1,1"): "names the GPU 1 twice",
        ("--trainer.ranks", "2", "--trainer.device", "cuda:1"): "is one GPU, and trainer.ranks = 2",
        ("--trainer.ranks", "4", *on_gpus): "trainer.ranks is 4, and this run sees 3 GPUs",
        ("--trainer.tensor_parallel", "2"): "tensor_parallel is not to be had in the trainer",
        ("--trainer.expert_parallel", "2"): "expert_parallel is not to be had in the trainer",
        ("--trainer.context_parallel", "2"): "write ranks = 2 and sequence_parallel = 2",
        ("--trainer.ranks", "3", "--trainer.sequence_parallel", "2"): "ranks = 3 cannot be parted into groups",
    }
    for overrides, why in refused.items():
        assert main(["train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", *overrides]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_each_rank_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    on_gpus = ("--trainer.device", "cuda", "--trainer.ranks", "2")
    shares = role_devices(tiny_settings(*on_gpus, "--generator.device", "cuda"))
    assert shares == {"trainer": ("4",), "trainer-1": ("5",), "generator": ("GPU-6",)}
    shares = role_devices(tiny_settings(*on_gpus, "--trainer.devices", "7,4"))
    assert shares == {"trainer": ("7",), "trainer-1": ("4",)}


def test_a_dry_run_tells_of_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", *TINY, *TWO, "--dry-run"]) == 0
    assert "The trainer is 2 processes: each holds 1/2 of weights" in " ".join(capsys.readouterr().out.split())
    assert main(["train", "quickstart", *TINY, *TWO, "--trainer.sequence_parallel", "2", "--dry-run"]) == 0
    assert "takes a slice of each row that 2 of them compute together" in " ".join(capsys.readouterr().out.split())


def test_steps_of_slurm_on_one_node_meet_at_ports_of_their_own() -> None:
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    ports = {
        (job, step): {
            launched_rank(
                TrainerSettings(ranks=2), {**two, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": number}
            ).port
            for number in ("0", "1")
        }
        for job in ("4711", "4712")
        for step in ("0", "1")
    }
    assert all(len(of_step) == 1 for of_step in ports.values())
    assert len(set.union(*ports.values())) == len(ports)
    assert max(set.union(*ports.values())) < 20_000 <= free_port()  # a role may have taken any of those


def test_a_port_that_another_has_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        expected = rf"cannot use port {port} of 127.0.0.1, .*: export another MASTER_PORT, .*\(.*in use.*\)$"
        with pytest.raises(SettingsError, match=expected):
            LaunchedRanks(Rank(number=0, size=2, host="127.0.0.1", port=port))


TAKING_A_ROLE = """
import sys
from tailrace.lifecycle.early_signals import end_at_once_when_asked
from tailrace.run.ranks import Rank
from tailrace.run.trainer_ranks import take_role
from tailrace.training.settings.trainer import TrainerSettings

end_at_once_when_asked()
sys.exit(take_role(Rank(number=1, size=2, host="127.0.0.1", port=int(sys.argv[1])), TrainerSettings(ranks=2)))
"""


def test_a_rank_that_others_started_leaves_signals_to_process_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_port()
    ranks = LaunchedRanks(Rank(number=0, size=2, host="127.0.0.1", port=port))
    settings = str(tmp_path).encode()
    ranks.give_roles([RoleSpec("trainer-1", "tests.support.light_roles:leave_when_told", settings=settings)])
    arguments = [sys.executable, "-c", TAKING_A_ROLE, str(port)]
    with subprocess.Popen(arguments, env={**os.environ, **IMPORTS}) as process:
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not (tmp_path / "running").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            for number in EXIT_CODES:
                process.send_signal(number)
            (tmp_path / "leave").touch()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def launched(launcher: str, parent: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    """The processes of a run that torchrun or srun starts."""
    arguments = ["train", "quickstart", *TINY, *environment("words"), *TWO, *overrides, "--name", "run"]
    given = {**os.environ, **IMPORTS, "OMP_NUM_THREADS": "1"}
    if launcher == "torchrun":
        commands, environments = [[*TORCHRUN, *arguments]], [given]
    else:  # what srun gives its processes
        commands = [[sys.executable, "-m", "tailrace", *arguments]] * 2
        port = {"MASTER_PORT": str(free_port()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
        environments = [{**given, **port, "SLURM_PROCID": str(rank)} for rank in (0, 1)]
    return [
        subprocess.Popen(one, cwd=parent, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for one, own in zip(commands, environments, strict=True)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Their exit statuses, and all that they printed."""
    try:
        printed = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "".join(printed)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_started_by_others_train_too(tmp_path: Path, launcher: str) -> None:
    statuses, printed = ended(launched(launcher, tmp_path, "--max_steps", "2"))
    assert set(statuses) == {0}, printed
    summary = read_summary(tmp_path / "runs" / "run")
    assert (summary.steps, summary.cpu_s) == (2, None)  # rank 1's is not known
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_000002"
    assert len([*(checkpoint / "optimizer").glob("*.distcp")]) == 2


@pytest.mark.long
def test_a_sigterm_to_all_processes_that_srun_started_ends_the_run_with_a_last_save(tmp_path: Path) -> None:
    processes = launched("srun", tmp_path, "--max_steps", "100000")
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not records(tmp_path / "runs" / "run" / "metrics.jsonl"):
            assert [process.poll() for process in processes] == [None, None]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    statuses, printed = ended(processes)
    assert statuses == [143, 0], printed
    summary = read_summary(tmp_path / "runs" / "run")
    assert (summary.status, summary.exit_code) == (RunStatus.CANCELLED, 143)
    assert Path(summary.checkpoint_path).name == f"step_{summary.steps:06d}"
