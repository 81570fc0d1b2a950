"""Adapters beside frozen weights: what they compute, what is published and saved of them, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tailrace.cpu.kernels import find_kernels
from tailrace.errors import CheckpointError, ModelError, SettingsError
from tailrace.models.loading import load_causal_lm
from tailrace.records import Batch
from tailrace.training.checkpoints.files import verify_checkpoint
from tailrace.training.losses import Divisor, load_loss
from tailrace.training.model.adapter import Adapter, add_adapter, plain_weights, target_layers
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.settings.lora import LoraSettings
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.step.gradients import GradientPasses
from tailrace.training.trainer import Trainer
from tests.generation.engine_support import Driver, make_engine, request
from tests.support.expert_models import FAMILIES
from tests.training.tiny import SIZES, build_batch, stir, tiny_model

COMPILES = find_kernels() is not None

RANK = 4
LORA = {"rank": RANK, "alpha": 10}
SCALE = 10 / RANK
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LOSS = ClippedRatioSettings()
_EXPERTS = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPED = {**_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
BESIDE_DENSE: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**_EXPERTS, num_experts=4, mlp_only_layers=[0]),
    "glm4_moe": Glm4MoeConfig(**_GROUPED, n_shared_experts=1, first_k_dense_replace=1),
    "deepseek_v3": DeepseekV3Config(
        **_GROUPED | {"head_dim": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8, first_k_dense_replace=1,
    ),
}  # fmt: skip
"""Mixtures of experts with layers that have none, or experts that all tokens share."""


def adapted(model: PreTrainedModel, **settings: object) -> Adapter:
    """Beside `model`, and far from doing nothing."""
    adapter = add_adapter(model, LoraSettings.model_validate(LORA | settings), "tiny")
    assert adapter is not None
    stir(model)
    return adapter


def merged(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.whole() for name, weight in plain_weights(model)}


def gradients(model: PreTrainedModel, **options: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    policy = PolicyModel(model, **options)
    batch = build_batch()
    metrics, _ = GradientPasses(policy, load_loss(LOSS), Divisor.of_loss(LOSS)).add(batch, 0).read(batch.summary)
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, metrics


@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (torch.float64, {}, 1e-10),
        (torch.float64, {"gradient_checkpointing": True}, 1e-10),
        (torch.float32, {"native_kernels": True}, 1e-4),
        (torch.float32, {"native_kernels": True, "gradient_checkpointing": True}, 1e-4),
        (torch.float32, {"native_kernels": False, "dtype": "bfloat16"}, 6e-2),
        (torch.float32, {"native_kernels": True, "dtype": "bfloat16"}, 6e-2),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_whole_weights_by_the_chain_rule(
    dtype: torch.dtype, options: dict[str, Any], tolerance: float
) -> None:
    """With W' = W + s B A: dA = s B' dW' and dB = s dW' A'. Of a model that is W' all through, in float64."""
    model = tiny_model("qwen3").to(dtype)
    plain = copy.deepcopy(model).double()
    adapted(model)
    plain.load_state_dict(merged(model), strict=False)
    expected, expected_metrics = gradients(plain)
    parts = {name: weight.detach().double() for name, weight in model.named_parameters()}
    found, metrics = gradients(model, **options)
    assert metrics["training/entropy"] == pytest.approx(expected_metrics["training/entropy"], rel=max(tolerance, 1e-6))
    assert len(found) == 2 * 2 * len(ALL)
    for name, gradient in found.items():
        layer = name.split(".lora_")[0]
        down, up = (parts[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        whole = expected[f"{layer}.weight"]
        reference = SCALE * (up.T @ whole if ".lora_A." in name else whole @ down.T)
        difference = float((gradient.double() - reference).norm() / reference.norm())
        assert difference <= tolerance, f"{name}: {difference:.2g}"


def test_switched_off_the_model_is_what_it_was() -> None:
    plain, model = tiny_model("llama"), tiny_model("llama")
    adapter = adapted(model)
    row = torch.tensor([[3, 1, 4, 1, 5]])
    before = model(row).logits
    with torch.no_grad(), adapter.switched_off():
        assert torch.equal(model(row).logits, plain(row).logits)
    assert torch.equal(model(row).logits, before)
    assert not torch.allclose(before, plain(row).logits, atol=0.1)
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in model.named_parameters())


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj"), ("v_proj", "up_proj", "o_proj")])
def test_fused_layers_compute_adapters_beside_any_of_their_products(
    native: bool, targets: tuple[str, ...] | None
) -> None:
    model = tiny_model("qwen3")
    plain = copy.deepcopy(model)
    adapter = adapted(model, targets=targets)
    summed = copy.deepcopy(plain)
    summed.load_state_dict(merged(model), strict=False)
    expected = {weights: gradients(copy.deepcopy(one))[1] for weights, one in (("own", plain), ("summed", summed))}
    policy = PolicyModel(model, native_kernels=native)
    assert policy.num_fused_layers == (2 if native and COMPILES else 0)
    passes = GradientPasses(policy, load_loss(LOSS), Divisor.of_loss(LOSS))
    for weights, off in (("summed", nullcontext()), ("own", adapter.switched_off()), ("summed", nullcontext())):
        with off:
            model.get_input_embeddings().weight.requires_grad_(weights == "own")  # a backward pass needs a weight
            metrics, _ = passes.add(build_batch(), 0).read(build_batch().summary)
        assert metrics["training/entropy"] == pytest.approx(expected[weights]["training/entropy"], rel=1e-5)
    assert abs(expected["own"]["training/entropy"] - expected["summed"]["training/entropy"]) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_beside_experts_attention_alone_has_adapters(family: str) -> None:
    model = FAMILIES[family]().eval()
    names = {name.rpartition(".")[2] for name in target_layers(model, LoraSettings(rank=RANK))}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= names
    assert not names & {"gate", "gate_proj", "experts"}
    adapted(model)
    gradient, _ = gradients(model)
    assert gradient
    assert all("lora_" in name for name in gradient)
    with pytest.raises(SettingsError, match="experts, whose matrices are one parameter, can have none"):
        target_layers(model, LoraSettings(rank=RANK, targets=("experts",)))


@pytest.mark.parametrize("family", BESIDE_DENSE)
def test_where_peft_takes_dense_layers_for_experts_it_adapts_the_targets_alone_and_loads_what_was_saved(
    family: str, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / family
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(BESIDE_DENSE[family]).save_pretrained(own)
    for file in model_folder.glob("token*"):
        (own / file.name).write_bytes(file.read_bytes())
    base = AutoModelForCausalLM.from_pretrained(own)
    targets = target_layers(base, LoraSettings(rank=RANK))
    assert {"self_attn"} == {name.split(".")[-2] for name in targets}
    with caplog.at_level("INFO", "tailrace.training.model.adapter"):
        trainer = make_trainer(own)
    assert "called gate_proj, up_proj, down_proj get no adapter: peft takes these names for experts'" in caplog.text
    trained = {name for name, weight in trainer._model.named_parameters() if weight.requires_grad}
    assert trained == {f"{name}.lora_{part}.default.weight" for name in targets for part in "AB"}
    train(trainer, range(1, 2))
    path = trainer.save_checkpoint(tmp_path)
    model, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert {key: found for key, found in told.items() if found} == {}
    row = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    before = base(row).logits
    beside = PeftModel.from_pretrained(base, path / "adapter")
    torch.testing.assert_close(beside(row).logits, model(row).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, model(row).logits, atol=1e-3)


@pytest.mark.parametrize("target", ["gate_proj", "mlp.down_proj", "model.layers.0.mlp.up_proj"])
@pytest.mark.parametrize("family", BESIDE_DENSE)
def test_targets_that_peft_takes_for_experts_are_refused(family: str, target: str) -> None:
    model = AutoModelForCausalLM.from_config(BESIDE_DENSE[family])
    with pytest.raises(SettingsError, match=rf"targets: '{target}' of \w+ can have no adapter: .*; there are q_"):
        add_adapter(model, LoraSettings(rank=RANK, targets=("o_proj", target)), "tiny")


def test_a_model_of_which_peft_adapts_more_than_the_targets_is_refused() -> None:
    """It goes by the end of a name, and this one is outside of the decoder."""
    model = tiny_model("llama")
    spare: torch.nn.Module = torch.nn.Linear(8, 8)
    for part in ("q_proj", "self_attn", "0", "layers", "model"):
        spare = torch.nn.ModuleDict({part: spare})
    model.add_module("spare", spare)
    told = r"other layers than it was told \(spare.model.layers.0.self_attn.q_proj gets one too\)"
    with pytest.raises(ModelError, match=told):
        add_adapter(model, LoraSettings(rank=RANK), "tiny")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4, "targets": ("q_porj", "v_proj")}, "'q_porj' matches no linear layer .*; there are q_proj, k_proj"),
        ({"rank": 4, "targets": ("lm_head",)}, "'lm_head' matches no linear layer"),
        ({"rank": 17}, r"rank = 17 is larger than model.layers.0.self_attn.k_proj, a matrix of 16 x 32: at most 16"),
    ],
)
def test_targets_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(SettingsError, match=message):
        add_adapter(model, LoraSettings.model_validate(settings), "tiny")
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(SettingsError, match="GPT2LMHeadModel has no linear layers"):
        add_adapter(tiny_model("gpt2"), LoraSettings(rank=2), "tiny")


def test_the_extra_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r'trainer.lora needs peft: pip install "tailrace\[lora\]"'):
        add_adapter(tiny_model("llama"), LoraSettings(rank=2), "tiny")


def test_targets_are_named_as_peft_names_them() -> None:
    model = tiny_model("qwen3")
    adapted(model, targets=("self_attn.q_proj", "model.layers.1.mlp.down_proj"))
    layers = {name.split(".lora_")[0] for name, weight in model.named_parameters() if weight.requires_grad}
    assert layers == {
        f"model.layers.{name}" for name in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj")
    }


def make_trainer(model_folder: Path, **settings: object) -> Trainer:
    defaults: dict[str, object] = {"learning_rate": 1e-2, "decay": "cosine", "weight_decay": 0.1, "lora": LORA}
    return Trainer(
        TrainerSettings.model_validate(defaults | settings), model_name=str(model_folder), max_steps=8, max_staleness=8
    )


def train(trainer: Trainer, steps: range) -> None:
    for step in steps:
        assert trainer.train_step(build_batch(step=step, seed=step)).skipped is None


def published(trainer: Trainer, dtype: Literal["float32", "bfloat16"] = "float32") -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.snapshot(dtype).wait().items()}


def test_an_engine_samples_what_the_trainer_trains(model_folder: Path) -> None:
    """Log-probabilities of an engine that took the weights of a step, in the trainer: off by rounding alone."""
    trainer = make_trainer(model_folder)
    train(trainer, range(1, 4))
    engine = make_engine(load_causal_lm(str(model_folder), dtype="float32"))
    snapshot = trainer.snapshot()
    assert snapshot.is_detached
    engine.load_model_state_dict(snapshot.wait(), version=3)
    prompts = [[5, 9, 2], [7, 7, 7, 1], [11]]
    requests = [request(f"r{index}", prompt, max_tokens=12) for index, prompt in enumerate(prompts)]
    completions = Driver(engine).run(*requests)
    result = trainer.train_step(sampled_batch(prompts, completions, step=4, version=3))
    assert result.metrics["training/logprob_difference_fresh"] < 1e-4


def sampled_batch(prompts: list[list[int]], completions: list[Any], *, step: int, version: int) -> Batch:
    lengths = [len(prompt) + completion.num_tokens for prompt, completion in zip(prompts, completions, strict=True)]
    batch = build_batch(lengths=lengths, rows=(len(lengths),), step=step, version=version, prompt=0)
    for start, prompt, completion in zip(batch.sample_offsets, prompts, completions, strict=False):
        middle, end = start + len(prompt), start + len(prompt) + completion.num_tokens
        batch.token_ids[start:middle], batch.token_ids[middle:end] = prompt, completion.token_ids
        batch.logprobs[start:middle], batch.logprobs[middle:end] = 0, completion.logprobs
        batch.loss_mask[start:middle], batch.policy_versions[start:middle] = False, -1
    return batch


def test_publishing_changes_nothing_of_the_base(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    base = load_causal_lm(str(model_folder), dtype="float32").state_dict()
    train(trainer, range(1, 3))
    first = published(trainer)
    for _ in range(100):
        published(trainer, "bfloat16")
    assert all(torch.equal(weight, first[name]) for name, weight in published(trainer).items())
    assert {name for name, weight in first.items() if torch.equal(weight, base[name])} == {
        name for name in first if not any(f"{target}.weight" in name for target in ALL)
    }
    frozen = {name: weight for name, weight in trainer._model.state_dict().items() if "lora_" not in name}
    assert all(torch.equal(weight, base[name.replace(".base_layer", "")]) for name, weight in frozen.items())


def test_only_adapters_have_optimizer_state(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder)
    train(trainer, range(1, 2))
    staged = trainer.stage_checkpoint(tmp_path)
    assert staged.moments
    assert all(".lora_" in name for name in staged.moments)


def test_resuming_equals_never_having_stopped_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    straight = make_trainer(model_folder)
    train(straight, range(1, 7))
    first = make_trainer(model_folder)
    train(first, range(1, 4))
    path = first.save_checkpoint(tmp_path)
    torch.rand(3)
    second = make_trainer(model_folder)
    second.restore(path)
    train(second, range(4, 7))
    expected = published(straight)
    assert all(torch.equal(weight, expected[name]) for name, weight in published(second).items())


def test_a_checkpoint_is_a_model_and_an_adapter_of_peft(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder)
    train(trainer, range(1, 4))
    path = trainer.save_checkpoint(tmp_path)
    verify_checkpoint(path)
    row = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    model = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(weight, published(trainer)[name]) for name, weight in model.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    before = base(row).logits
    beside = PeftModel.from_pretrained(base, path / "adapter")
    torch.testing.assert_close(beside(row).logits, model(row).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, model(row).logits, atol=1e-2)


@pytest.mark.parametrize(
    ("saved", "wanted", "message"),
    [
        (LORA, {"rank": 8, "alpha": 10}, r"its rank \(4\) would be 8; leave trainer.lora.rank as it was"),
        (LORA, {"rank": RANK, "alpha": 5}, r"its alpha \(10.0\) would be 5.0"),
        (
            LORA,
            {**LORA, "targets": ("q_proj",)},
            r"its targets \(down_proj.*\) would be q_proj; .*, or begin a new run with model.name = '.*' \(an earlier",
        ),
        (LORA, {}, "is of an adapter, and this run trains all weights: write trainer.lora.rank = 4"),
        ({}, LORA, "is of a run that trains all weights, and trainer.lora.rank asks for an adapter"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    model_folder: Path, tmp_path: Path, saved: dict[str, Any], wanted: dict[str, Any], message: str
) -> None:
    first = make_trainer(model_folder, lora=saved)
    train(first, range(1, 2))
    path = first.save_checkpoint(tmp_path)
    second = make_trainer(model_folder, lora=wanted)
    before = published(second)
    with pytest.raises(CheckpointError, match=message):
        second.restore(path)
    assert all(torch.equal(weight, before[name]) for name, weight in published(second).items())
    assert second.step == 0


def test_a_checkpoint_of_an_adapter_to_another_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    path = make_trainer(model_folder).save_checkpoint(tmp_path)
    other = copy.deepcopy(load_causal_lm(str(model_folder), dtype="float32"))
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 3] += 1e-3
    other.save_pretrained(tmp_path / "other")
    for file in model_folder.glob("token*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=rf"an adapter to other weights than .*: to those of '{model_folder}'"):
        make_trainer(tmp_path / "other").restore(path)
