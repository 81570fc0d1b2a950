"""Runs whose trainer is not ours: one of plain torch in every test, TRL's where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.external_trainer import padded

import tailrace
from tailrace.config import load_settings
from tailrace.errors import SettingsError
from tailrace.feed import StreamedSample
from tests.run.runs import IMPORTS, PATIENCE_S, ROOT, environment, records, rollouts
from tests.support.fed_runs import as_received, feed_samples
from tests.support.redis_servers import needs_redis

SETTINGS = ROOT / "examples" / "external_trainer.toml"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TINY = (
    *("--rollouts.group_size", "2", "--rollouts.max_tokens", "6", "--rollouts.max_turns", "1"),
    *("--scheduling.batch_size", "4", "--scheduling.filter_zero_spread", "false", "--scheduling.max_staleness", "1"),
    *("--generator.max_cache_tokens", "512", "--generator.slots", "8"),
    *environment("words"),
)


def variables() -> dict[str, str]:
    return {**os.environ, **IMPORTS, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`tailrace train` with the example's settings; ended at the end, if it does not end by itself."""
    command = [Path(sys.executable).with_name("tailrace"), "train", SETTINGS, *arguments, "--observability.live", "off"]
    with (folder / "output").open("w") as output:
        run = subprocess.Popen(command, cwd=folder, env=variables(), stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            yield run
        finally:
            if run.poll() is None:
                run.terminate()
            run.wait()


def train_beside(folder: Path, program: Sequence[str | Path], *arguments: str, patience_s: float) -> str:
    """A run and its trainer, both to their end; what the trainer printed."""
    with started(folder, *arguments) as run:
        trainer = subprocess.run(
            program, cwd=folder, env=variables(), capture_output=True, text=True, check=False, timeout=patience_s
        )
        printed = trainer.stdout + trainer.stderr
        assert trainer.returncode == 0, printed + (folder / "output").read_text()
        assert run.wait(PATIENCE_S) == 0, (folder / "output").read_text()
    return trainer.stdout


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "runs" / "outside" / "summary.json").read_text()))


@needs_redis
def test_a_trainer_of_plain_torch_is_fed_takes_its_own_steps_and_ends_the_run(tmp_path: Path) -> None:
    program = [sys.executable, ROOT / "tests" / "support" / "streamed_trainer.py", "runs/outside", "weights", "5", "3"]
    printed = train_beside(tmp_path, program, *TINY, patience_s=PATIENCE_S)
    steps = [json.loads(line) for line in printed.splitlines()]
    assert [step["samples"] for step in steps] == [4, 3, 4, 3, 4]
    assert max(step["furthest"] for step in steps) < 1e-3  # what it was handed is of the distribution it was sampled of
    assert steps[0]["versions"] == [0]
    assert max(steps[-1]["versions"]) >= 1  # its weights have reached the generator
    told = summary(tmp_path)
    assert (told["status"], told["steps"]) == ("finished", 5)
    trained = [one for one in rollouts(tmp_path / "runs" / "outside") if one["outcome"]["state"] == "trained"]
    assert len(trained) == 18
    assert len(records(tmp_path / "runs" / "outside" / "metrics.jsonl")) == 5
    assert not (tmp_path / "runs" / "outside" / "feed.json").exists()  # nobody is there any more


def samples(count: int) -> list[StreamedSample]:
    return as_received(feed_samples(count))


def test_what_trl_reads_is_each_sample_with_its_prompt_on_the_left() -> None:
    given = samples(6)
    tensors = padded(given, pad_id=999)
    for row, sample in enumerate(given):
        of = {name: tensor[row] for name, tensor in tensors.items()}
        prompt, completion = of["prompt_mask"].bool(), of["completion_mask"].bool()
        assert torch.equal(prompt, prompt.sort()[0])  # padded on the left
        assert torch.equal(completion, completion.sort(descending=True)[0])
        tokens = torch.cat([of["prompt_ids"][prompt], of["completion_ids"][completion]])
        np.testing.assert_array_equal(tokens, sample.token_ids)
        bears_loss = completion & of["tool_mask"].bool()
        for name, column in (("advantages", sample.advantages), ("old_per_token_logps", sample.logprobs)):
            np.testing.assert_array_equal(of[name][bears_loss], column[sample.loss_mask])
    assert not (tensors["tool_mask"].bool() & ~tensors["completion_mask"].bool()).any()
    assert (tensors["prompt_ids"][~tensors["prompt_mask"].bool()] == 999).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--transport.redis.start", "false"), "needs either the address of one"),
        (("--transport.redis.url", "redis://host"), "needs either the address of one"),
        (("--trainer.learning_rate", "1e-4"), "trainer.learning_rate"),
        (("--max_steps", "5"), "max_steps"),
    ],
)
def test_what_a_run_with_another_s_trainer_cannot_have_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(str(SETTINGS), overrides)


@needs_redis
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_trl_learns_the_quickstart_s_task_from_the_stream(tmp_path: Path) -> None:
    needed = [TRL_PYTHON, "-c", "import msgspec, redis, trl, xxhash"]
    if not TRL_PYTHON.exists() or subprocess.run(needed, capture_output=True, check=False).returncode:
        pytest.skip("needs TRL: make bench-trl-env")
    program = [TRL_PYTHON, ROOT / "examples" / "external_trainer.py", "runs/outside", "--weights", "weights"]
    train_beside(tmp_path, program, patience_s=3000)
    assert summary(tmp_path)["status"] == "finished"
    found = tailrace.evaluate("quickstart", {"model.name": tmp_path / "weights" / "final"})
    assert found["alphabet-sort"].result.mean_reward > 0.8
