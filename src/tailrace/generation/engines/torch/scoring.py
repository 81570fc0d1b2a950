"""Scores prompts: every token's log-probability, and the tokens that are likeliest in its place.

Prompts side by side, in passes of a bounded number of logits, over keys and values of their own: no slot of a running
request is taken, and nothing that was cached is used or changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tailrace.generation.engines.torch.attention import Segment, SlotStep
from tailrace.generation.engines.torch.cache import SlotCache
from tailrace.generation.engines.torch.model import SlotModel
from tailrace.records import GenerationRequest, TokenScores

_LOGIT_BYTES = 64 << 20
"""Of a pass, in float32."""

_MIN_TOKENS = 64
"""Of a pass, whatever the vocabulary."""


def score_prompts(model: SlotModel, requests: Sequence[GenerationRequest]) -> list[TokenScores]:
    """Of each request's prompt, whose `score_top_k` says how many tokens are named. Call it in inference mode."""
    prompts = [torch.from_numpy(one.prompt_token_ids.astype(np.int64)).to(model.device) for one in requests]
    scores = [TokenScores.unknown(len(one.prompt_token_ids), one.score_top_k or 0) for one in requests]
    longest = max(map(len, prompts))
    cache = SlotCache(model.layers, slots=len(prompts), capacity=longest, dtype=model.dtype, device=model.device)
    cache.reserve(longest)
    most = max(_MIN_TOKENS, _LOGIT_BYTES // (4 * model.vocab_size))
    for segments in _passes([len(prompt) for prompt in prompts], most):
        logits = _logits(model, cache, prompts, segments)
        for one in segments:
            # What a position says is of the next one's token; of the last one nobody knows it.
            end = min(one.end, len(prompts[one.row]) - 1)
            part = logits[one.begin : one.begin + end - one.start].float()
            _note(scores[one.row], one.start + 1, part, prompts[one.row][one.start + 1 : end + 1])
    return scores


def _passes(lengths: Sequence[int], most: int) -> Iterator[list[Segment]]:
    """All positions of all prompts, in order, at most so many at a time."""
    segments, begin = list[Segment](), 0
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + most - begin)
            segments.append(Segment(row, begin, start, end))
            begin, start = begin + end - start, end
            if begin == most:
                yield segments
                segments, begin = [], 0
    if segments:
        yield segments


def _logits(
    model: SlotModel, cache: SlotCache, prompts: Sequence[torch.Tensor], segments: list[Segment]
) -> torch.Tensor:
    """[num_tokens, vocabulary] of the segments, side by side."""
    token_ids = torch.cat([prompts[one.row][one.start : one.end] for one in segments])
    positions = torch.cat([torch.arange(one.start, one.end, device=model.device) for one in segments])
    rows = torch.cat([torch.full((one.end - one.start,), one.row, device=model.device) for one in segments])
    step = SlotStep(cache, rows, positions, segments, 0, longest=0, dtype=model.dtype)
    return model.logits(token_ids, positions, step, keep=len(token_ids))


def _note(scores: TokenScores, start: int, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Write those of the tokens from `start` on, which `logits` [num_tokens, vocabulary] predict."""
    where = slice(start, start + len(token_ids))
    normaliser = logits.logsumexp(1, keepdim=True)
    scores.logprobs[where] = (logits.gather(1, token_ids[:, None]) - normaliser)[:, 0].cpu().numpy()
    named = min(scores.top_ids.shape[1], logits.shape[1])
    top = logits.topk(named, dim=1)
    scores.top_ids[where, :named] = top.indices.cpu().numpy()
    scores.top_logprobs[where, :named] = (top.values - normaliser).cpu().numpy()
