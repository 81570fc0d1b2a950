"""The arithmetic of memory against what tiny models really hold: exact where tensors are counted."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from tailrace.generation.engines.torch.cache import SlotCache
from tailrace.generation.engines.torch.model import SlotModel
from tailrace.generation.memory import cache_bytes
from tailrace.models.loading import load_causal_lm, model_without_memory, outline_of
from tailrace.models.sizes import model_sizes, state_dict_bytes
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.memory import TrainerMemory, adapter_sizes, kept_bytes, offloaded_bytes, trainer_memory
from tailrace.training.model.adapter import add_adapter
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.training.tiny import CONFIGS, build_batch, tiny_model

LORA = {"rank": 4}
TOLERANCE = 0.05
"""Of activations."""
WIDTHS = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SHAPES: dict[str, PreTrainedConfig] = {"qwen3": Qwen3Config(**WIDTHS), "llama": LlamaConfig(**WIDTHS)}


def planned(
    model_folder: Path, settings: TrainerSettings, published: Literal["float32", "bfloat16"] = "float32"
) -> TrainerMemory:
    outline = outline_of(str(model_folder))
    return trainer_memory(
        model_sizes(outline),
        settings,
        row_tokens=64,
        sample_tokens=64,
        published=published,
        adapter=adapter_sizes(outline, settings.lora),
    )


def make_trainer(model_folder: Path, settings: TrainerSettings) -> Trainer:
    return Trainer(settings, model_name=str(model_folder), max_steps=8, max_staleness=8)


def total_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def pinned(num_bytes: int) -> int:
    """What torch takes for them."""
    return int(2 ** math.ceil(math.log2(num_bytes)))


@pytest.mark.parametrize(
    "given", [{}, {"lora": LORA}, {"optimizer": "muon"}], ids=["all weights", "adapters", "with Muon"]
)
def test_weights_moments_and_checkpoints_are_counted_to_the_byte(
    model_folder: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    settings = TrainerSettings.model_validate(given)
    memory, trainer = planned(model_folder, settings), make_trainer(model_folder, settings)
    trainer.train_step(build_batch())
    staged = trainer.stage_checkpoint(tmp_path)
    moments = total_bytes(moment for name, moment in staged.moments.items() if not name.endswith("/step"))
    own = [] if staged.adapter is None else [*staged.adapter.tensors.values()]
    assert memory.weights == total_bytes(staged.weights.values())
    assert memory.checkpoint == total_bytes(staged.weights.values()) + moments + total_bytes(own)
    if "lora" in given:
        assert (memory.gradients, memory.moments) == (0, 0)
        assert memory.adapter == 2 * total_bytes(own) + moments
    else:
        assert (memory.gradients, memory.moments, memory.adapter) == (memory.weights, moments, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [{}, LORA, {**LORA, "publish": "adapters"}], ids=["all weights", "merged", "adapters"])
def test_published_weights_are_counted_to_the_byte(
    model_folder: Path, lora: dict[str, Any], dtype: Literal["float32", "bfloat16"]
) -> None:
    """Those that are the trainer's own lie where they were; what is a copy is another one each time."""
    settings = TrainerSettings.model_validate({"lora": lora})
    trainer = make_trainer(model_folder, settings)
    first, second = trainer.snapshot(dtype).wait(), trainer.snapshot(dtype).wait()
    copies = [weight for name, weight in first.items() if weight.data_ptr() != second[name].data_ptr()]
    assert planned(model_folder, settings, dtype).publication == total_bytes(copies)
    if settings.lora.publish != "adapters":
        assert state_dict_bytes(model_sizes(outline_of(str(model_folder))), dtype) == total_bytes(first.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [{}, LORA, {**LORA, "publish": "adapters"}], ids=["all weights", "merged", "adapters"])
def test_weights_published_from_a_gpu_are_counted_as_torch_rounds_pinned_memory(
    model_folder: Path, lora: dict[str, Any], dtype: Literal["float32", "bfloat16"]
) -> None:
    settings = TrainerSettings.model_validate({"lora": lora})
    published = make_trainer(model_folder, settings).snapshot(dtype).wait().values()
    on_gpu = planned(model_folder, settings.model_copy(update={"device": "cuda"}), dtype)
    held = sum(pinned(weight.nbytes) for weight in published)
    assert on_gpu.publication == held > total_bytes(published)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_memory_has_the_sizes_of_the_real_one(name: str) -> None:
    model, outline = tiny_model(name), model_without_memory(CONFIGS[name])
    assert model_sizes(outline) == model_sizes(model)
    assert all(weight.is_meta for weight in outline.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_counted_to_the_byte(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES["qwen3"]), dtype=dtype)
    sizes, layers = model_sizes(model), SlotModel(model).layers
    cache = SlotCache(layers, slots=3, capacity=50, dtype=dtype, device=torch.device("cpu"))
    held = total_bytes([*cache.keys, *cache.values])
    assert cache_bytes(sizes, "float32" if dtype is torch.float32 else "bfloat16", 3 * 50) == held


def kept(model: torch.nn.Module, policy: PolicyModel, lengths: tuple[int, ...]) -> int:
    """Bytes that a forward pass leaves for the backward pass, but for weights."""
    micro_batch = MicroBatch.of(build_batch(lengths=lengths, rows=(len(lengths),)).row(0), 0)
    found: dict[int, int] = {}
    weights = {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy(micro_batch, ClippedRatio(ClippedRatioSettings()))
    assert output.total.requires_grad  # and all that was kept is alive: no place is counted for two
    return sum(found.values())


@pytest.mark.parametrize("lengths", [(90, 110), (700,)], ids=["short samples", "a long one"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("lora", [{}, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_estimated(
    shape: str, lora: dict[str, Any], checkpointing: bool, dtype: str, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), attn_implementation="sdpa")
    sizes, tokens = model_sizes(model), sum(lengths)
    settings = TrainerSettings.model_validate({"gradient_checkpointing": checkpointing, "dtype": dtype, "lora": lora})
    add_adapter(model, settings.lora, "tiny")
    policy = PolicyModel(model, dtype=settings.dtype, native_kernels=False, gradient_checkpointing=checkpointing)
    estimate = kept_bytes(sizes, settings, tokens, sample_tokens=max(lengths), trains_all=not lora)
    estimate += 0 if lora else 4 * sizes.head_weights  # its gradient, which is made on the way forward
    if checkpointing:  # a layer whole is there only while its forward pass is repeated
        once = settings.model_copy(update={"gradient_checkpointing": False})
        two, one = (
            kept_bytes(replace(sizes, layers=count), once, tokens, sample_tokens=max(lengths), trains_all=not lora)
            for count in (2, 1)
        )
        estimate -= two - one
    assert kept(model, policy, lengths) == pytest.approx(estimate, rel=TOLERANCE)


def test_each_rank_has_its_share_and_gathers_the_rest(model_folder: Path) -> None:
    alone, shared = (planned(model_folder, TrainerSettings(ranks=ranks)) for ranks in (1, 4))
    for term in ("weights", "gradients", "moments"):
        assert getattr(shared, term) == -(-getattr(alone, term) // 4)
    assert (alone.gathered, shared.kept) == (0, alone.kept)
    sizes = model_sizes(load_causal_lm(str(model_folder), dtype="float32"))
    assert shared.gathered == 2 * 4 * (2 * sizes.layer_weights + sizes.outer_weights)
    assert shared.loading == alone.weights


def test_a_slice_of_a_row_is_kept_and_what_is_offloaded_is_kept_on_the_host(model_folder: Path) -> None:
    sizes = model_sizes(outline_of(str(model_folder)))
    sliced = planned(model_folder, TrainerSettings(ranks=4, sequence_parallel=4))
    assert sliced.kept == kept_bytes(sizes, TrainerSettings(), 64 // 4, sample_tokens=64)
    on_gpu = TrainerSettings(device="cuda", gradient_checkpointing=True)
    here, there = (
        planned(model_folder, on_gpu.model_copy(update={"offload_activations": offload})) for offload in (False, True)
    )
    one_input = 64 * sizes.hidden * 4
    assert (here.offloaded, there.offloaded) == (0, sizes.layers * pinned(one_input))
    assert here.kept - there.kept == max(0, sizes.layers - 2) * one_input
    assert there.host - here.host == there.offloaded


@pytest.mark.parametrize("lora", [{}, LORA], ids=["all weights", "adapters"])
def test_offloaded_moments_are_on_the_host_but_for_the_blocks_of_a_step(
    model_folder: Path, lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = TrainerSettings.model_validate({"device": "cuda", "lora": lora})
    offloading = on_gpu.model_copy(update={"offload_optimizer": True})
    here, few = planned(model_folder, on_gpu), planned(model_folder, offloading)
    moments = here.adapter // 2 if lora else here.moments
    assert here.offloaded_moments == 0
    assert few.device == here.device  # all of so few are there in a step
    monkeypatch.setattr("tailrace.training.memory.STAGED_BYTES", 100)
    many, held = planned(model_folder, offloading), "adapter" if lora else "moments"
    assert getattr(here, held) - getattr(many, held) == moments - 100
    assert many.host - here.host == many.offloaded_moments == few.offloaded_moments


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("lora", [{}, {"rank": 8}], ids=["all weights", "adapters"])
def test_offloaded_moments_are_counted_as_torch_rounds_pinned_memory(
    model_folder: Path, tmp_path: Path, lora: dict[str, Any], ranks: int
) -> None:
    """Those of several ranks are not below what rank 0 holds, whose shares are the largest."""
    trainer = make_trainer(model_folder, TrainerSettings.model_validate({"lora": lora}))
    trainer.train_step(build_batch())
    staged = trainer.stage_checkpoint(tmp_path).moments
    moments = [moment for name, moment in staged.items() if not name.endswith("/step")]
    held = sum(pinned(-(-len(moment) // ranks) * moment[0].nbytes) for moment in moments)
    offloading = {"device": "cuda", "offload_optimizer": True, "lora": lora, "ranks": ranks}
    estimate = planned(model_folder, TrainerSettings.model_validate(offloading)).offloaded_moments
    assert held > total_bytes(moments) / ranks
    if ranks == 1:
        assert estimate == held
    assert held <= estimate <= 2 * held


def test_rows_of_offloaded_activations_are_counted_as_torch_rounds_pinned_memory() -> None:
    sizes = model_sizes(qwen3("Qwen3-8B"))
    settings = TrainerSettings(device="cuda", gradient_checkpointing=True, offload_activations=True)
    assert offloaded_bytes(sizes, settings, 16_384) == 36 * 16_384 * 4096 * 4
    assert offloaded_bytes(sizes, settings, 16_385) == 36 * 32_768 * 4096 * 4


CARDS_GB = (24, 48, 80, 141)
SPARE = 0.9
"""Of a card: the rest is for its driver, and for what lies between and beside the tensors that are counted."""
ROW_TOKENS, SAMPLE_TOKENS = 16_384, 8_192
QWEN3: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
"""Of their published configurations."""


def qwen3(name: str) -> PreTrainedModel:
    config = Qwen3Config(
        **QWEN3[name], num_key_value_heads=8, head_dim=128, vocab_size=151_936,
        tie_word_embeddings=name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"),
    )  # fmt: skip
    return model_without_memory(config)


def fits(name: str) -> str:
    """A row of the table in docs/trainer.md."""
    outline = qwen3(name)
    sizes, cells = model_sizes(outline), []
    for lora in ({}, {"rank": 16}):
        for ranks in (1, 8):
            settings = TrainerSettings.model_validate(
                {"device": "cuda", "dtype": "bfloat16", "head_dtype": "bfloat16", "gradient_checkpointing": True}
                | {"ranks": ranks, "lora": lora}
            )
            memory = trainer_memory(
                sizes,
                settings,
                row_tokens=ROW_TOKENS,
                sample_tokens=SAMPLE_TOKENS,
                published="bfloat16",
                adapter=adapter_sizes(outline, settings.lora),
            )
            card = next((str(card) for card in CARDS_GB if memory.device <= SPARE * card * 1e9), "none")
            cells.append(f"{memory.device / 1e9:.0f} ({card})")
    return f"| {name} | {sizes.weights / 1e9:.2f} | " + " | ".join(cells) + " |"


def test_the_page_says_what_weights_on_their_way_take_in_pinned_memory() -> None:
    sizes = model_sizes(qwen3("Qwen3-8B"))
    exact, rounded = (state_dict_bytes(sizes, "bfloat16", pinned=is_pinned) / 1e9 for is_pinned in (False, True))
    said = f"{rounded:.0f} GB for the {exact:.0f} that Qwen3-8B's are"
    assert said in (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()


@pytest.mark.parametrize("name", QWEN3)
def test_the_table_of_what_fits_says_what_the_arithmetic_says(name: str) -> None:
    assert fits(name) in (Path(__file__).parents[2] / "docs" / "trainer.md").read_text().splitlines()
