"""Ranks that share a model, and rows too, come to the gradients of one process that has all of it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tailrace.records import DISTILLATION_WEIGHTS, REFERENCE_KL_WEIGHTS, Batch
from tailrace.training.losses import Divisor, LossTokens, load_components, load_loss
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.adapter import Adapter, add_adapter
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.model.reference import Reference
from tailrace.training.model.sharding import share_out, whole
from tailrace.training.ranks import ALONE, JoinedRanks, Ranks
from tailrace.training.settings.lora import LoraSettings
from tailrace.training.settings.losses import ClippedRatioSettings, GspoSettings, LossSettings, OwnLossSettings
from tailrace.training.step.gradients import GradientPasses
from tests.support.expert_models import expert_model
from tests.training.losses.support import as_any_loss, settings_of
from tests.training.rank_processes import run_ranks
from tests.training.tiny import VOCABULARY, build_batch, demonstrating, rows_of, stir, taught, tiny_model, weighing

pytestmark = pytest.mark.xdist_group("trainer ranks")

LENGTHS, ROWS = {1: (9, 14, 5, 12, 30, 3, 3), 2: (9, 14, 5, 12, 30, 3)}, {1: (2, 3, 2), 2: (2, 3, 1)}
"""By seed. The first batch's last row is two equal samples, the second's has but three tokens: fewer than ranks."""
RANKS = {(2, 1): 1, (4, 1): 13, (2, 2): 18, (4, 4): 20, (4, 2): 25}
"""How many ranks, and how many of them share each row; and the case with which those begin that are tried each time."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Relative, of the norm of each weight's gradient."""
CASES: list[dict[str, Any]] = [
    {"model": "qwen3", "dtype": torch.float64},
    {"model": "llama", "dtype": torch.float64},
    {"model": "gpt2", "dtype": torch.float64, "loss": "any"},
    {"model": "qwen3", "dtype": torch.float64, "loss": "rejecting"},
    {"model": "qwen3", "dtype": torch.float64, "loss": "gspo"},
    {"model": "llama", "dtype": torch.float64, "loss": "gspo", "checkpointing": True},
    {"model": "mistral with a sliding window", "dtype": torch.float64, "loss": "masked sequences"},
    {"model": "qwen3", "dtype": torch.float64, "loss": "mean of sequences"},
    {"model": "qwen3-moe", "dtype": torch.float32, "checkpointing": True},
    {"model": "qwen3", "dtype": torch.bfloat16},
    {"model": "qwen3", "dtype": torch.float64, "supports": True},
    {"model": "qwen3", "dtype": torch.float64, "reference": "k3", "supports": True},
    {"model": "llama", "dtype": torch.float64, "loss": "rejecting", "reference": "unbiased"},
    {"model": "qwen3", "dtype": torch.float64, "reference": "k2", "demonstrations": (2, 4)},
    {"model": "qwen3", "dtype": torch.float64, "loss": "rejecting", "demonstrations": (2, 4)},
    {"model": "qwen3", "dtype": torch.float64, "loss": "gspo", "demonstrations": (0, 1, 2)},
    {"model": "llama", "dtype": torch.float64, "loss": "masked sequences", "reference": "k3", "demonstrations": (0, 3)},
    {"model": "qwen3", "dtype": torch.float32, "native": True},
    {"model": "llama", "dtype": torch.float32, "native": True, "checkpointing": True},
    {"model": "qwen3", "dtype": torch.float64, "lora": 4},
    {"model": "llama", "dtype": torch.float64, "lora": 3, "checkpointing": True},
    {"model": "llama", "dtype": torch.float32, "lora": 4, "native": True},
    {"model": "qwen3", "dtype": torch.float64, "lora": 4, "reference": "k3"},
    {"model": "qwen3", "dtype": torch.float64, "teacher": "reverse"},
    {"model": "llama", "dtype": torch.float64, "loss": "rejecting", "teacher": "forward", "demonstrations": (2, 4)},
    {"model": "qwen3", "dtype": torch.float64, "loss": "rejecting", "reference": "unbiased", "weighs": True},
    {"model": "llama", "dtype": torch.float64, "teacher": "reverse", "demonstrations": (0, 3), "weighs": True},
    {"model": "qwen3", "dtype": torch.float64, "loss": "gspo", "teacher": "forward", "weighs": True},
]


class Rejecting:
    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        losses, kept = SHORT(logprobs, entropy, tokens)
        return losses, kept & (tokens.targets > VOCABULARY // 3)


SHORT = ClippedRatio(ClippedRatioSettings())
BY_SEQUENCE: dict[str, LossSettings] = {
    "gspo": GspoSettings(entropy=0.01),
    "mean of sequences": settings_of("grpo"),
    "masked sequences": settings_of(
        "clipped_ratio",
        masks=[
            {"name": "geometric_ratio", "low": 0.7, "high": 20.0},
            {"name": "off_policy_sequence", "threshold": 0.4},
        ],
    ),
}
LOSSES = {"short": SHORT, "any": as_any_loss(SHORT), "rejecting": Rejecting()}
LOSSES |= {name: load_loss(settings) for name, settings in BY_SEQUENCE.items()}
REJECTING = {"rejecting", "masked sequences"}


def in_its_own_dtype(model: PreTrainedModel) -> PreTrainedModel:
    """The norms too: transformers' round to float32, to other last bits in a slice of one token than in a row."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            shape, epsilon = module.weight.shape, module.variance_epsilon
            module.forward = partial(_norm, module, tuple(shape), epsilon)
    return model


def _norm(module: nn.Module, shape: tuple[int, ...], epsilon: float, hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, shape, module.weight, epsilon)


SETTINGS = {**BY_SEQUENCE, "rejecting": OwnLossSettings(name="losses:rejecting")}


def added(ranks: Ranks, case: dict[str, Any], policy: PolicyModel, adapter: Adapter | None) -> dict[str, Any]:
    """Components; the divergence is from another model, shared out too, or from what lies under an adapter."""
    if "teacher" in case:
        teacher = {"url": "http://teacher/v1", "model": "big", "top_k": 5, "divergence": case["teacher"]}
        settings = {"distillation": {**teacher, "coefficient": 0.5}, "cross_entropy": {"coefficient": 0.7}}
        return {"components": load_components(ClippedRatioSettings.model_validate(settings))}
    if "reference" not in case:
        demonstrations = ClippedRatioSettings.model_validate({"cross_entropy": {"coefficient": 0.7}})
        return {"components": load_components(demonstrations)} if "demonstrations" in case else {}
    kl = {"estimator": case["reference"], "coefficient": 0.5}
    settings = ClippedRatioSettings.model_validate({"reference_kl": kl, "cross_entropy": {"coefficient": 0.7}})
    components = load_components(settings)
    if adapter is not None:
        return {"components": components, "reference": Reference(policy, adapter)}
    model = in_its_own_dtype(tiny_model(case["model"], seed=1).to(case["dtype"]))
    frozen = PolicyModel(model.requires_grad_(False), native_kernels=False)
    if isinstance(ranks, JoinedRanks):
        share_out(frozen, ranks)
    return {"components": components, "reference": Reference(frozen)}


def gradients(ranks: Ranks, case: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, float], int]:
    """Of two batches, one after the other, and the metrics of the second."""
    model = expert_model(case["model"]) if "moe" in case["model"] else tiny_model(case["model"])
    if case["dtype"] is torch.float64:
        model = in_its_own_dtype(model.double())
    adapter = add_adapter(model, LoraSettings(rank=case.get("lora")), case["model"])
    stir(model)
    rounds = case["dtype"] is torch.bfloat16
    policy = PolicyModel(
        model,
        dtype="bfloat16" if rounds else "float32",
        native_kernels=case.get("native", False),
        gradient_checkpointing=case.get("checkpointing", False),
    )
    if isinstance(ranks, JoinedRanks):
        share_out(policy, ranks)
    loss = case.get("loss", "short")
    divisor = Divisor.of_loss(SETTINGS.get(loss, ClippedRatioSettings()))
    passes = GradientPasses(policy, LOSSES[loss], divisor, ranks=ranks, **added(ranks, case, policy, adapter))
    for seed in LENGTHS:
        batch = batch_of(case, seed)
        metrics, kept = passes.add(rows_of(batch, ranks.data_rank, ranks.data_size), 0).read(batch.summary)
    found = {name: whole(weight.grad) for name, weight in policy.named_parameters() if weight.grad is not None}
    return found, metrics, kept


def batch_of(case: dict[str, Any], seed: int) -> Batch:
    """Samples that begin alike, and some that are alike, unless their tokens have supports."""
    batch = build_batch(
        lengths=LENGTHS[seed], rows=ROWS[seed], seed=seed, prompt=2, supports=case.get("supports", False)
    )
    token_ids, offsets = batch.token_ids.copy(), batch.sample_offsets
    token_ids[offsets[1] : offsets[1] + 6] = token_ids[:6]
    token_ids[offsets[6] :] = token_ids[offsets[5] : offsets[5] + offsets[-1] - offsets[6]]
    if not case.get("supports"):
        batch = dataclasses.replace(batch, token_ids=token_ids)
    batch = demonstrating(batch, case["demonstrations"]) if "demonstrations" in case else batch
    batch = taught(batch, 5) if "teacher" in case else batch
    return weighing(batch, REFERENCE_KL_WEIGHTS, DISTILLATION_WEIGHTS) if "weighs" in case else batch


def kinds(case: dict[str, Any]) -> set[tuple[str, Any]]:
    """Each option of a case with its value, and for every option whether the case has it."""
    given = {(name, value) for name, value in case.items() if name not in ("lora", "demonstrations")}
    return given | {(name, name in case) for one in CASES for name in one}


def tried_each_time(first: int) -> list[int]:
    """From this case on, those with an option or a value that none before them had. All others are long."""
    chosen, met = list[int](), set[tuple[str, Any]]()
    for index in (*range(first, len(CASES)), *range(first)):
        if kinds(CASES[index]) - met:
            chosen.append(index)
            met |= kinds(CASES[index])
    return sorted(chosen)


def shares() -> Iterator[Any]:
    """Each case with each number of ranks, and the cases that the same processes compute."""
    for ranks, first in RANKS.items():
        quick = tried_each_time(first)
        long = [index for index in range(len(CASES)) if index not in quick]
        for indices, marks in ((quick, ()), (long, pytest.mark.long)):
            for index in indices:
                name = "-".join(map(str, CASES[index].values()))
                yield pytest.param(
                    *(*ranks, tuple(indices), index), id=f"{ranks[0]} ranks, {ranks[1]} a row-{name}", marks=marks
                )


def gradients_of(ranks: Ranks, indices: tuple[int, ...]) -> dict[int, tuple[dict[str, Tensor], dict[str, float], int]]:
    return {index: gradients(ranks, CASES[index]) for index in indices}


@cache
def found(size: int, ranks_per_row: int, indices: tuple[int, ...]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(gradients_of, size, Path(folder), indices, ranks_per_row=ranks_per_row)


def test_each_case_is_tried_each_time_with_some_ranks() -> None:
    assert {index for first in RANKS.values() for index in tried_each_time(first)} == {*range(len(CASES))}


@pytest.mark.parametrize(("size", "ranks_per_row", "together", "index"), [*shares()])
def test_gradients_and_metrics_are_those_of_one_process(
    size: int, ranks_per_row: int, together: tuple[int, ...], index: int
) -> None:
    case = CASES[index]
    expected, metrics, kept = gradients(ALONE, case)
    loss_tokens = batch_of(case, 2).summary.loss_tokens
    ranks = found(size, ranks_per_row, together)
    for rank in ranks:
        gradient, rank_metrics, rank_kept = rank[index]
        assert rank_kept == kept
        assert (kept < loss_tokens) == (case.get("loss") in REJECTING)
        assert rank_metrics == ranks[0][index][1]
        assert rank_metrics == pytest.approx(metrics, rel=max(1e-5, TOLERANCE[case["dtype"]]))
        assert gradient.keys() == expected.keys()
        for name in expected:
            difference = float((gradient[name] - expected[name]).norm() / expected[name].norm())
            assert difference <= TOLERANCE[case["dtype"]], f"{name}: {difference:.2g}"
