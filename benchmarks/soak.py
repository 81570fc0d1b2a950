"""Whether a run grows: 500 steps of a tiny model that does the same in every step, each process's memory after each.

    python benchmarks/soak.py [--json] [--quick] [--case orchestrator ...] [--png FILE] [--steps 500]

A small Qwen3 whose replies are all 16 tokens long, one prompt, 2 groups of 2 rollouts a step, a learning rate that
changes nothing; one generator, one trainer, the orchestrator and an agent worker, which plays the rollouts, each a
process. Growth: the least resident size in the last tenth of the steps over that in the tenth after warm-up (50 steps
of 500; of --quick's 60 steps 20), less 1; the least, since a generator maps new weights while it installs them, at
whatever moment it is looked at. Target: 1 % at most. Lengths are fixed because torch keeps something for each new
shape, until it has met them all.
`trim` gives a gigabyte back to the system (`malloc_trim`) in a thread, and samples the loop meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kit import ROOT, Options, common_options, common_parser, progress, report

STEPS, WARMUP = 500, 50
QUICK_STEPS, QUICK_WARMUP = 60, 20
MAX_GROWTH = 0.01
ROLES = ("orchestrator", "trainer", "generator", "agent_worker_0")
COLOURS = ("#0e8a87", "#5a7fb8", "#d08a2e", "#8a5fa8")
MEGABYTE = 1_000_000
REPLY_TOKENS = 16
NEVER_ENDS = 1e-9
VOCABULARY = 16_384
"""So many that rollouts of a group hardly ever begin alike: what they share goes through the trainer once."""
RUN = (
    *("--environment.name", "benchmarks.soak_environment:same"),
    *("--rollouts.group_size", "2", "--rollouts.max_tokens", str(REPLY_TOKENS), "--rollouts.max_turns", "1"),
    *("--scheduling.batch_size", "4", "--scheduling.row_tokens", "512"),
    *("--scheduling.filter_zero_spread", "false"),
    *("--generator.slots", "8", "--generator.max_cache_tokens", "512"),
    *("--trainer.learning_rate", "1e-12", "--trainer.decay", "constant"),
    *("--observability.live", "off", "--observability.report", "false"),
)


@dataclass(frozen=True)
class Row:
    """One process."""

    case: str
    steps: int
    warm_bytes: int
    end_bytes: int
    peak_bytes: int
    growth: float
    target: str
    met: bool


@dataclass(frozen=True)
class TrimRow:
    """One gigabyte given back."""

    case: str
    kept_bytes: int
    given_back_bytes: int
    give_back_s: float
    lag_before_max_s: float
    lag_during_max_s: float


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--png", type=Path, help="draw each process's memory into this file")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    options = common_options(arguments)
    cases = options.choose([*ROLES, "trim"])
    rows: list[Row | TrimRow] = []
    if roles := [case for case in cases if case != "trim"]:
        rows += soak(roles, options, arguments)
    if "trim" in cases:
        rows.append(asyncio.run(trim()))
    report("Soak", rows, options)


def soak(roles: list[str], options: Options, arguments: argparse.Namespace) -> list[Row]:
    steps, warmup = (QUICK_STEPS, QUICK_WARMUP) if options.quick else (arguments.steps, WARMUP)
    sizes = resident(steps)
    if arguments.png:
        draw(sizes, arguments.png, warmup)
    return [row(role, sizes[role], warmup) for role in roles]


def resident(steps: int) -> dict[str, list[float]]:
    """Bytes after each step, by role."""
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model")
        command = [sys.executable, "-m", "tailrace", "train", "quickstart", "--name", "soak", *RUN]
        places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        progress(f"{steps} steps ...")
        done = subprocess.run(
            [*command, "--max_steps", str(steps), "--model.name", str(model)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": places},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        lines = (Path(folder) / "runs/soak/metrics.jsonl").read_text().splitlines()
    return by_role([json.loads(line) for line in lines])


def by_role(records: list[dict[str, float]]) -> dict[str, list[float]]:
    """Bytes after each step. Every process whose memory the run tells of has to be among `ROLES`."""
    names = {f"memory/{role}_rss_bytes": role for role in ROLES}
    if others := {name for name in set().union(*records) - names.keys() if name.endswith("_rss_bytes")}:
        sys.exit(f"the run has processes that are not looked at: {', '.join(sorted(others))}")
    return {role: [record[name] for record in records] for name, role in names.items()}


def make(folder: Path) -> Path:
    """A model that never ends a reply by itself."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.small_model import ModelSize, make_model, make_tokenizer, save, set_end_probability

    model = make_model(ModelSize(layers=2, hidden=128, heads=2, key_value_heads=1, vocabulary=VOCABULARY))
    set_end_probability(model, NEVER_ENDS)
    save(folder, model, make_tokenizer(["one two three"], VOCABULARY))
    return folder


def row(role: str, sizes: list[float], warmup: int) -> Row:
    tenth = max(1, len(sizes) // 10)
    warm, end = min(sizes[warmup : warmup + tenth]), min(sizes[-tenth:])
    growth = end / warm - 1
    target = f"growth <= {MAX_GROWTH:.0%}"
    return Row(role, len(sizes), int(warm), int(end), int(max(sizes)), growth, target, growth <= MAX_GROWTH)


def draw(sizes: dict[str, list[float]], path: Path, warmup: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for role, colour in zip(ROLES, COLOURS, strict=True):
        axes.plot(range(1, len(sizes[role]) + 1), [size / MEGABYTE for size in sizes[role]], label=role, color=colour)
    axes.axvline(warmup, color="#64748b", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step (growth counts from the dotted line)")
    axes.set_ylabel("resident memory, MB")
    axes.legend(frameon=False, ncols=4, loc="lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=160)


async def trim() -> TrimRow:
    """Pieces of 100 kB, of which every 50th stays, so that nothing can be given back without being asked for."""
    import numpy as np

    from tailrace.cpu.memory import glibc_heap, reserve_memory
    from tailrace.replay.loop_load import LagSampler, loop_traffic

    heap = glibc_heap()
    if heap is None:
        sys.exit("the case trim needs glibc 2.33 or later")
    reserve_memory(0)  # as a run's orchestrator sets the allocator
    pieces = [np.ones(25_000, np.int32) for _ in range(10_000)]
    stays = pieces[::50]
    del pieces
    kept_bytes = heap.free_bytes()
    before, during = LagSampler(), LagSampler()
    async with loop_traffic(200):
        user = asyncio.create_task(_allocate())
        async with before:
            await asyncio.sleep(0.5)
        async with during:
            since_s = asyncio.get_running_loop().time()
            given_back = await asyncio.to_thread(heap.give_back)
            took_s = asyncio.get_running_loop().time() - since_s
        user.cancel()
    del stays
    return TrimRow("trim", kept_bytes, given_back, took_s, before.statistics().max_s, during.statistics().max_s)


async def _allocate() -> None:
    """Somebody on the loop needs memory now and then."""
    while True:
        bytearray(100_000)
        await asyncio.sleep(0.002)


if __name__ == "__main__":
    main()
