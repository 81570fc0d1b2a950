"""Compiled layers compute what plain ones do, for rows of any length, and are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from tailrace.errors import ModelError
from tailrace.training.losses import load_loss
from tailrace.training.model.compiled_layers import compile_layers
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.ranks import ALONE, Ranks
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.support.expert_models import FAMILIES
from tests.training.rank_processes import run_ranks
from tests.training.tiny import CONFIGS, build_batch, rows_of, tiny_model

LENGTHS = [(9, 14, 5, 12), (9, 20, 31), (5,), (60, 3, 3, 7)]
LOSS = load_loss(ClippedRatioSettings())
PARTS = 2
"""Of a layer, at least: before and after attention."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and guarded as ever, but computed by torch's own operations: generating code takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def trained(policy: PolicyModel, lengths: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and gradients of a row."""
    policy.zero_grad()
    row = build_batch(lengths=lengths, rows=(len(lengths),), seed=seed).row(0)
    output = policy(MicroBatch.of(row, 0, policy.device, padded=policy.pads_segments), LOSS)
    output.total.backward()
    return output.logprobs, torch.cat([weight.grad.flatten() for weight in policy.parameters()])


def require_equal_and_compiled_once(name: str, **options: bool) -> None:
    plain = PolicyModel(tiny_model(name), native_kernels=False, **options)
    compiled = PolicyModel(tiny_model(name), native_kernels=False, compiled=True, **options)
    assert compiled.packs
    for seed, lengths in enumerate(LENGTHS):
        logprobs, gradient = trained(compiled, lengths, seed)
        expected, expected_gradient = trained(plain, lengths, seed)
        torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
        assert float((gradient - expected_gradient).norm()) <= 1e-5 * float(expected_gradient.norm())
        if seed == 0:
            graphs = counters["stats"]["unique_graphs"]
            assert graphs >= PARTS
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again for a row of another length"


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.usefixtures("traced")
def test_rows_of_any_length_are_computed_as_by_plain_layers(name: str, gradient_checkpointing: bool) -> None:
    require_equal_and_compiled_once(name, gradient_checkpointing=gradient_checkpointing)


@pytest.mark.long
def test_so_they_are_by_generated_code() -> None:
    require_equal_and_compiled_once("qwen3")


def test_no_layer_of_many_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share graphs; of what differs in each, torch would compile 8 and leave the rest."""
    calls = list[str]()

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Any:
            calls.append("part of a layer")
            return graph(*inputs)

        return run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    layers, sizes = 12, CONFIGS["qwen3"].to_dict() | {"layer_types": None}
    policy = PolicyModel(Qwen3ForCausalLM(Qwen3Config(**(sizes | {"num_hidden_layers": layers}))), compiled=True)
    trained(policy, (9, 5), 0)
    assert len(calls) == counters["stats"]["unique_graphs"] * layers >= PARTS * layers


def make_trainer(model_folder: Path, joined: Ranks = ALONE, **settings: object) -> Trainer:
    chosen = TrainerSettings.model_validate({"learning_rate": 1e-3, "native_kernels": False, **settings})
    return Trainer(chosen, model_name=str(model_folder), max_steps=10, max_staleness=4, ranks=joined)


def two_steps(trainer: Trainer, ranks: Ranks = ALONE) -> list[float]:
    """Their gradients' norms."""
    batches = [build_batch(lengths=(9, 14, 5, 12, 30, 4), rows=(2, 1, 3), step=step, seed=step) for step in (1, 2)]
    results = [trainer.train_step(rows_of(batch, ranks.data_rank, ranks.data_size)) for batch in batches]
    return [result.metrics["training/grad_norm"] for result in results]


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.usefixtures("traced")
def test_a_trainer_takes_the_same_steps(model_folder: Path, more: dict[str, object]) -> None:
    plain = two_steps(make_trainer(model_folder, **more))
    compiled = two_steps(make_trainer(model_folder, compile=True, **more))
    assert compiled == pytest.approx(plain, rel=1e-2 if "dtype" in more else 1e-4)


def on_ranks(ranks: Ranks, model_folder: Path, options: dict[str, object]) -> tuple[list[float], int]:
    torch.compile = partial(torch.compile, backend="eager")
    norms = two_steps(make_trainer(model_folder, ranks, compile=True, **options), ranks)
    return norms, counters["stats"]["unique_graphs"]


@pytest.mark.long
@pytest.mark.xdist_group("trainer ranks")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("ranks_per_row", [1, 2], ids=["rows of their own", "slices of rows"])
def test_ranks_compile_their_layers_too(
    model_folder: Path, tmp_path: Path, ranks_per_row: int, checkpointing: bool
) -> None:
    expected = two_steps(make_trainer(model_folder))
    options = {"ranks": 2, "sequence_parallel": ranks_per_row, "gradient_checkpointing": checkpointing}
    for found, graphs in run_ranks(on_ranks, 2, tmp_path, model_folder, options, ranks_per_row=ranks_per_row):
        assert found == pytest.approx(expected, rel=1e-4)
        assert graphs >= PARTS


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ModelError, match=r"trainer\.compile: Sequential has no layers"):
        compile_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(ModelError, match=r"trainer\.compile: Qwen3MoeForCausalLM has experts"):
        compile_layers(FAMILIES["qwen3-moe"]())
    with pytest.raises(ValidationError, match="native_kernels = false"):
        TrainerSettings(compile=True)
    assert TrainerSettings(compile=True, device="cuda").compile
