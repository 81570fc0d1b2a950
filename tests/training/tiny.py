"""Tiny random models and batches for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from tailrace.records import CROSS_ENTROPY_WEIGHTS, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, Batch, BatchRow, BatchSummary

VOCABULARY = 64

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "mistral with a sliding window": MistralConfig(**SIZES, sliding_window=6),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    ),
    "gemma2 with soft caps": Gemma2Config(**SIZES),
    "deepseek_v3 with values narrower than keys": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4, "head_dim": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=2,
    ),
}  # fmt: skip


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager" if "gemma" in name else "sdpa")
    with torch.no_grad():
        for parameter in model.parameters():  # far enough from 0 that mistakes show
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def stir(model: PreTrainedModel, scale: float = 0.05) -> None:
    """Let adapters, which do nothing at first, do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def build_batch(
    *,
    lengths: Sequence[int] = (9, 14, 5, 12),
    rows: Sequence[int] = (2, 2),
    step: int = 1,
    version: int = 0,
    seed: int = 0,
    temperature: float = 1.0,
    prompt: int = 3,
    advantages: Sequence[float] | None = None,
    mixed: Sequence[int] = (),
    supports: bool = False,
) -> Batch:
    """Samples of these lengths, `rows[i]` of them in row i, random tokens after a prompt of `prompt` tokens.

    Those at `mixed` were sampled over older caches, all of them with `supports` from a few tokens each.
    """
    generator = np.random.default_rng(seed)
    num_tokens = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    loss_mask = np.ones(num_tokens, np.bool_)
    for start in offsets[:-1]:
        loss_mask[start : start + prompt] = False
    per_sample = generator.normal(size=len(lengths)) if advantages is None else np.asarray(advantages)
    logprobs = np.where(loss_mask, -np.log(VOCABULARY) + generator.normal(size=num_tokens), 0)
    loss_tokens = int(loss_mask.sum())
    token_ids = generator.integers(0, VOCABULARY, num_tokens).astype(np.int32)
    kept: dict[str, np.ndarray] = {}
    if supports:
        counts = np.where(loss_mask, generator.integers(1, 9, num_tokens), 0).astype(np.int32)
        ids = generator.integers(0, VOCABULARY, counts.sum()).astype(np.int32)
        ends = np.cumsum(counts)
        ids[ends[loss_mask] - 1] = token_ids[loss_mask]
        support_offsets = np.concatenate([[0], ends])[offsets].astype(np.int32)
        kept = {"support_counts": counts, "support_ids": ids, "support_offsets": support_offsets}
    return Batch(
        summary=BatchSummary(
            step=step, trainer_version=version, num_samples=len(lengths), num_rollouts=len(lengths),
            num_tokens=num_tokens, loss_tokens=loss_tokens, masked_tokens=0, num_rows=len(rows),
            row_tokens=max(64, num_tokens), staleness_mean=0.0, staleness_max=0, padding=0.0,
        ),
        token_ids=token_ids,
        logprobs=logprobs.astype(np.float32),
        policy_versions=np.where(loss_mask, version, -1).astype(np.int32),
        loss_mask=loss_mask,
        mixed_spans=np.array([edge for token in sorted(mixed) for edge in (token, token + 1)], np.int32),
        advantages=per_sample.astype(np.float32),
        advantage_offsets=np.arange(len(lengths) + 1, dtype=np.int32),
        temperatures=np.full(len(lengths), temperature, np.float32),
        sample_offsets=offsets,
        row_offsets=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        **kept,
    )  # fmt: skip


def demonstrating(batch: Batch, samples: Sequence[int], *, weight: float = 1.0, prompt: int = 3) -> Batch:
    """The batch with these samples as demonstrations: tokens after the prompt bear cross-entropy and nothing else."""
    loss_mask, versions = batch.loss_mask.copy(), batch.policy_versions.copy()
    weights = np.zeros(len(batch.token_ids), np.float32)
    for sample in samples:
        start, end = batch.sample_offsets[sample : sample + 2]
        loss_mask[start:end] = False
        versions[start:end] = -1
        weights[start + prompt : end] = weight * np.linspace(0.5, 1.5, end - start - prompt)
    summary = msgspec.structs.replace(
        batch.summary,
        loss_tokens=int(loss_mask.sum()),
        num_demonstrations=len(samples),
        cross_entropy_tokens=int(np.count_nonzero(weights)),
    )
    return dataclasses.replace(
        batch,
        summary=summary,
        loss_mask=loss_mask,
        policy_versions=versions,
        logprobs=np.where(loss_mask, batch.logprobs, np.float32(0)),
        columns={CROSS_ENTROPY_WEIGHTS: weights},
    )


def weighing(batch: Batch, *names: str, seed: int = 0) -> Batch:
    """The batch with random weights in these columns: some of them 0, and some below."""
    generator, shape = np.random.default_rng(seed), len(batch.token_ids)
    columns = {name: np.float32(generator.choice([0, 0.25, 1, 3, -0.5], shape)) for name in names}
    weightless = {name: int(np.count_nonzero((own == 0) & batch.loss_mask)) for name, own in columns.items()}
    summary = msgspec.structs.replace(batch.summary, weightless_tokens=weightless)
    return dataclasses.replace(batch, columns={**batch.columns, **columns}, summary=summary)


def taught(batch: Batch, top_k: int, *, seed: int = 0) -> Batch:
    """The batch with what a random teacher finds likeliest, for sampled tokens; for some of them it names fewer."""
    generator = np.random.default_rng(seed)
    count = len(batch.token_ids)
    scores = generator.normal(size=(count, VOCABULARY)) * 2
    logprobs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    top_ids = np.argsort(-logprobs, axis=1)[:, :top_k].astype(np.int32)
    top_logprobs = np.take_along_axis(logprobs, top_ids, 1).astype(np.float32)
    absent = ~batch.loss_mask[:, None] | (np.arange(top_k) >= generator.integers(1, 2 * top_k, (count, 1)))
    top_ids[absent], top_logprobs[absent] = -1, 0
    columns = {**batch.columns, TEACHER_TOP_IDS: top_ids, TEACHER_TOP_LOGPROBS: top_logprobs}
    return dataclasses.replace(batch, columns=columns)


def rows_of(batch: Batch, rank: int, size: int) -> Batch:
    """This rank's rows: the first two for rank 0, the last for rank 1, none for any other."""
    if size == 1:
        return batch
    first, last = [(0, 2), (2, 3)][rank] if rank < 2 else (3, 3)
    samples = batch.row_offsets[first], batch.row_offsets[last]
    start, end = batch.sample_offsets[list(samples)]
    own = slice(*samples)
    return dataclasses.replace(
        batch,
        **{name: getattr(batch, name)[start:end] for name in ("token_ids", "logprobs", "policy_versions", "loss_mask")},
        columns={name: column[start:end] for name, column in batch.columns.items()},
        advantages=batch.advantages[own],
        temperatures=batch.temperatures[own],
        advantage_offsets=np.arange(samples[1] - samples[0] + 1, dtype=np.int32),
        sample_offsets=batch.sample_offsets[samples[0] : samples[1] + 1] - start,
        row_offsets=batch.row_offsets[first : last + 1] - samples[0],
        origins=batch.origins.between(int(samples[0]), int(samples[1])),
        **_supports_of(batch, slice(samples[0], samples[1] + 1), slice(start, end)),
        rank=rank,
        num_ranks=size,
    )


def _supports_of(batch: Batch, samples: slice, tokens: slice) -> dict[str, np.ndarray]:
    if not len(batch.support_counts):
        return {}
    offsets = batch.support_offsets[samples]
    return {
        "support_counts": batch.support_counts[tokens],
        "support_ids": batch.support_ids[offsets[0] : offsets[-1]],
        "support_offsets": offsets - offsets[0],
    }


def samples_of(batch: Batch) -> list[BatchRow]:
    """Each sample as a row of its own."""
    return [batch.samples(index, index + 1) for index in range(batch.summary.num_samples)]
