"""One seed for a run: of its tasks' order, its trainer's random numbers and its generators' random streams."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tailrace.environments import load_environment
from tailrace.run.roles import seed_of_life
from tailrace.scheduling import TaskSource, TaskStream
from tests.run.runs import rollouts, run_inline, tiny_settings


def test_every_life_of_every_generator_has_random_streams_of_its_own() -> None:
    lives = list(itertools.product((0, 7), range(3), range(3)))
    assert len({seed_of_life(*one) for one in lives}) == len(lives)
    assert seed_of_life(7, 0, 0) == 7


@pytest.mark.parametrize(
    ("given", "seed"),
    [((), 0), (("--seed", "5"), 5), (("--seed", "5", "--generator.seed", "0"), 0), (("--generator.seed", "6"), 6)],
)
def test_generators_have_the_seed_of_the_run_where_none_is_given_to_them(given: tuple[str, ...], seed: int) -> None:
    assert tiny_settings(*given).generator_seed == seed


async def test_tasks_and_trainer_have_the_seed_of_the_run(tmp_path: Path) -> None:
    settings = tiny_settings("--seed", "5")
    await run_inline(tmp_path, "--seed", "5", "--max_steps", "1")
    assert torch.initial_seed() == 5
    stream = TaskStream([TaskSource(load_environment(settings.environments[0]))], seed=5)
    first = [stream.task_id(key) for key in (stream.draw() for _ in range(32)) if key is not None]
    tasks = {record["task_id"] for record in rollouts(tmp_path / "run")}
    assert tasks
    assert tasks <= {*first}
