"""Small models whose folders hold quantized weights, as hubs have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from tailrace.records import Json

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def save_fp8(folder: Path) -> Path:
    """Matrices inside of layers in blocks of 8-bit numbers, as DeepSeek and Qwen publish theirs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)

    def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
        if "layers" not in name or weight.ndim != 2:
            return {name: weight}
        scale = weight.float().abs().max() / _LARGEST
        eighth = (weight.float() / scale).to(torch.float8_e4m3fn)
        return {name: eighth, f"{name}_scale_inv": scale.reshape(1, 1)}

    _pack(folder, packed, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    return folder


def save_mxfp4(folder: Path) -> Path:
    """Stacked experts in blocks of 4-bit numbers, as those of gpt-oss are."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=256, layer_types=["full_attention"],
    )  # fmt: skip
    GptOssForCausalLM(config).bfloat16().save_pretrained(folder)

    def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: weight}
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:3], 120, dtype=torch.uint8)}

    _pack(folder, packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]})
    return folder


def say_quantized(folder: Path, how: Json) -> Path:
    """Has the folder's config.json say so."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    return folder


def _pack(folder: Path, packed: Callable[[str, Tensor], dict[str, Tensor]], how: Json) -> None:
    path = folder / "model.safetensors"
    plain = load_file(path)
    save_file(
        {key: value for name, weight in plain.items() for key, value in packed(name, weight).items()},
        path,
        metadata={"format": "pt"},
    )
    say_quantized(folder, how)
