"""What router replay takes away of the difference between trainer and generator, on tiny random mixtures of experts.

    python benchmarks/router_replay.py [--json] [--quick] [--case perturbed-qwen3-moe ...]

The torch engine samples 125 tokens, training passes over them once with the recorded experts and once without;
differences are those of log-probabilities, in nats. `perturbed`: float32, and the trainer's routers have changed, no
other weight: they are nearly indifferent (1e-6 of their usual size) and changed by noise as large as they are, so that
what differs is the choice of experts. `rounded`: equal weights, bfloat16 on both sides, routers of usual size: rounding
alone sends tokens elsewhere. `other_choices` is the share of choices that the trainer's own router makes differently.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import kit  # isort: skip  - before NumPy: pins threads

from dataclasses import dataclass

import torch
from tests.support.expert_models import expert_model, perturb_routers
from tests.support.routed_rows import INDIFFERENT, logprob_differences, sampled_row, train_on
from transformers import PreTrainedModel

FAMILIES = ("qwen3-moe", "mixtral")
CASES = [f"{kind}-{family}" for kind in ("perturbed", "rounded") for family in FAMILIES]


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    tokens: int
    other_choices: float
    replayed_max: float
    replayed_mean: float
    anew_max: float
    anew_mean: float
    target: None = None
    met: None = None


def main() -> None:
    options = kit.parse_options(__doc__)
    torch.set_num_threads(1)
    kit.report("Router replay", [measure(case) for case in options.choose(CASES)], options)


def measure(case: str) -> Row:
    kind, _, family = case.partition("-")
    model, generator, dtype = perturbed(family) if kind == "perturbed" else rounded(family)
    row, experts = sampled_row(generator)
    replayed, anew = (logprob_differences(model, row, one, dtype=dtype) for one in (experts, None))
    _, metrics = train_on(model, row, experts, dtype=dtype)
    return Row(
        case=case,
        tokens=len(replayed),
        other_choices=1 - metrics["training/router_agreement"],
        replayed_max=float(replayed.max()),
        replayed_mean=float(replayed.mean()),
        anew_max=float(anew.max()),
        anew_mean=float(anew.mean()),
    )


def perturbed(family: str) -> tuple[PreTrainedModel, PreTrainedModel, str]:
    """The trainer's model, the generator's, and the type in which the trainer computes."""
    model = expert_model(family, router_scale=INDIFFERENT)
    perturb_routers(model, 1.0)
    return model, expert_model(family, router_scale=INDIFFERENT), "float32"


def rounded(family: str) -> tuple[PreTrainedModel, PreTrainedModel, str]:
    return expert_model(family), expert_model(family).to(torch.bfloat16), "bfloat16"


if __name__ == "__main__":
    main()
