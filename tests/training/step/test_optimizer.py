"""Muon beside AdamW: which weights are whose, what a step is, and that ranks and checkpoints know nothing of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen2MoeConfig

from tailrace.errors import CheckpointError, ModelError
from tailrace.models.sizes import model_sizes
from tailrace.training.model.sharding import own_share, whole
from tailrace.training.ranks import ALONE, JoinedRanks, Ranks
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.step.optimizer import make_optimizer, moment_kinds
from tailrace.training.trainer import Trainer
from tests.training.rank_processes import run_ranks
from tests.training.tiny import SIZES, build_batch, rows_of, tiny_model

RATE = 1e-3
LENGTHS, ROWS = (9, 14, 5, 12, 30, 4), (2, 1, 3)


def stepped(name: str, optimizer: str, steps: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How much each weight has moved after steps of the same gradients, and those."""
    model = tiny_model(name)
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    gradients = {
        key: torch.randn(weight.shape, generator=torch.Generator().manual_seed(place))
        for place, (key, weight) in enumerate(before.items())
    }
    taken = make_optimizer(model, TrainerSettings(learning_rate=RATE, optimizer=optimizer))
    for _ in range(steps):
        for key, weight in model.named_parameters():
            weight.grad = gradients[key].clone()
        taken.step()
    return {key: weight.detach() - before[key] for key, weight in model.named_parameters()}, gradients


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
def test_muon_moves_matrices_of_layers_alone(name: str) -> None:
    muon, _ = stepped(name, "muon", steps=2)
    adamw, _ = stepped(name, "adamw", steps=2)
    assert muon.keys() == adamw.keys()
    for key, moved in muon.items():
        inside = moved.ndim == 2 and not any(part in key for part in ("embed", "lm_head", "wte", "wpe"))
        assert torch.equal(moved, adamw[key]) != inside, key


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
def test_as_many_weights_as_memory_is_counted_for_are_muon_s(name: str) -> None:
    model = tiny_model(name)
    optimizer = make_optimizer(model, TrainerSettings(optimizer="muon"))
    kept = sum(weight.numel() for weight, kinds in moment_kinds(optimizer).items() if kinds == ("momentum_buffer",))
    assert kept == model_sizes(model).inner_matrices > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_biases_of_stacked_experts_do_not_decay_and_are_no_matrices(optimizer: str) -> None:
    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    taken = make_optimizer(model, TrainerSettings(weight_decay=0.1, optimizer=optimizer))
    decays = {weight: group["weight_decay"] > 0 for group in taken.param_groups for weight in group["params"]}
    biases = [weight for name, weight in model.named_parameters() if name.endswith("bias")]
    assert {bias.ndim for bias in biases} == {1, 2}
    assert not any(decays[bias] or moment_kinds(taken)[bias] == ("momentum_buffer",) for bias in biases)


def test_a_step_is_the_orthogonal_part_of_the_gradient_as_large_as_one_of_adamw() -> None:
    """The factor of the singular value decomposition; five iterations leave singular values of about 0.7 to 1.2."""
    muon, gradients = stepped("llama", "muon")
    for key in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        u, _, vh = torch.linalg.svd(gradients[key].double(), full_matrices=False)
        size = RATE * 0.2 * math.sqrt(max(gradients[key].shape))
        values = torch.linalg.diagonal(u.T @ -muon[key].double() @ vh.T) / size
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
        rest = -muon[key].double() / size - u @ torch.diag(values) @ vh
        assert float(rest.norm() / values.norm()) < 0.05
        root_mean_square = float(muon[key].square().mean().sqrt())
        assert 0.1 * RATE < root_mean_square < 0.3 * RATE  # AdamW's are 0.2 to 0.4 of the rate, says the paper


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_decay_and_vectors_do_not(optimizer: str) -> None:
    model = tiny_model("gpt2")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    make_optimizer(model, TrainerSettings(learning_rate=0.1, weight_decay=0.5, optimizer=optimizer)).step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] * (0.95 if weight.ndim > 1 else 1.0), msg=name)


def make_trainer(model_folder: Path, optimizer: str = "muon", ranks: Ranks = ALONE) -> Trainer:
    settings = TrainerSettings(learning_rate=RATE, optimizer=optimizer, weight_decay=0.1, decay="cosine")
    return Trainer(settings, model_name=str(model_folder), max_steps=8, max_staleness=8, ranks=ranks)


def train(trainer: Trainer, steps: range, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    for step in steps:
        batch = build_batch(lengths=LENGTHS, rows=ROWS, step=step, seed=step)
        trainer.train_step(rows_of(batch, ranks.rank, ranks.size))
    return {name: weight.clone() for name, weight in trainer.snapshot().wait().items()}


def test_resuming_equals_never_having_stopped_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    straight = train(make_trainer(model_folder), range(1, 6))
    first, second = make_trainer(model_folder), make_trainer(model_folder)
    train(first, range(1, 4))
    second.restore(first.save_checkpoint(tmp_path))
    for name, weight in train(second, range(4, 6)).items():
        assert torch.equal(straight[name], weight), name


@pytest.mark.parametrize(("saved", "resumed"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_checkpoint_of_the_other_optimizer_is_refused(
    model_folder: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    trainer = make_trainer(model_folder, saved)
    train(trainer, range(1, 2))
    path = trainer.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"another optimizer than trainer\.optimizer"):
        make_trainer(model_folder, resumed).restore(path)


def train_on_ranks(ranks: Ranks, model_folder: Path, folder: Path, written: Path) -> tuple[dict[str, Tensor], ...]:
    """Three steps; and one more from the checkpoint of one process."""
    trainer = make_trainer(model_folder, ranks=ranks)
    trained = train(trainer, range(1, 4), ranks)
    trainer.save_checkpoint(folder)
    trainer.restore(written)
    return trained, train(trainer, range(4, 5), ranks)


@pytest.mark.xdist_group("trainer ranks")
def test_ranks_train_as_one_process_does(model_folder: Path, tmp_path: Path) -> None:
    alone = make_trainer(model_folder)
    three = train(alone, range(1, 4))
    written = alone.save_checkpoint(tmp_path / "alone")
    four = train(alone, range(4, 5))
    (trained, resumed), _ = run_ranks(train_on_ranks, 2, tmp_path / "ranks", model_folder, tmp_path / "saved", written)
    moved = make_trainer(model_folder).snapshot().wait()
    for found, expected in ((trained, three), (resumed, four)):
        for name, weight in expected.items():  # bfloat16 inside of Muon rounds by the order of sums
            step = float((weight - moved[name]).norm())
            assert float((found[name] - weight).norm()) <= 0.05 * step, name
    again = make_trainer(model_folder)
    (path,) = (tmp_path / "saved").iterdir()
    again.restore(path)
    for name, weight in train(again, range(4, 5)).items():
        assert float((weight - four[name]).norm()) <= 0.05 * float((four[name] - moved[name]).norm()), name


NARROW = SIZES | {"num_key_value_heads": 1, "head_dim": 4}
"""Products to keys have four rows."""


def save_with_shared_expert(folder: Path, num_experts: int, sizes: dict[str, int] = SIZES) -> Path:
    """Beside experts and their router, of a row each, one for all tokens, whose gate is a single row."""
    config = Qwen2MoeConfig(
        **sizes, num_experts=num_experts, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def train_once(ranks: Ranks, model_folder: Path) -> dict[str, Tensor]:
    return train(make_trainer(model_folder, ranks=ranks), range(1, 2), ranks)


@pytest.mark.xdist_group("trainer ranks")
def test_a_gate_of_one_row_is_adamw_s_under_any_number_of_ranks(tmp_path: Path) -> None:
    model = save_with_shared_expert(tmp_path / "model", 2)
    before, alone = make_trainer(model).snapshot().wait(), train_once(ALONE, model)
    found, _ = run_ranks(train_once, 2, tmp_path / "ranks", model)
    for name, weight in alone.items():
        assert float((found[name] - weight).norm()) <= 0.05 * float((weight - before[name]).norm()), name
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    moved = (alone[gate] - before[gate]).abs() / RATE
    torch.testing.assert_close(moved, torch.ones_like(moved), rtol=0, atol=0.1)  # AdamW's first step: a sign


def stepped_in_shares(ranks: Ranks) -> tuple[int, dict[str, Tensor]]:
    """This rank's rows of keys' products, which are four, and where all weights are after steps of given gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**NARROW))
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            gradient = torch.randn(weight.shape)
            shared = torch.nn.Parameter(in_shares(weight.detach(), ranks))
            shared.grad = in_shares(gradient, ranks)
            setattr(module, name, shared)
    optimizer = make_optimizer(model, TrainerSettings(learning_rate=RATE, optimizer="muon"))
    for _ in range(2):
        optimizer.step()
    keys = model.model.layers[0].self_attn.k_proj.weight
    return len(own_share(keys)), {name: whole(weight.detach()) for name, weight in model.named_parameters()}


def in_shares(tensor: Tensor, ranks: Ranks) -> Tensor:
    if not isinstance(ranks, JoinedRanks):
        return tensor
    return distribute_tensor(tensor, ranks.mesh("cpu"), [Shard(0)], src_data_rank=None)


@pytest.mark.xdist_group("trainer ranks")
def test_a_matrix_of_which_a_rank_has_no_row_is_stepped_as_in_one_process(tmp_path: Path) -> None:
    _, alone = stepped_in_shares(ALONE)
    shares = run_ranks(stepped_in_shares, 3, tmp_path / "ranks")
    assert [rows for rows, _ in shares] == [2, 2, 0]
    for name, weight in shares[0][1].items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=0.05 * RATE, msg=name)


def save_and_go_on(ranks: Ranks, model_folder: Path, folder: Path) -> dict[str, Tensor]:
    trainer = make_trainer(model_folder, ranks=ranks)
    train(trainer, range(1, 3), ranks)
    trainer.save_checkpoint(folder)
    return train(trainer, range(3, 5), ranks)


def go_on_from(ranks: Ranks, model_folder: Path, written: Path) -> dict[str, Tensor]:
    trainer = make_trainer(model_folder, ranks=ranks)
    trainer.restore(written)
    return train(trainer, range(3, 5), ranks)


@pytest.mark.xdist_group("trainer ranks")
def test_checkpoints_keep_moments_of_which_a_rank_has_a_single_row_or_none(tmp_path: Path) -> None:
    """Of routers 2, 2 and 1, of keys 2, 2 and none, of the gate 1 and none: written by ranks, then by one process."""
    model = save_with_shared_expert(tmp_path / "model", 5, NARROW)
    straight, *_ = run_ranks(save_and_go_on, 3, tmp_path / "first", model, tmp_path / "by ranks")
    (by_ranks,) = (tmp_path / "by ranks").iterdir()
    alone = make_trainer(model)
    alone.restore(by_ranks)
    found, *_ = run_ranks(go_on_from, 3, tmp_path / "again", model, alone.save_checkpoint(tmp_path / "by one"))
    for name, weight in straight.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.xdist_group("trainer ranks")
def test_a_matrix_with_fewer_rows_than_ranks_is_refused_by_name(tmp_path: Path) -> None:
    model = save_with_shared_expert(tmp_path / "model", 2)
    for error in run_ranks(train_once, 3, tmp_path / "ranks", model):
        assert isinstance(error, ModelError)
        assert "model.layers.0.mlp.gate.weight has 2 rows for 3 ranks: set trainer.ranks to 2 or less" in str(error)
