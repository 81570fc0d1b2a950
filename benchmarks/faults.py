"""What a run does when a part of it fails: every cell of the fault matrix with real processes, and a run under fire.

    python benchmarks/faults.py [--json] [--quick | --all] [--case generator ...]
    python benchmarks/faults.py --json --case chaos [--seed 0] [--wall_s 180]        # not among the others: minutes

A case is whom the fault strikes: a generator, an agent worker, the trainer, one of two ranks, the orchestrator; or what
a run stands on: disks, folders, shared memory, sockets, segments of batches. Its cells are those of the tests
(`tests/support/fault_cells.py`), runs of roles without a model whose deadlines are of 3 to 10 s (there). `as_specified`
counts cells in which the run ended as docs/lifecycle.md says, its newest checkpoint loads and its ledger balances;
`worst_exit_s` is the longest time from a fault to the end of the run's last process, whether it failed or went on to
its last step; `leaks` counts processes, sockets, shared memory and locks that were left. Some cells run at once, those
that wait longest first, so that a machine that is busy with other things shows in the times. By default processes leave
with status 0, or are stopped for a moment, in a step alone: at other moments that differs from SIGKILL, or from no
fault at all, by little. `--all` tries it there as well; `--quick` takes those of `QUICK`, which wait for no long
deadline.

`chaos`: the quickstart with two generators and two agent workers; every 5 s a process other than the orchestrator,
drawn by the seed, gets SIGKILL, for 3 minutes, and the run then goes on to its last step.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import kit  # isort: skip - before NumPy

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.chaos import ChaosRow, run_chaos
from tests.support.fault_cells import LIMIT_S, Cell, End, Outcome, all_cells, run_cell

CHAOS = "chaos"
QUICK = frozenset(
    {
        ("killed", "step"),
        *(("fill_disk", "step"), ("forbidden", "startup"), ("none", "startup")),
        ("delete_sockets", "step"),
    }
)
"""Blows and moments of the quick cells; without those that strike again and again."""
AT_ONCE_PER_CORE = 3
"""Cells: most of their time they wait for a deadline."""
_PATIENT = ("hangs", "stopped")
"""Blows that only a deadline ends."""
_MILD = ("leaves", "paused")


@dataclass(frozen=True)
class Row:
    """The cells of one victim."""

    case: str
    cells: int
    as_specified: int
    worst_exit_s: float
    leaks: int
    skipped: int
    """Cells that this system permits none of."""
    target: str
    met: bool | None
    """None where none was tried."""


def main() -> int:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the chaos")
    parser.add_argument("--all", action="store_true", help="mild faults at every moment, too")
    parser.add_argument("--wall_s", type=float, default=180.0, help="of the chaos: how long processes are killed")
    arguments = parser.parse_args()
    options = kit.common_options(arguments)
    every = [one for one in all_cells() if arguments.all or one.blow not in _MILD or one.moment == "step"]
    victims = list(dict.fromkeys(cell.victim for cell in every))
    chosen = options.choose([*victims, CHAOS])
    if not options.cases:
        chosen.remove(CHAOS)
    rows: list[Row | ChaosRow] = [*matrix([one for one in every if one.victim in chosen], quick=options.quick)]
    if CHAOS in chosen:
        rows.append(run_chaos(arguments.seed, 20.0 if options.quick else arguments.wall_s, quick=options.quick))
    kit.report("Faults", rows, options)
    return int(any(row.met is False for row in rows))


def matrix(cells: list[Cell], *, quick: bool) -> list[Row]:
    """Some at once, in the order of their names' victims."""
    if quick:
        cells = [cell for cell in cells if (cell.blow, cell.moment) in QUICK and cell.times <= 1]
    victims = list(dict.fromkeys(cell.victim for cell in cells))
    cells = sorted(cells, key=lambda cell: (cell.blow not in _PATIENT, cell.times < 2, cell.end is not End.ORPHANED))
    with ThreadPoolExecutor(AT_ONCE_PER_CORE * len(os.sched_getaffinity(0))) as pool:
        outcomes = dict(zip(cells, pool.map(tried, cells), strict=True))
    return [
        row_of(victim, [outcome for cell, outcome in outcomes.items() if cell.victim == victim]) for victim in victims
    ]


def tried(cell: Cell) -> Outcome | None:
    """None where this system does not permit it."""
    if cell.within.command() is None:
        kit.progress(f"{cell.name}: this system permits no {cell.within.value}")
        return None
    since_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tailrace-faults-") as folder:
        outcome = run_cell(cell, Path(folder).resolve())
    faults = [*outcome.wrong, *outcome.leaks]
    kit.progress(f"{cell.name}: {outcome.exit_s:.1f} of {time.monotonic() - since_s:.0f} s")
    for fault in faults:
        kit.progress(f"    {fault}")
    return outcome


def row_of(victim: str, outcomes: list[Outcome | None]) -> Row:
    done = [outcome for outcome in outcomes if outcome is not None]
    good = sum(not outcome.wrong for outcome in done)
    worst_s = max((outcome.exit_s for outcome in done), default=0.0)
    leaks = sum(len(outcome.leaks) for outcome in done)
    target = f"all as specified, no leak, ends within {LIMIT_S:.0f} s"
    is_met = good == len(done) and not leaks and worst_s < LIMIT_S if done else None
    return Row(victim, len(done), good, worst_s, leaks, len(outcomes) - len(done), target, is_met)


if __name__ == "__main__":
    sys.exit(main())
