"""What a step's products cost by the formula is what torch counts; utilisation is told where a peak is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from tailrace.training.model.adapter import add_adapter
from tailrace.training.reports.utilisation import KNOWN_PEAKS, ModelFlops, peak_flops
from tailrace.training.settings.lora import LoraSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.support.expert_models import FAMILIES
from tests.training.tiny import CONFIGS, VOCABULARY, build_batch, tiny_model

LENGTH = 24


def counted(model: PreTrainedModel, length: int) -> int:
    """Products of a forward and backward pass over all tokens, by torch's own counter."""
    model.set_attn_implementation("eager")
    token_ids = torch.randint(0, VOCABULARY, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=token_ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def masked_half(flops: ModelFlops, length: int) -> float:
    """Attention that looks at every pair, and then masks half of them, does this more."""
    return 6.0 * sum(width for _, width in flops.widths) * length**2


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
def test_the_formula_is_what_torch_counts(name: str) -> None:
    model = tiny_model(name)
    flops = ModelFlops.of(model)
    expected = flops.of_samples(np.array([LENGTH])) + masked_half(flops, LENGTH)
    assert counted(model, LENGTH) == pytest.approx(expected, rel=0.01)


def test_no_gradients_are_made_of_what_is_frozen() -> None:
    model = tiny_model("llama")
    add_adapter(model, LoraSettings(rank=4), "tiny")
    model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_())  # as inner layers get
    flops = ModelFlops.of(model)
    expected = flops.of_samples(np.array([LENGTH])) + masked_half(flops, LENGTH)
    assert counted(model, LENGTH) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", FAMILIES)
def test_of_experts_those_count_that_a_token_meets(name: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]()
    model.set_experts_implementation("eager")
    flops = ModelFlops.of(model)
    expected = flops.of_samples(np.array([LENGTH])) + masked_half(flops, LENGTH)
    assert counted(model, LENGTH) == pytest.approx(expected, rel=0.01)


def test_a_window_bounds_what_a_token_sees() -> None:
    flops = ModelFlops.of(tiny_model("mistral with a sliding window"))
    plain = ModelFlops(flops.parameters, tuple((None, width) for _, width in flops.widths))
    assert {window for window, _ in flops.widths} == {6}
    assert flops.of_samples(np.array([6])) == plain.of_samples(np.array([6]))
    width = sum(width for _, width in flops.widths)
    assert plain.of_samples(np.array([20])) - flops.of_samples(np.array([20])) == 6 * width * (20 - 6) ** 2
    mixed = ModelFlops.of(AutoModelForCausalLM.from_config(CONFIGS["gemma2 with soft caps"]))
    window = Gemma2Config().sliding_window
    assert {window for window, _ in mixed.widths} == {None, window}


def test_samples_cost_by_themselves_however_they_are_packed() -> None:
    flops = ModelFlops.of(tiny_model("qwen3"))
    apart = sum(flops.of_samples(np.array([length])) for length in (3, 9, 40))
    assert flops.of_samples(np.array([3, 9, 40])) == pytest.approx(apart)


def test_a_peak_is_chosen_or_known_and_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert peak_flops(cpu, "bfloat16", None) is None
    assert peak_flops(cpu, "float32", 5e10) == 5e10
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, expected in {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "An unknown one": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(gpu, "bfloat16", None) == expected
        assert peak_flops(gpu, "float32", None) is None
        assert peak_flops(gpu, "bfloat16", 1e12) == 1e12
    names = [*KNOWN_PEAKS]
    hidden = {name for place, name in enumerate(names) if any(earlier in name for earlier in names[:place])}
    assert not hidden, "found by a shorter name first"


def test_a_step_tells_its_speed_memory_and_utilisation(model_folder: Path) -> None:
    peak = 1e10
    settings = TrainerSettings(peak_flops=peak)
    trainer = Trainer(settings, model_name=str(model_folder), max_steps=10, max_staleness=4)
    batch = build_batch()
    metrics = trainer.train_step(batch).metrics
    worth = ModelFlops.of(tiny_model("qwen3")).of_samples(np.diff(batch.sample_offsets))
    assert metrics["training/mfu"] == pytest.approx(worth / (metrics["training/step_s"] * peak))
    assert metrics["training/tokens_per_s"] == pytest.approx(batch.summary.num_tokens / metrics["training/step_s"])
    assert metrics["training/memory_bytes"] > 10e6
    unknown = Trainer(TrainerSettings(), model_name=str(model_folder), max_steps=10, max_staleness=4)
    assert "training/mfu" not in unknown.train_step(batch).metrics
