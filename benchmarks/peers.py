"""Runs one job with Tailrace's command line, and the same job with TRL in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.kit import ROOT, THREAD_VARIABLES

PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TAILRACE = Path(sys.executable).parent / "tailrace"


@dataclass(frozen=True)
class Job:
    """What both train."""

    model: Path
    tasks: Path
    reward: str
    precision: str
    steps: int
    group_size: int
    batch_size: int
    max_tokens_per_completion: int
    learning_rate: float
    seed: int = 0
    max_tokens: int | None = None
    """Trained tokens after which TRL ends, instead of after `steps`."""

    def until(self, max_tokens: int) -> Job:
        """The same, ended by tokens."""
        return replace(self, max_tokens=max_tokens, steps=10 * self.steps)


@dataclass(frozen=True)
class Tuning:
    """How TRL is set up; by default as it sets itself up, but for accumulating up to the job's batch."""

    micro_batch: int = 8
    """`per_device_train_batch_size`."""
    steps_per_generation: int | None = None
    """Passes of `micro_batch` that one generation lasts for; None: as many as are accumulated, one optimizer step."""
    attention: str = "sdpa"
    continuous_batching: bool = False
    has_our_allocator: bool = False
    """glibc keeps what is freed, in one arena of huge pages, as Tailrace sets it in code."""
    threads: int = 1

    @property
    def variables(self) -> dict[str, str]:
        """Of its process."""
        threads = dict.fromkeys(THREAD_VARIABLES, str(self.threads))
        return threads | ALLOCATOR_VARIABLES if self.has_our_allocator else threads


ALLOCATOR_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""What `tailrace.cpu.memory` does for a trainer."""

TRL_DEFAULTS = Tuning()
TRL_TUNED = Tuning(has_our_allocator=True)
"""The best of `trl_sweep.py`."""


@dataclass(frozen=True)
class Outcome:
    """From the first rollout to the last step."""

    tokens: int
    """Trained completion tokens."""
    generated_tokens: int
    cpu_s: float
    """User and system time of all processes."""
    wall_s: float
    mean_tokens: float
    """Of trained completions."""
    model: Path

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def require_peer() -> None:
    """Exit with what to do when TRL is not installed."""
    if not PEER_PYTHON.exists():
        sys.exit("TRL's environment is missing: run `make bench-trl-env` first")


def run_tailrace(job: Job, folder: Path, name: str, *, slots: int | None = None) -> Outcome:
    """`tailrace train` in its three processes; figures from the run's summary. By default four steps' `slots`."""
    settings = folder / f"{name}.toml"
    settings.write_text(_settings(job, name, slots or 4 * job.batch_size))
    _run([str(TAILRACE), "train", str(settings)], folder, f"tailrace-{name}")
    run = folder / "runs" / name
    summary = json.loads((run / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        tokens=summary["tokens_trained"],
        generated_tokens=summary["tokens_generated"],
        cpu_s=summary["cpu_s"],
        wall_s=steps[-1]["wall_s"],
        mean_tokens=summary["tokens_trained"] / summary["ledger"]["by_state"]["trained"],
        model=max((run / "checkpoints").glob("step_*")),
    )


def tailrace_reward(model: Path, held_out: Path, folder: Path, name: str) -> float:
    """Mean held-out reward by `tailrace eval`, at temperature 1 with a fixed seed."""
    settings = folder / f"eval-{name}.toml"
    settings.write_text(
        f"""name = "eval-{name}"
max_steps = 1
[model]
name = "{model}"
[[environments]]
name = "benchmarks.shared_environments:reverse"
data = "{held_out}"
eval_data = "{held_out}"
[rollouts]
max_tokens = 32
"""
    )
    output = _run([str(TAILRACE), "eval", str(settings), "--json"], folder, f"eval-{name}")
    return float(json.loads(output.splitlines()[-1])["reverse"]["reward_mean"])


def run_peer(job: Job, folder: Path, name: str, tuning: Tuning = TRL_TUNED) -> Outcome:
    """TRL's trainer, all in one process."""
    work = folder / f"trl-{name}"
    work.mkdir()
    spec: dict[str, Any] = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(job).items()}
    spec |= {"folder": str(work / "output"), "figures": str(work / "figures.json"), "save": str(work / "model")}
    spec |= {"tuning": asdict(tuning)}
    (work / "job.json").write_text(json.dumps(spec))
    command = [str(PEER_PYTHON), str(ROOT / "benchmarks" / "trl_peer.py"), str(work / "job.json")]
    _run(command, folder, f"trl-{name}", tuning.variables)
    figures = json.loads((work / "figures.json").read_text())
    return Outcome(
        tokens=figures["tokens"],
        generated_tokens=figures["tokens"],
        cpu_s=figures["cpu_s"],
        wall_s=figures["wall_s"],
        mean_tokens=figures["mean_tokens"],
        model=work / "model",
    )


def environment() -> dict[str, str]:
    """Of every process that is measured: one thread, no network, and the code of the tree that this file lies in."""
    variables = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "TOKENIZERS_PARALLELISM": "false"}
    return variables | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


def _run(command: list[str], folder: Path, name: str, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Standard output; exits with the end of the log when the command fails."""
    process = {**environment(), **variables}
    done = subprocess.run(command, cwd=folder, env=process, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed with status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def _settings(job: Job, name: str, slots: int) -> str:
    return f"""name = "{name}"
seed = {job.seed}
max_steps = {job.steps}
[model]
name = "{job.model}"
dtype = "{job.precision}"
[[environments]]
name = "benchmarks.shared_environments:{job.reward}"
data = "{job.tasks}"
[rollouts]
group_size = {job.group_size}
max_tokens = {job.max_tokens_per_completion}
[scheduling]
batch_size = {job.batch_size}
[generator]
slots = {slots}
[trainer]
dtype = "{job.precision}"
learning_rate = {job.learning_rate}
[observability]
report = false
"""
