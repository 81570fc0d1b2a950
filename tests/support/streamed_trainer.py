"""A trainer outside with nothing but torch, as a process of its own: `streamed_trainer.py RUN WEIGHTS STEPS SAMPLES`.

Prints a line of JSON for each step: what its samples were sampled by, and how far log-probabilities are from those that
they came with where the same weights sampled them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import tailrace
from tailrace.feed import Feed, StreamedSample, denominators

QUICKSTART = Path(tailrace.__file__).parent / "recipes" / "models" / "quickstart"


def log_ratios(model: PreTrainedModel, sample: StreamedSample) -> Tensor:
    """[num_loss_tokens], of the model's log-probabilities over those of the weights that sampled the tokens."""
    tokens = torch.tensor(sample.token_ids).long()
    logits = model(tokens[None]).logits[0, :-1] / sample.origin.temperature
    logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    mask = torch.tensor(sample.loss_mask)[1:]
    return logprobs[mask] - torch.tensor(sample.logprobs)[1:][mask]


def is_of(version: int, sample: StreamedSample) -> Tensor:
    """[num_loss_tokens], whether the weights of this version sampled the token, over keys and values of their own."""
    fresh = sample.policy_versions == version
    for start, end in sample.mixed_spans:
        fresh[start:end] = False
    return torch.tensor(fresh[sample.loss_mask])


def train(feed: Feed, weights: Path, steps: int, size: int) -> None:
    """Steps of so many samples and one more, in turns."""
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        samples = feed.pull(size + step % 2)
        if not samples:
            return
        whole, furthest = denominators(samples), 0.0
        for sample in samples:
            ratios = log_ratios(model, sample)
            advantages = torch.tensor(sample.advantages)[torch.tensor(sample.loss_mask)]
            (-(ratios.exp() * advantages).sum() / whole.loss_tokens).backward()
            fresh = is_of(step - 1, sample)
            furthest = max(furthest, float(ratios[fresh].detach().abs().max().item()) if fresh.any() else 0.0)
        optimizer.step()
        optimizer.zero_grad()
        model.save_pretrained(weights / f"{step}")
        feed.step_done(step, samples, weights=weights / f"{step}")
        versions = sorted({int(version) for one in samples for version in one.policy_versions[one.loss_mask]})
        print(json.dumps({"step": step, "versions": versions, "samples": len(samples), "furthest": furthest}))


def main() -> None:
    run, weights, steps, size = sys.argv[1:]
    torch.set_num_threads(1)
    with Feed(run) as feed:
        train(feed, Path(weights), int(steps), int(size))


if __name__ == "__main__":
    main()
