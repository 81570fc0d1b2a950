"""Runs one job with Tailrace's command line, and the same job with TRL in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
class Outcome:
    """From the first rollout to the last step."""

    tokens: int
    """Trained completion tokens."""
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


def run_tailrace(job: Job, folder: Path, name: str) -> Outcome:
    """`tailrace train` in its three processes; figures from the run's summary."""
    settings = folder / f"{name}.toml"
    settings.write_text(_settings(job, name))
    _run([str(TAILRACE), "train", str(settings)], folder, f"tailrace-{name}")
    run = folder / "runs" / name
    summary = json.loads((run / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        tokens=summary["tokens_trained"],
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


def run_peer(job: Job, folder: Path, name: str) -> Outcome:
    """TRL's trainer, all in one process."""
    work = folder / f"trl-{name}"
    work.mkdir()
    spec: dict[str, Any] = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(job).items()}
    spec |= {"folder": str(work / "output"), "figures": str(work / "figures.json"), "save": str(work / "model")}
    spec |= {"micro_batch": job.batch_size}
    (work / "job.json").write_text(json.dumps(spec))
    _run([str(PEER_PYTHON), str(ROOT / "benchmarks" / "trl_peer.py"), str(work / "job.json")], folder, f"trl-{name}")
    figures = json.loads((work / "figures.json").read_text())
    return Outcome(figures["tokens"], figures["cpu_s"], figures["wall_s"], figures["mean_tokens"], work / "model")


def environment() -> dict[str, str]:
    """Of every process that is measured: one thread, no network, and the code of the tree that this file lies in."""
    variables = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "TOKENIZERS_PARALLELISM": "false"}
    return variables | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


def _run(command: list[str], folder: Path, name: str) -> str:
    """Standard output; exits with the end of the log when the command fails."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed with status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def _settings(job: Job, name: str) -> str:
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
slots = {4 * job.batch_size}
[trainer]
dtype = "{job.precision}"
learning_rate = {job.learning_rate}
[observability]
report = false
"""
