"""The losses and the scoring of docs/losses.md, run as they stand there."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)
from tests.training.test_trainer import make_trainer
from tests.training.tiny import build_batch

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"


@pytest.fixture
def page() -> Iterator[Any]:
    """The page's Python blocks as a module that settings can name."""
    module = types.ModuleType("losses_of_the_page")
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(block, module.__dict__)
    sys.modules[module.__name__] = module
    importlib.invalidate_caches()
    yield module
    del sys.modules[module.__name__]


async def test_scoring_on_the_page_weighs_the_second_half_of_each_reply(page: Any) -> None:
    branch = Branch()
    for sampled in (4, 2):
        branch.extend_context([1, 2])
        ids = np.arange(sampled, dtype=np.int32)
        branch.extend_completion(Completion(ids, np.zeros(sampled, np.float32), ids * 0, FinishReason.STOP))
    task = Task(TaskId("toy/0"), "toy", 0, {})
    rollout = Rollout(RolloutId("r"), GroupId("g"), task, SamplingParams(), branches=[branch])
    await page.weigh(Group(GroupId("g"), task, [rollout]))
    assert branch.columns["weights"].tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 2]


async def test_scoring_on_the_page_lets_rewarded_rollouts_leave_the_reference(page: Any) -> None:
    task = Task(TaskId("toy/0"), "toy", 0, {})
    rollouts = [
        Rollout(RolloutId(f"r{value}"), GroupId("g"), task, SamplingParams(), reward=Reward(value))
        for value in (0.0, 1.0)
    ]
    for rollout in rollouts:
        rollout.branches = [Branch()]
        rollout.branches[0].extend_context([1, 2, 3])
    await page.loosen(Group(GroupId("g"), task, rollouts))
    found = [rollout.branches[0].columns["reference_kl_weights"] for rollout in rollouts]
    assert found[0].tolist() == [1, 1, 1]
    assert found[1] == pytest.approx([0.1] * 3)


def test_a_loss_on_the_page_reads_the_weights_of_its_tokens(page: Any, model_folder: Path) -> None:
    batch = build_batch()
    ones = np.ones(len(batch.token_ids), np.float32)
    chosen = {"name": f"{page.__name__}:weighted"}
    found = {}
    for name, weights in (("one", ones), ("two", 2 * ones), ("first", ones * (batch.token_ids < 32))):
        weighted = dataclasses.replace(batch, columns={"weights": weights})
        found[name] = make_trainer(model_folder, loss=chosen).train_step(weighted).metrics
    assert found["two"]["training/grad_norm"] == pytest.approx(2 * found["one"]["training/grad_norm"], rel=1e-5)
    rejected = 1 - (batch.token_ids[batch.loss_mask] < 32).mean()
    assert found["first"]["training/rejected_share"] == pytest.approx(rejected)


def test_the_other_loss_on_the_page_takes_a_step(page: Any, model_folder: Path) -> None:
    chosen = {"name": f"{page.__name__}:sequence_ratio", "args": {"highest": 2.0}}
    assert make_trainer(model_folder, loss=chosen).train_step(build_batch()).version == 1
