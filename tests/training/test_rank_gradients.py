"""Ranks that share a model come to the gradients of one process that has all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tailrace.records import Batch
from tailrace.training.adapter import Adapter, add_adapter
from tailrace.training.gradients import GradientPasses
from tailrace.training.lora_settings import LoraSettings
from tailrace.training.loss_settings import ClippedRatioSettings, GspoSettings, OwnLossSettings
from tailrace.training.losses import Divisor, LossTokens, load_components, load_loss
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.policy_model import PolicyModel
from tailrace.training.ranks import ALONE, JoinedRanks, Ranks
from tailrace.training.reference import BaseOfAdapter, FrozenReference
from tailrace.training.sharding import share_out, whole
from tests.training.losses.support import as_any_loss
from tests.training.rank_processes import run_ranks
from tests.training.tiny import VOCABULARY, build_batch, demonstrating, rows_of, stir, tiny_model

pytestmark = pytest.mark.xdist_group("trainer ranks")

LENGTHS, ROWS = (9, 14, 5, 12, 30, 4), (2, 1, 3)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative, of the norm of each weight's gradient."""
CASES: list[dict[str, Any]] = [
    {"model": "qwen3", "dtype": torch.float64},
    {"model": "llama", "dtype": torch.float64},
    {"model": "gpt2", "dtype": torch.float64, "loss": "any"},
    {"model": "qwen3", "dtype": torch.float64, "loss": "rejecting"},
    {"model": "qwen3", "dtype": torch.float64, "loss": "gspo"},
    {"model": "qwen3", "dtype": torch.float64, "supports": True},
    {"model": "qwen3", "dtype": torch.float64, "reference": "k3", "supports": True},
    {"model": "llama", "dtype": torch.float64, "loss": "rejecting", "reference": "unbiased"},
    {"model": "qwen3", "dtype": torch.float64, "reference": "k2", "demonstrations": (2, 4)},
    {"model": "qwen3", "dtype": torch.float64, "loss": "rejecting", "demonstrations": (2, 4)},
    {"model": "qwen3", "dtype": torch.float64, "loss": "gspo", "demonstrations": (0, 1, 2)},
    {"model": "qwen3", "dtype": torch.float32, "native": True},
    {"model": "llama", "dtype": torch.float32, "native": True, "checkpointing": True},
    {"model": "qwen3", "dtype": torch.float64, "lora": 4},
    {"model": "llama", "dtype": torch.float64, "lora": 3, "checkpointing": True},
    {"model": "llama", "dtype": torch.float32, "lora": 4, "native": True},
    {"model": "qwen3", "dtype": torch.float64, "lora": 4, "reference": "k3"},
]


class Rejecting:
    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        losses, kept = SHORT(logprobs, entropy, tokens)
        return losses, kept & (tokens.targets > VOCABULARY // 3)


SHORT = ClippedRatio(ClippedRatioSettings())
BY_SEQUENCE = GspoSettings(entropy=0.01)
LOSSES = {"short": SHORT, "any": as_any_loss(SHORT), "rejecting": Rejecting(), "gspo": load_loss(BY_SEQUENCE)}


SETTINGS = {"gspo": BY_SEQUENCE, "rejecting": OwnLossSettings(name="losses:rejecting")}


def added(ranks: Ranks, case: dict[str, Any], policy: PolicyModel, adapter: Adapter | None) -> dict[str, Any]:
    """Components; the divergence is from another model, shared out too, or from what lies under an adapter."""
    if "reference" not in case:
        demonstrations = ClippedRatioSettings.model_validate({"cross_entropy": {"coefficient": 0.7}})
        return {"components": load_components(demonstrations)} if "demonstrations" in case else {}
    kl = {"estimator": case["reference"], "coefficient": 0.5}
    settings = ClippedRatioSettings.model_validate({"reference_kl": kl, "cross_entropy": {"coefficient": 0.7}})
    components = load_components(settings)
    if adapter is not None:
        return {"components": components, "reference": BaseOfAdapter(policy, adapter)}
    frozen = PolicyModel(
        tiny_model(case["model"], seed=1).to(case["dtype"]).requires_grad_(False), native_kernels=False
    )
    if isinstance(ranks, JoinedRanks):
        share_out(frozen, ranks)
    return {"components": components, "reference": FrozenReference(frozen)}


def gradients(ranks: Ranks, case: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, float], int]:
    """Of two batches, one after the other, and the metrics of the second."""
    model = tiny_model(case["model"]).to(case["dtype"])
    adapter = add_adapter(model, LoraSettings(rank=case.get("lora")), case["model"])
    stir(model)
    policy = PolicyModel(
        model,
        native_kernels=case.get("native", False),
        gradient_checkpointing=case.get("checkpointing", False),
    )
    if isinstance(ranks, JoinedRanks):
        share_out(policy, ranks)
    settings = SETTINGS.get(case.get("loss", ""), ClippedRatioSettings())
    passes = GradientPasses(
        policy,
        LOSSES[case.get("loss", "short")],
        Divisor.of_loss(settings),
        ranks=ranks,
        **added(ranks, case, policy, adapter),
    )
    for seed in (1, 2):
        batch = batch_of(case, seed)
        metrics, kept = passes.add(rows_of(batch, ranks.rank, ranks.size), 0).read(batch.summary)
    found = {name: whole(weight.grad) for name, weight in policy.named_parameters() if weight.grad is not None}
    return found, metrics, kept


def batch_of(case: dict[str, Any], seed: int) -> Batch:
    batch = build_batch(lengths=LENGTHS, rows=ROWS, seed=seed, supports=case.get("supports", False))
    return demonstrating(batch, case["demonstrations"]) if "demonstrations" in case else batch


def all_gradients(ranks: Ranks) -> list[tuple[dict[str, Tensor], dict[str, float], int]]:
    return [gradients(ranks, case) for case in CASES]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(all_gradients, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(map(str, case.values())) for case in CASES])
def test_gradients_and_metrics_are_those_of_one_process(found: list[Any], index: int) -> None:
    case = CASES[index]
    expected, metrics, kept = gradients(ALONE, case)
    loss_tokens = batch_of(case, 2).summary.loss_tokens
    for rank in found:
        gradient, rank_metrics, rank_kept = rank[index]
        assert rank_kept == kept
        assert (kept < loss_tokens) == (case.get("loss") == "rejecting")
        assert rank_metrics == found[0][index][1]
        assert rank_metrics == pytest.approx(metrics, rel=1e-5)
        assert gradient.keys() == expected.keys()
        for name in expected:
            difference = float((gradient[name] - expected[name]).norm() / expected[name].norm())
            assert difference <= TOLERANCE[case["dtype"]], f"{name}: {difference:.2g}"
