"""Without `tailrace.cpu`, switched off or deleted, everything works, and answers alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tailrace.training.model.policy_model import PolicyModel
from tests.cpu.test_trainer_layers import CONFIGS, LENGTHS, gradients, make
from tests.generation.engine_support import (
    ARCHITECTURES,
    Driver,
    forward_logprobs,
    make_engine,
    make_model,
    prompts,
    request,
)

OVERRIDES = [
    "--max_steps",
    "2",
    "--placement",
    "inline",
    "--rollouts.max_tokens",
    "16",
    "--scheduling.batch_size",
    "32",
]


@pytest.fixture
def deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing any module of `tailrace.cpu` raises ImportError."""
    loaded = [name for name in sys.modules if name.startswith("tailrace.cpu.")]
    for name in ("tailrace.cpu", "tailrace.cpu.engine", "tailrace.cpu.trainer", "tailrace.cpu.memory", *loaded):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("deleted")
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_engine_samples_from_the_models_own_distribution(architecture: str) -> None:
    model, newer = make_model(architecture), make_model(architecture, seed=1)
    driver = Driver(make_engine(model, slots=3))
    for version, weights in enumerate((model, newer)):
        driver.engine.load_model_state_dict(driver.engine.prepare(weights.state_dict()), version)
        asked = [request(f"{version}/{i}", prompt, max_tokens=20) for i, prompt in enumerate(prompts(6))]
        for one, done in zip(asked, driver.run(*asked), strict=True):
            expected = forward_logprobs(weights, one.prompt_token_ids.tolist(), done.token_ids)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("lengths", [LENGTHS, (600, 20)])
def test_the_trainer_gets_the_same_losses_and_gradients(
    name: str, lengths: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    expected = gradients(PolicyModel(make(CONFIGS[name])), lengths)
    request.getfixturevalue("deleted")
    plain = PolicyModel(make(CONFIGS[name]))
    assert (plain.packs, plain.num_fused_layers) == (True, 0)
    for parameter, value in gradients(plain, lengths).items():
        assert (value - expected[parameter]).norm() <= 1e-4 * expected[parameter].norm(), parameter


def test_the_quickstart_trains_with_it_switched_off(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tailrace", "train", "quickstart", *OVERRIDES]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"TAILRACE_CPU": "off"}, check=True, timeout=240)
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)


def test_switched_off_it_cannot_be_imported() -> None:
    program = "import tailrace.training.model.acceleration\nimport tailrace.cpu"
    done = subprocess.run(  # noqa: PLW1510 - fails on purpose
        [sys.executable, "-c", program],
        env=os.environ | {"TAILRACE_CPU": "off"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "TAILRACE_CPU=off" in done.stderr
