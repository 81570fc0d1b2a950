"""Runs of real processes that feed a trainer with a will of its own, over Redis: it always gets all its steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_external_trainer import TINY, started, summary, variables
from tests.run.runs import PATIENCE_S, ROOT, records
from tests.support.redis_servers import needs_redis
from tests.support.wilful_trainer import DIED

STEPS = 6


def lives(folder: Path, *, ranks: int, seed: int) -> list[dict[str, list[str]]]:
    """What each step was taken on, over all lives of the trainer."""
    told: list[dict[str, list[str]]] = []
    for life in range(2):
        program = [sys.executable, ROOT / "tests" / "support" / "wilful_trainer.py", "runs/outside", "weights"]
        numbers = [STEPS, 4, ranks, seed, len(told), life]
        trainer = subprocess.run(
            [*program, *map(str, numbers)],
            cwd=folder,
            env=variables(),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        told += map(json.loads, trainer.stdout.splitlines())
        if trainer.returncode == 0:
            return told
        assert trainer.returncode == DIED, trainer.stderr + (folder / "output").read_text()
    raise AssertionError("it died twice")


@needs_redis
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 2, 3, 4))])
def test_a_trainer_with_a_will_of_its_own_gets_all_its_steps(tmp_path: Path, seed: int) -> None:
    with started(tmp_path, *TINY) as run:
        told = lives(tmp_path, ranks=[2, 3, 4, 1, 16][seed], seed=seed)
        assert run.wait(PATIENCE_S) == 0, (tmp_path / "output").read_text()
    assert [step["step"] for step in told] == list(range(1, STEPS + 1))
    trained = [one for step in told for one in step["samples"]]
    assert len({*trained}) == len(trained)
    lines = records(tmp_path / "runs" / "outside" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["batch/samples"] for line in lines] == [len(step["samples"]) for step in told]
    said = summary(tmp_path)
    ledger = said["ledger"]
    assert (said["status"], said["steps"]) == ("finished", STEPS)
    assert ledger["in_flight"] == 0
    assert ledger["admitted"] == sum(ledger["by_state"].values())
    assert ledger["by_state"]["trained"] == len({one.rpartition("/")[0] for one in trained})
