"""Under autocast experts are multiplied in its type, as linear layers are."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tailrace.training.model.autocast_experts import AUTOCAST_EXPERTS, cast_experts_under_autocast
from tests.support.expert_models import FAMILIES, VOCABULARY, expert_model
from tests.training.tiny import tiny_model


def trained(model: PreTrainedModel, dtype: torch.dtype | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and gradients of a pass over random tokens."""
    token_ids = torch.randint(0, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        logits = model(token_ids, use_cache=False).logits.float()
    logits.log_softmax(-1)[..., 0].sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_autocast_nothing_changes(family: str) -> None:
    plain, cast = expert_model(family), expert_model(family)
    cast_experts_under_autocast(cast)
    assert AUTOCAST_EXPERTS in cast.get_experts_implementation().values()
    (expected, gradients), (found, own) = trained(plain, None), trained(cast, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(torch.equal(one, other) for one, other in zip(own, gradients, strict=True))


def test_under_autocast_products_are_of_its_type_and_gradients_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    grouped = torch.nn.functional.grouped_mm

    def watched(inputs: torch.Tensor, weight: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        seen.update((inputs.dtype, weight.dtype))
        return grouped(inputs, weight, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    model = expert_model("mixtral")
    cast_experts_under_autocast(model)
    _, gradients = trained(model, torch.bfloat16)
    assert seen == {torch.bfloat16}
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_logits_stay_as_close_to_float32_as_they_were() -> None:
    exact, own = expert_model("mixtral", router_scale=0), expert_model("mixtral", router_scale=0)  # ties: all alike
    cast = copy.deepcopy(own)
    cast_experts_under_autocast(cast)
    expected, _ = trained(exact, None)
    before, after = (float((trained(m, torch.bfloat16)[0] - expected).abs().mean()) for m in (own, cast))
    assert after < 2 * before


def test_a_model_without_experts_is_left_alone_and_a_saved_one_names_nothing_of_ours(tmp_path: Path) -> None:
    dense = tiny_model("qwen3")
    cast_experts_under_autocast(dense)
    assert AUTOCAST_EXPERTS not in dense.get_experts_implementation().values()
    model = expert_model("mixtral")
    cast_experts_under_autocast(model)
    model.save_pretrained(tmp_path)
    assert "tailrace" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
