"""On a real GPU: the same answers as on a CPU, within what the precision allows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.generation.engines.torch import TorchEngine
from tailrace.records import Batch
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.devices.cases import STEPS
from tests.generation.engine_support import ARCHITECTURES, Driver, forward_logprobs, make_model, prompts, request
from tests.run.runs import command, environment, records, run_inline
from tests.run.test_router_replay import TURNS, save_mixtral
from tests.training.conftest import model_folder
from tests.training.losses.support import BUILT_IN, settings_of
from tests.training.rows.test_shared_prefixes import batch_with_common_beginnings
from tests.training.tiny import build_batch, demonstrating, tiny_model

pytestmark = pytest.mark.gpu

__all__ = ["model_folder"]

TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}
"""Against a CPU in the same precision: bfloat16 alone moves a tiny model's gradient by up to 14 %."""
TOLD = ("training/loss", "training/grad_norm", "training/entropy")
ON_GPU = ("--trainer.device", "cuda", "--generator.device", "cuda")
FRESH = ("--schedule", "sync", "--scheduling.max_staleness", "0")


def make_trainer(model: Path, device: str, **given: Any) -> Trainer:
    # Native kernels of a CPU round less than torch does under bfloat16.
    settings = TrainerSettings.model_validate({"device": device, "dtype": "float32", "native_kernels": False, **given})
    return Trainer(settings, model_name=str(model), max_steps=10, max_staleness=4)


def require_alike(model: Path, batches: list[Batch], tolerance: float, *, shared: dict[str, Any], **own: Any) -> None:
    """Steps over these batches tell the same on a GPU, with `own` settings there, as on a CPU."""
    told = []
    for device, given in (("cpu", {}), ("cuda", own)):
        trainer = make_trainer(model, device, **{**shared, **given})
        steps = [trainer.train_step(batch).metrics for batch in batches]
        told.append([step[name] for step in steps for name in TOLD])
    assert told[1] == pytest.approx(told[0], rel=tolerance, abs=tolerance)


def batches() -> list[Batch]:
    """Two steps, the second trained on what the first has made."""
    lengths = (9, 40, 5, 120, 33)
    return [
        build_batch(lengths=lengths, rows=(3, 2)),
        build_batch(lengths=lengths[::-1], rows=(2, 3), step=2, version=1, seed=1),
    ]


@pytest.mark.parametrize(("name", "dtype", "head_dtype", "gradient_checkpointing"), STEPS)
def test_steps_teach_what_they_teach_on_a_cpu(
    name: str, dtype: str, head_dtype: str, gradient_checkpointing: bool, tmp_path: Path
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    own = {"gradient_checkpointing": gradient_checkpointing}
    require_alike(tmp_path, batches(), TOLERANCES[dtype], shared={"dtype": dtype, "head_dtype": head_dtype}, **own)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["qwen3", "mistral with a sliding window", "gpt2"])
def test_shared_beginnings_teach_what_they_teach_on_a_cpu(name: str, dtype: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    batch = batch_with_common_beginnings((40, 22, 38, 25, 21, 37), common=14)
    require_alike(tmp_path, [batch], TOLERANCES[dtype], shared={"dtype": dtype, "head_dtype": dtype})


@pytest.mark.parametrize(
    "shared",
    [
        {"lora": {"rank": 4}},
        {"optimizer": "muon"},
        {"loss": {"reference_kl": {"coefficient": 0.1}, "cross_entropy": {"coefficient": 0.1}}},
    ],
    ids=str,
)
def test_settings_mean_what_they_mean_on_a_cpu(model_folder: Path, shared: dict[str, Any]) -> None:
    demonstrated = [demonstrating(batch, (1,)) for batch in batches()] if "loss" in shared else batches()
    require_alike(model_folder, demonstrated, TOLERANCES["float32"], shared=shared)


@pytest.mark.parametrize("own", [{"compile": True}, {"offload_optimizer": True}], ids=str)
def test_what_only_changes_the_speed_changes_no_step(model_folder: Path, own: dict[str, Any]) -> None:
    require_alike(model_folder, batches(), TOLERANCES["float32"], shared={}, **own)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_loss_is_what_it_is_on_a_cpu(model_folder: Path, name: str) -> None:
    loss = settings_of(name, masks=[{"name": "icepop"}, {"name": "sequence_ratio"}]).model_dump()
    shared = {"loss": loss, "steps_per_batch": 2 if name == "decoupled_ppo" else 1}
    require_alike(model_folder, batches(), TOLERANCES["float32"], shared=shared)


def test_a_step_after_a_checkpoint_is_the_one_that_would_have_come(model_folder: Path, tmp_path: Path) -> None:
    first, second = batches()
    trainer = make_trainer(model_folder, "cuda", dtype="bfloat16")
    trainer.train_step(first)
    folder = trainer.save_checkpoint(tmp_path)
    again = make_trainer(model_folder, "cuda", dtype="bfloat16")
    again.restore(folder)
    told = [one.train_step(second).metrics for one in (trainer, again)]
    assert [told[1][name] for name in TOLD] == pytest.approx([told[0][name] for name in TOLD], rel=1e-5)
    for name, weight in trainer.snapshot().wait().items():
        torch.testing.assert_close(again.snapshot().wait()[name], weight, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_samples_from_the_model(architecture: str, dtype: str, tolerance: float) -> None:
    model = make_model(architecture)
    reference = copy.deepcopy(model)
    engine = TorchEngine(model.to(device="cuda", dtype=getattr(torch, dtype)), slots=4, max_model_tokens=128)
    requests = [request(f"r{index}", prompt, max_tokens=12) for index, prompt in enumerate(prompts(6))]
    for one, completion in zip(requests, Driver(engine).run(*requests), strict=True):
        expected = forward_logprobs(reference, one.prompt_token_ids.tolist(), completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=tolerance)


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        (("--trainer.dtype", "float32"), 1e-3),
        ((), 0.05),
        (("--trainer.lora.rank", "4"), 0.05),
        (("--trainer.gradient_checkpointing", "true", "--trainer.offload_activations", "true"), 0.05),
        (("--trainer.offload_optimizer", "true"), 0.05),
    ],
    ids=str,
)
def test_a_run_trains_on_what_its_generator_sampled(given: tuple[str, ...], difference: float, tmp_path: Path) -> None:
    with command(tmp_path, *ON_GPU, *FRESH, *given, "--max_steps", "4") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    lines = records(run.folder / "metrics.jsonl")
    assert len(lines) == 4
    assert max(line["training/logprob_difference_fresh"] for line in lines) < difference


async def test_experts_are_replayed_where_they_were_chosen(tmp_path: Path) -> None:
    model = save_mixtral(tmp_path / "mixtral")
    returning = ("--model.name", str(model), "--generator.return_routed_experts", "true")
    summary = await run_inline(
        tmp_path, *environment("conversing"), *TURNS, *returning, *ON_GPU, "--trainer.dtype", "float32"
    )
    assert summary.exit_code == 0
    for line in records(tmp_path / "run" / "metrics.jsonl"):
        assert line["training/router_agreement"] > 0.999
        assert line["training/logprob_difference_fresh"] < 1e-3
