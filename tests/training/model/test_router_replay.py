"""Training meets the experts that generation chose, whatever the router would choose now."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tailrace.errors import ModelError, TrainingError
from tailrace.training.model.router_replay import RouterReplay, add_routing_rule, softmax_rule
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.rows.shared_prefixes import share_prefixes
from tests.support.expert_models import (
    FAMILIES,
    expert_model,
    make_routers_undecided,
    perturb_routers,
    plain_routing,
    routers,
)
from tests.support.routed_rows import INDIFFERENT, UNKNOWN, logprob_differences, sampled_row, train_on


@pytest.mark.parametrize("common", [0, 20])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_perturbed_router_changes_no_logprob_that_is_replayed(family: str, common: int) -> None:
    row, experts = sampled_row(expert_model(family, router_scale=INDIFFERENT), common=common)
    model = expert_model(family, router_scale=INDIFFERENT)
    perturb_routers(model, 1.0)
    replayed, routed_anew = (float(logprob_differences(model, row, one).max()) for one in (experts, None))
    assert replayed < 1e-4
    assert routed_anew > 10 * max(replayed, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_routers_own_choice_changes_nothing(family: str) -> None:
    row, experts = sampled_row(expert_model(family))
    plain, replayed = expert_model(family), expert_model(family)
    expected, nothing = train_on(plain, row, None)
    found, metrics = train_on(replayed, row, experts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert nothing == {}
    assert metrics["training/router_agreement"] == 1
    known = 1 - len(row.sample_lengths) / len(row.token_ids)
    assert metrics["training/replayed_share"] == pytest.approx(known)
    for (name, one), other in zip(plain.named_parameters(), replayed.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_gradients_reach_the_router_through_the_replayed_experts() -> None:
    row, experts = sampled_row(expert_model("mixtral"))
    others = np.where(experts == UNKNOWN, UNKNOWN, (experts + 1) % 4).astype(np.uint8)
    model = expert_model("mixtral")
    _, metrics = train_on(model, row, others)
    assert 0 < metrics["training/router_agreement"] < 1
    for router in routers(model):
        assert float(router.weight.grad.abs().sum()) > 0


def test_the_weights_of_replayed_experts_are_the_routers_own() -> None:
    model = expert_model("mixtral")
    router = routers(model)[0]
    replay = RouterReplay(model)
    hidden = torch.randn(4, 64)
    recorded = torch.tensor([[0, 1], [2, 3], [3, 1], [UNKNOWN, UNKNOWN]], dtype=torch.uint8)
    logits, own_weights, own_experts = router(hidden)
    with replay.using(recorded[:, None].expand(-1, 3, -1)):
        answers = [one(hidden) for one in routers(model)]
    _, weights, experts = answers[0]
    assert experts[:3].tolist() == recorded[:3].tolist()
    expected = torch.softmax(logits.gather(1, experts), dim=-1)
    torch.testing.assert_close(weights, expected)
    assert experts[3].tolist() == own_experts[3].tolist()
    torch.testing.assert_close(weights[3], own_weights[3])
    torch.testing.assert_close(router(hidden)[1], own_weights)  # outside nothing is replayed


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("wide", [False, True])
def test_bfloat16_and_sixteen_bit_indices_replay_alike(family: str, wide: bool) -> None:
    row, experts = sampled_row(expert_model(family, router_scale=INDIFFERENT))
    if wide:
        experts = np.where(experts == UNKNOWN, np.uint16(65535), experts.astype(np.uint16))
    expected, _ = train_on(expert_model(family, router_scale=INDIFFERENT), row, experts, dtype="bfloat16")
    model = expert_model(family, router_scale=INDIFFERENT)
    perturb_routers(model, 1.0)
    found, metrics = train_on(copy.deepcopy(model), row, experts, dtype="bfloat16")
    anew, _ = train_on(model, row, None, dtype="bfloat16")
    assert metrics["training/router_agreement"] < 1
    assert float((anew - expected).abs().max()) > 10 * float((found - expected).abs().max())


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_where_rounding_sends_tokens_elsewhere_replay_brings_them_back(family: str) -> None:
    undecided = expert_model(family)
    make_routers_undecided(undecided)
    row, experts = sampled_row(copy.deepcopy(undecided).to(torch.bfloat16))
    sampled = torch.from_numpy(row.logprobs[row.loss_mask])
    found, metrics = train_on(copy.deepcopy(undecided), row, experts, dtype="bfloat16")
    anew, _ = train_on(undecided, row, None, dtype="bfloat16")
    assert 0.9 < metrics["training/router_agreement"] < 1
    assert 2 * float((found - sampled).abs().mean()) < float((anew - sampled).abs().mean())


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_activations_computed_twice_are_replayed_twice(family: str) -> None:
    row, experts = sampled_row(expert_model(family))
    plain, checkpointed = expert_model(family), expert_model(family)
    asked: list[bool] = []
    routers(checkpointed)[0].register_forward_hook(lambda *_: asked.append(torch.is_grad_enabled()))
    for model in (plain, checkpointed):
        perturb_routers(model, 0.5)
    expected, expected_metrics = train_on(plain, row, experts)
    found, metrics = train_on(checkpointed, row, experts, gradient_checkpointing=True)
    assert sum(asked) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert metrics == expected_metrics
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_record_of_all_layers_is_read_at_those_with_experts() -> None:
    family = "qwen3-moe, not normalised, a dense layer"
    row, experts = sampled_row(expert_model(family))
    everywhere = np.zeros((len(experts), 3, 2), np.uint8)
    everywhere[:, [0, 2]] = experts
    expected, _ = train_on(expert_model(family), row, experts)
    found, metrics = train_on(expert_model(family), row, everywhere)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert metrics["training/router_agreement"] == 1


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (torch.zeros(4, 3, 2, dtype=torch.int64), r"torch\.int64 \[4, 3, 2\]; expected uint8"),
        (torch.zeros(4, 3, 1, dtype=torch.uint8), r"torch\.uint8 \[4, 3, 1\]; expected uint8"),
        (torch.zeros(4, 2, 2, dtype=torch.uint8), "experts of 2 layers were recorded, and the model has 3 with"),
        (torch.zeros(4, 6, dtype=torch.uint8), r"torch\.uint8 \[4, 6\]; expected uint8"),
    ],
)
def test_a_record_of_another_shape_is_refused(record: torch.Tensor, why: str) -> None:
    with pytest.raises(TrainingError, match=why), RouterReplay(expert_model("mixtral")).using(record):
        pass


def test_a_record_of_another_number_of_tokens_is_refused() -> None:
    model = expert_model("mixtral")
    replay = RouterReplay(model)
    with pytest.raises(TrainingError, match="4 tokens"), replay.using(torch.zeros(4, 3, 2, dtype=torch.uint8)):
        model(torch.zeros(1, 5, dtype=torch.int64))


def test_a_pass_that_goes_round_the_routers_is_found_out() -> None:
    model = expert_model("mixtral")
    replay = RouterReplay(model)
    with pytest.raises(TrainingError, match="1 of 3 routers"), replay.using(torch.zeros(4, 3, 2, dtype=torch.uint8)):
        routers(model)[0](torch.randn(4, 64))


def test_experts_that_the_model_lacks_are_never_trained_on() -> None:
    row, experts = sampled_row(expert_model("mixtral"))
    experts[7, 1, 0] = 4
    with pytest.raises(TrainingError, match="1 recorded routings name experts"):
        train_on(expert_model("mixtral"), row, experts)


def test_models_that_cannot_replay_say_so() -> None:
    with pytest.raises(ModelError, match="no routers"):
        RouterReplay(LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
                                                  num_hidden_layers=1, num_attention_heads=1)))  # fmt: skip


def test_a_family_of_its_own_needs_a_rule_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailrace.training.model import router_replay

    monkeypatch.setattr(router_replay, "_RULES", dict(router_replay._RULES))
    model = expert_model("olmoe")
    for router in routers(model):
        router.register_forward_hook(lambda module, inputs, answer: (answer[0], answer[1] * 2.5, answer[2]))
    with pytest.raises(ModelError, match="add its own"):
        RouterReplay(model)
    add_routing_rule("scaled", lambda router, logits, experts: softmax_rule(router, logits, experts) * 2.5)
    with RouterReplay(model).using(None):
        pass


ROUTINGS = st.lists(st.lists(st.sampled_from([0, 1, UNKNOWN]), min_size=6, max_size=6), min_size=1, max_size=6)


@given(ROUTINGS)
def test_samples_share_a_beginning_only_as_far_as_their_records_agree(routings: list[list[int]]) -> None:
    token_ids = np.tile(np.arange(6, dtype=np.int32), len(routings))
    experts = np.array(routings, np.uint8).reshape(-1, 1, 1)
    merged = experts.copy()
    shared = share_prefixes(token_ids, [6] * len(routings), merged)
    gathered = shared.gather_experts(merged)
    replayed = gathered[shared.place]
    known = experts != UNKNOWN
    assert np.array_equal(replayed[known], experts[known])
    if not known.any():
        assert shared.computed.sum() == 6


def test_a_sample_without_a_record_follows_the_one_it_shares_with() -> None:
    row, experts = sampled_row(expert_model("qwen3-moe", router_scale=INDIFFERENT), common=20)
    ends = np.cumsum(row.sample_lengths)
    lacking = experts.copy()
    lacking[ends[0] : ends[0] + 20] = UNKNOWN  # the second sample's beginning came from the first one's cache
    micro_batches = [MicroBatch.of(row, 0, routed_experts=one.copy()) for one in (experts, lacking)]
    assert torch.equal(micro_batches[0].routed_experts, micro_batches[1].routed_experts)
    assert torch.equal(micro_batches[0].input_ids, micro_batches[1].input_ids)
    assert micro_batches[0].input_ids.shape[1] < len(row.token_ids)
    assert MicroBatch.of(dataclasses.replace(row), 0).routed_experts is None


def test_the_engines_record_is_what_a_plain_pass_chooses() -> None:
    model = expert_model("mixtral")
    row, experts = sampled_row(model)
    first = int(row.sample_lengths[0])
    plain = plain_routing(model, row.token_ids[:first].tolist()).numpy()
    assert np.array_equal(experts[: first - 1], plain[:-1])
    assert (experts[first - 1] == UNKNOWN).all()
