"""What the wall clock says is of no concern to a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tailrace.records import RunStatus
from tailrace.reporting.summary import read_summary
from tests.run.runs import IMPORTS, PATIENCE_S, ROLES, command, records

LEAPING = """
import itertools, time

def leaping(clock, unit):
    leaps = itertools.cycle((0, 86_400 * unit, -86_400 * unit))
    return lambda: clock() + next(leaps)

time.time, time.time_ns = leaping(time.time, 1), leaping(time.time_ns, 1_000_000_000)
"""
"""Every other look at the clock is a day late or early, in each process that finds this as its `sitecustomize`."""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("roles", [*ROLES, pytest.param(("--placement", "inline"), id="in one process")])
def test_a_run_whose_wall_clock_leaps_by_days_in_every_process_is_as_any_other(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    clocks = tmp_path / "clocks"
    clocks.mkdir()
    (clocks / "sitecustomize.py").write_text(LEAPING)
    variables = {"PYTHONPATH": os.pathsep.join([str(clocks), IMPORTS["PYTHONPATH"]])}
    with command(tmp_path, *roles, "--max_steps", "4", variables=variables) as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    summary = read_summary(run.folder)
    assert summary is not None
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 4)
    assert summary.ledger.balances
    assert not summary.ledger.by_reason.get("failed")
    walls_s = [line["wall_s"] for line in records(run.folder / "metrics.jsonl")]
    assert 0 < walls_s[0] <= walls_s[-1] < PATIENCE_S
    assert walls_s == sorted(walls_s)
