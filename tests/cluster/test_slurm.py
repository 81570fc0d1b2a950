"""Rendered batch scripts: what they say, that shell and command line take it, and what they do under a stand-in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.cluster.slurm import OPTIONS
from tailrace.records import RunStatus
from tailrace.reporting.summary import read_summary
from tests.cluster.commands import require_known
from tests.run.runs import IMPORTS, TINY, environment, records
from tests.support.stand_in_slurm import StandInSlurm, commands_of, notify

FOLDER = ("--folder", "/shared/work")
SPREAD = ("--gpus-per-node", "0", "--cpus-per-node", "4", "--generator.replicas", "2")
ON_GPUS = ("--trainer.device", "cuda", "--generator.engine", "vllm")
PATIENCE_S = 200.0


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["cluster", "render", "slurm", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


CASES = {
    "one node": FOLDER,
    "generators elsewhere": (*FOLDER, *SPREAD),
    "names that a shell would take apart": (
        *("--folder", "/shared/it's mine", *SPREAD, "--setup", "export A='b c'", "--sbatch", "comment=for $you"),
        *("--model.name", 'mod\'els/my "model" $HOME', "--name", "run.1-b"),
    ),
    "ranks and generators on GPUs": (
        *(*FOLDER, *ON_GPUS, "--trainer.ranks", "8", "--generator.replicas", "4", "--generator.tensor_parallel", "4"),
        *("--generator.vllm.max_num_seqs", "256", "--generator.vllm.gpu_memory_utilization", "0.9"),
    ),
    "generators on GPUs alone": (
        *(*FOLDER, "--generator.engine", "vllm", "--generator.replicas", "9", "--trainer.device", "cpu"),
        *("--placement", "redis", "--transport.redis.url", "redis://trainer@host:6379/0"),
    ),
    "a trainer on a node of its own": (
        *(*FOLDER, *SPREAD, "--placement", "redis", "--transport.redis.url", "redis://trainer@host:6379/0"),
        *("--trainer.threads", "4"),
    ),
}


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_a_script_is_one_that_shell_and_sbatch_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    script = tmp_path / "run.sbatch"
    script.write_text(rendered(capsys, *("quickstart", *arguments)))
    subprocess.run(["bash", "-n", script], check=True)
    checker = Path(sys.executable).with_name("shellcheck")
    of_quotes = "--exclude=SC2016"  # that nothing in them expands is their purpose
    checked = subprocess.run([checker, of_quotes, script], capture_output=True, text=True, check=False)
    assert checked.stdout == ""
    directives = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+|\".*\"))?$", script.read_text(), flags=re.MULTILINE)
    assert len(directives) == script.read_text().count("#SBATCH")
    assert {name for name, _ in directives} <= OPTIONS


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_every_command_of_a_script_is_one_that_tailrace_has(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    commands = commands_of(rendered(capsys, "quickstart", *arguments))
    assert [command[1] for command in commands].count("train") == 1
    for command in commands:
        require_known(command)


def test_names_reach_the_roles_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    commands = commands_of(rendered(capsys, "quickstart", *CASES["names that a shell would take apart"]))
    model = 'mod\'els/my "model" $HOME'
    assert next(one[2] for one in commands if one[1] == "serve") == model
    assert f"--model.name={model}" in next(one for one in commands if one[1] == "train")


def test_roles_that_fit_one_node_are_left_to_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "quickstart", *FOLDER, *ON_GPUS, "--trainer.ranks", "4", "--generator.replicas", "4")
    assert "#SBATCH --nodes=1\n" in script
    assert "#SBATCH --gres=gpu:8\n" in script
    assert [command[1] for command in commands_of(script)] == ["train"]


def test_generators_fill_nodes_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "quickstart", *CASES["ranks and generators on GPUs"])
    assert "#SBATCH --nodes=3\n" in script
    assert "nodes_of_generators=(1 1 2 2)\n" in script
    assert '--nodelist="$node" --cpus-per-task=5 --gres=gpu:4 ' in script
    assert '--nodelist="${nodes[0]}" --cpus-per-task=11 --gres=gpu:8 ' in script


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_a_step_without_gpus_asks_for_none_where_the_job_has_some(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    script = rendered(capsys, "quickstart", *arguments)
    steps = [line for line in script.splitlines() if '"${step[@]}"' in line]
    asked = [re.search(r" --gres=(none|gpu:[1-9]\d*)(?: |$)", step) is not None for step in steps]
    assert asked == ["#SBATCH --gres=" in script] * len(steps) != []


def test_notice_comes_before_the_end_by_as_much_as_the_run_may_take(capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, "quickstart", *FOLDER, "--shutdown.grace_s", "300")
    assert "#SBATCH --signal=B:USR1@395\n" in script


def test_deadlines_are_those_that_the_run_makes_of_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    slowly = ("--deadline_scale", "3", "--generator.router.start_deadline_s", "100")
    script = rendered(capsys, "quickstart", *FOLDER, *SPREAD, *slowly, "--observability.trackers", "wandb")
    assert f"#SBATCH --signal=B:USR1@{3 * 80 + 10 + 30 + 30}\n" in script
    train = next(command for command in commands_of(script) if command[1] == "train")
    assert "--generator.connect_wait_s=300" in train


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((*FOLDER, "--image", "tailrace:1"), "--image is for kubernetes"),
        ((), "--folder is missing: name the folder as every node"),
        (("--folder", "work"), "--folder work is no absolute path"),
        (("--folder", "/tmp/work"), "--folder /tmp/work is each node's own"),
        ((*FOLDER, *ON_GPUS, "--trainer.ranks", "16"), "need 16 GPUs, and a node has 8: lower trainer.ranks"),
        ((*FOLDER, *ON_GPUS, "--generator.tensor_parallel", "16"), "lower generator.tensor_parallel"),
        ((*FOLDER, *SPREAD, "--trainer.threads", "8"), "CPUs, and a node has 4"),
        ((*FOLDER, "--placement", "inline"), "placement = 'inline' is not started by role"),
        ((*FOLDER, "--generator.connect", "tcp://127.0.0.1:1"), "what is rendered starts its own"),
        ((*FOLDER, *SPREAD, "--generator.return_routed_experts", "true"), 'write transport.payloads = "value"'),
        (
            (*FOLDER, *ON_GPUS, "--generator.replicas", "16", "--transport.weights", "nccl"),
            "transport.weights = 'nccl'",
        ),
        ((*FOLDER, *ON_GPUS, "--generator.replicas", "9", "--trainer.devices", "[0]"), "trainer.devices names GPUs"),
        ((*FOLDER, *SPREAD, "--generator.replicas", "{min = 4, max = 9}"), "lets generators come and go"),
        ((*FOLDER, "--shutdown.grace_s", "100000"), "lower shutdown.grace_s"),
        ((*FOLDER, "--resume"), "goes on by itself where its run has begun"),
        ((*FOLDER, "--sbatch", "partitions=gpu"), "sbatch has no option 'partitions'"),
        ((*FOLDER, "--sbatch", "nodes=3"), "nodes follows from the run's settings"),
        ((*FOLDER, "--sbatch", 'comment="'), "leave quotes and line ends out"),
        *(
            ((*FOLDER, *way, "--transport.redis.url", "redis://:secret@host:6379/0"), "TAILRACE_REDIS_PASSWORD")
            for way in (("--placement", "redis"), ("--transport.batches", "redis"))
        ),
    ],
)
def test_what_cannot_run_there_is_told_in_a_sentence_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    assert main(["cluster", "render", "slurm", "quickstart", *arguments]) == 2
    printed = capsys.readouterr()
    assert why in printed.err
    assert printed.out == ""


def job_script(capsys: pytest.CaptureFixture[str], folder: Path, *overrides: str) -> Path:
    folder.mkdir()
    script = folder / "run.sbatch"
    script.write_text(rendered(capsys, "quickstart", *FOLDER, *SPREAD, "--name", "run", *overrides))
    return script


def until(happened: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


STAND_IN_TAILRACE = """#!/bin/bash
echo "$*" >>"$STAND_IN/commands"
printf '%s\\0' "$@" >>"$STAND_IN/arguments"
case $1 in
key) touch "$2" ;;
serve) exec sleep 1000 ;;
train)
  mkdir -p runs/run && touch runs/run/config.toml
  until [ -e runs/run/preempt ] || [ -e "$STAND_IN/over" ]; do sleep 0.05; done
  if [ -e "$STAND_IN/over" ]; then exit "$(<"$STAND_IN/over")"; fi
  if [ -e "$STAND_IN/noticed" ]; then exit "$(<"$STAND_IN/noticed")"; fi
  exit 75
  ;;
esac
"""


def test_a_job_ends_by_notice_is_requeued_and_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The script is real, its roles only note what they are asked."""
    script = job_script(capsys, tmp_path / "work")
    cluster = StandInSlurm(tmp_path / "slurm", nodes=2)
    cluster.add("tailrace", STAND_IN_TAILRACE)
    with cluster.job(script, {}) as job:
        begun = script.parent / "runs/run/config.toml"  # a run without has nothing to save, and is ended by its job
        until(lambda: len(cluster.told("commands")) == 4 and begun.exists(), job)
        notify(job)
        assert job.wait(PATIENCE_S) == 75
        assert cluster.processes(job) == []
    assert cluster.told("requeued") == ["4711"]
    (script.parent / "runs/run/preempt").unlink(missing_ok=True)
    with cluster.job(script, {}) as job:
        until(lambda: len(cluster.told("commands")) == 7, job)
        (cluster.folder / "over").write_text("0")
        assert job.wait(PATIENCE_S) == 0
        assert cluster.processes(job) == []
    assert cluster.told("requeued") == ["4711"]
    commands = sorted(command.split(" --")[0] for command in cluster.told("commands"))
    assert commands == ["key runs/run.generators.key", *["serve bundled:quickstart"] * 4, *["train quickstart"] * 2]
    trained = [command for command in cluster.told("commands") if command.startswith("train")]
    connect = "--generator.connect=tcp://127.0.0.2:5757,tcp://127.0.0.2:5758"
    assert [(connect in one, one.endswith("--resume")) for one in trained] == [(True, False), (True, True)]


@pytest.mark.parametrize("overrides", [(), ("--generator.replicas", "1", "--cpus-per-node", "64")], ids=["2", "1"])
def test_a_job_that_has_notice_before_its_run_is_started_is_requeued_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    script = job_script(capsys, tmp_path / "work", "--setup", 'kill -USR1 "$$"', *overrides)
    (script.parent / "runs/run").mkdir(parents=True)
    (script.parent / "runs/run/config.toml").touch()  # of an earlier start
    cluster = StandInSlurm(tmp_path / "slurm", nodes=2)
    cluster.add("tailrace", STAND_IN_TAILRACE)
    with cluster.job(script, {}) as job:
        assert job.wait(PATIENCE_S) == 75
        assert cluster.processes(job) == []
    assert cluster.told("requeued") == ["4711"]
    assert not [command for command in cluster.told("commands") if command.startswith("train")]


STARTING_TAILRACE = """#!/bin/bash
case $1 in
key) touch "$2" ;;
serve) exec sleep 1000 ;;
train)
  touch "$STAND_IN/starting"
  until [ -e runs/run/preempt ]; do sleep 0.05; done
  touch "$STAND_IN/process" # it is there from now on
  for _ in {1..400}; do
    if [ runs/run/preempt -nt "$STAND_IN/process" ]; then exit 75; fi
    sleep 0.05
  done
  exit 3
  ;;
esac
"""


def test_a_notice_that_is_older_than_the_run_s_process_is_told_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = job_script(capsys, tmp_path / "work")
    (script.parent / "runs/run").mkdir(parents=True)
    cluster = StandInSlurm(tmp_path / "slurm", nodes=2)
    cluster.add("tailrace", STARTING_TAILRACE)
    with cluster.job(script, {}) as job:
        until((cluster.folder / "starting").exists, job)
        notify(job)
        assert job.wait(PATIENCE_S) == 75
        assert cluster.processes(job) == []
    assert cluster.told("requeued") == ["4711"]


@pytest.mark.parametrize(("status", "requeued"), [(0, []), (1, ["4711"]), (2, [])])
def test_a_job_whose_run_misses_its_last_save_is_requeued(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int, requeued: list[str]
) -> None:
    script = job_script(capsys, tmp_path / "work")
    cluster = StandInSlurm(tmp_path / "slurm", nodes=2)
    cluster.add("tailrace", STAND_IN_TAILRACE)
    (cluster.folder / "noticed").write_text(str(status))
    with cluster.job(script, {}) as job:
        until((script.parent / "runs/run/config.toml").exists, job)
        notify(job)
        assert job.wait(PATIENCE_S) == status
    assert cluster.told("requeued") == requeued


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_job_ends_as_its_run_does(capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int) -> None:
    script = job_script(capsys, tmp_path / "work")
    cluster = StandInSlurm(tmp_path / "slurm", nodes=2)
    cluster.add("tailrace", STAND_IN_TAILRACE)
    (cluster.folder / "over").write_text(str(status))
    with cluster.job(script, {}) as job:
        assert job.wait(PATIENCE_S) == status
        assert cluster.processes(job) == []
    assert cluster.told("requeued") == []


def test_the_shell_hands_names_over_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    odd = 'a b\'\n"$HOME" $(touch x) `id`; # \\'
    overrides = ("--model.name", odd, "--environment.args.order", odd)
    script = job_script(capsys, tmp_path / "work", *overrides)
    cluster = StandInSlurm(tmp_path / "slurm", nodes=2)
    cluster.add("tailrace", STAND_IN_TAILRACE)
    arguments = cluster.folder / "arguments"
    with cluster.job(script, {}) as job:
        until(lambda: arguments.exists() and sum(map(arguments.read_text().count, ("serve\0", "train\0"))) == 3, job)
        (cluster.folder / "over").write_text("0")
        assert job.wait(PATIENCE_S) == 0
    told = arguments.read_text().split("\0")
    assert {odd, f"--model.name={odd}", f"--environment.args.order={odd}"} <= {*told}
    assert not (script.parent / "x").exists()


@pytest.mark.long
def test_a_run_trains_over_a_job_and_the_next_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Real roles: an orchestrator with its trainer on one node, two generators on another."""
    overrides = (*TINY, *environment("words"), "--max_steps", "40", "--trainer.checkpoint_every_steps", "1000")
    script = job_script(capsys, tmp_path / "work", *overrides)
    folder = script.parent / "runs/run"
    cluster = StandInSlurm(tmp_path / "slurm", nodes=2)
    with cluster.job(script, IMPORTS) as job:
        until(lambda: len(records(folder / "metrics.jsonl")) >= 3, job)
        notify(job)
        printed, _ = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 75, printed
        assert cluster.processes(job) == []
    assert cluster.told("requeued") == ["4711"]
    stopped = read_summary(folder)
    assert stopped.checkpoint_path is not None
    with cluster.job(script, IMPORTS) as job:
        printed, _ = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, printed
        assert cluster.processes(job) == []
    finished = read_summary(folder)
    assert finished.status is RunStatus.FINISHED
    assert finished.ledger.balances
    assert [record["step"] for record in records(folder / "metrics.jsonl")] == [*range(1, 41)]
    steps = cluster.told("steps")
    assert sum("tailrace serve" in step and "--nodelist=127.0.0.2" in step for step in steps) >= 4
    assert sum("tailrace train" in step and "--nodelist=127.0.0.1" in step for step in steps) == 2
    assert (os.stat(script.parent / "runs/run.generators.key").st_mode & 0o777) == 0o600
