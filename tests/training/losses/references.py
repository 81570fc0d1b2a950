"""What each loss says, token by token in plain Python and float64: the objective and its gradient by log π.

Written from the papers and not from the code: sequences are lists, every sum is a loop, every derivative is by hand.
Settings are keywords, with the defaults of the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class OneSequence:
    """One sequence: log-probabilities of policy and generator, and advantages, of each token."""

    policy: Array
    generator: Array
    advantages: Array

    def token(self, number: int) -> tuple[float, float, float]:
        """The three of one token."""
        return float(self.policy[number]), float(self.generator[number]), float(self.advantages[number])


@dataclass(frozen=True)
class Judged:
    """Of one token: its loss, the derivative by its own log π, and whether it counts."""

    loss: float
    derivative: float
    kept: bool = True


def clip(ratio: float, advantage: float, low: float, high: float, truncation: float = math.inf) -> Judged:
    """PPO's surrogate, the gradient's weight truncated."""
    if advantage > 0 and ratio > 1 + high:
        return Judged(-(1 + high) * advantage, 0.0)
    if advantage < 0 and ratio < 1 - low:
        return Judged(-(1 - low) * advantage, 0.0)
    weight = min(ratio, truncation)
    return Judged(-weight * advantage, -weight * advantage)


def clipped_ratio(
    policy: float,
    generator: float,
    advantage: float,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    truncation: float = 2.0,
) -> Judged:
    return clip(math.exp(policy - generator), advantage, clip_low, clip_high, truncation)


def dapo(
    policy: float, generator: float, advantage: float, *, clip_low: float = 0.2, clip_high: float = 0.28
) -> Judged:
    return clip(math.exp(policy - generator), advantage, clip_low, clip_high)


def grpo(policy: float, generator: float, advantage: float, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Judged:
    return clip(math.exp(policy - generator), advantage, clip_low, clip_high)


def cispo(
    policy: float, generator: float, advantage: float, *, lowest_weight: float = 0.0, truncation: float = 5.0
) -> Judged:
    weight = max(lowest_weight, min(math.exp(policy - generator), truncation))
    return Judged(-weight * advantage * policy, -weight * advantage)


def aipo(policy: float, generator: float, advantage: float, *, truncation: float = 2.0) -> Judged:
    weight = min(math.exp(policy - generator), truncation)
    return Judged(-weight * advantage * policy, -weight * advantage)


def ipo(policy: float, generator: float, advantage: float, *, threshold: float = 0.3) -> Judged:
    value = -math.exp(policy - generator) * advantage
    return Judged(value, value, kept=abs(math.exp(policy) - math.exp(generator)) <= threshold)


def dppo(
    policy: float,
    generator: float,
    advantage: float,
    *,
    divergence: str = "total_variation",
    threshold: float | None = None,
) -> Judged:
    p, q = math.exp(policy), math.exp(generator)
    if divergence == "total_variation":
        is_far = abs(p - q) > (threshold or 0.15)
    else:
        is_far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) > (threshold or 0.05)
    leads_away = (advantage > 0 and p > q) or (advantage < 0 and p < q)
    value = -p / q * advantage
    return Judged(value, value, kept=not (is_far and leads_away))


def decoupled_ppo(
    policy: float,
    generator: float,
    advantage: float,
    proximal: float | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    highest_weight: float = 5.0,
) -> Judged:
    """In a batch's first step the proximal policy is the policy itself."""
    before = policy if proximal is None else proximal
    weight = math.exp(before - generator)
    judged = clip(math.exp(policy - before), advantage, clip_low, clip_high)
    return Judged(weight * judged.loss, weight * judged.derivative, kept=weight <= highest_weight)


def sapo(
    policy: float,
    generator: float,
    advantage: float,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Judged:
    ratio, temperature = math.exp(policy - generator), temperature_positive if advantage > 0 else temperature_negative
    gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    slope = 4 * gate * (1 - gate)  # of f by the ratio
    return Judged(-4 / temperature * gate * advantage, -slope * ratio * advantage)


def cross_entropy(policy: float, generator: float, advantage: float) -> Judged:
    return Judged(-policy, -1.0, kept=advantage > 0)


POINTWISE: dict[str, Callable[..., Judged]] = {
    "clipped_ratio": clipped_ratio,
    "dapo": dapo,
    "grpo": grpo,
    "dr_grpo": grpo,
    "cispo": cispo,
    "aipo": aipo,
    "ipo": ipo,
    "dppo": dppo,
    "decoupled_ppo": decoupled_ppo,
    "sapo": sapo,
    "selected_cross_entropy": cross_entropy,
}
KEPT, PLANNED, BY_SEQUENCE, FIXED = "kept tokens", "planned tokens", "mean of each sequence", "sequences x length"
DIVIDED_BY = {
    "clipped_ratio": KEPT,
    "dapo": KEPT,
    "cispo": KEPT,
    "aipo": KEPT,
    "selected_cross_entropy": KEPT,
    "ipo": PLANNED,
    "dppo": PLANNED,
    "decoupled_ppo": PLANNED,
    "grpo": BY_SEQUENCE,
    "gspo": BY_SEQUENCE,
    "sapo": BY_SEQUENCE,
    "dr_grpo": FIXED,
}


def gspo_gradient(
    one: OneSequence, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[list[float], list[list[float]]]:
    """Losses of a sequence's tokens, and how each changes with each log π of it."""
    count = len(one.policy)
    ratio = math.exp(sum(one.policy - one.generator) / count)
    losses, derivatives = [], []
    for advantage in one.advantages:
        judged = clip(ratio, float(advantage), clip_low, clip_high)
        losses.append(judged.loss)
        derivatives.append([judged.derivative / count] * count)  # d log s / d log π is 1 / |o|
    return losses, derivatives


def objective(
    name: str,
    sequences: Sequence[OneSequence],
    *,
    length: int = 1,
    kept: Sequence[Sequence[bool]] | None = None,
    **given: float,
) -> tuple[float, Array]:
    """The loss of a batch and its gradient by every log π, in order. `kept` is what masks leave, per token; `given` are
    settings of the loss."""
    total, gradients, num_kept, num_tokens = 0.0, [], 0, sum(len(one.policy) for one in sequences)
    num_sequences = sum(len(one.policy) > 0 for one in sequences)
    for number, one in enumerate(sequences):
        count = len(one.policy)
        gradient = np.zeros(count)
        share = 1 / count if DIVIDED_BY[name] == BY_SEQUENCE and count else 1.0
        across = gspo_gradient(one, **given) if name == "gspo" and count else None
        for token in range(count):
            if across is None:
                judged = POINTWISE[name](*one.token(token), **given)
                changes = np.zeros(count)
                changes[token] = judged.derivative
            else:
                judged, changes = Judged(across[0][token], 0.0), np.array(across[1][token])
            if judged.kept and (kept is None or kept[number][token]):
                total += share * judged.loss
                gradient += share * changes
                num_kept += 1
        gradients.append(gradient)
    divisor = {
        KEPT: num_kept,
        PLANNED: num_tokens,
        BY_SEQUENCE: num_sequences,
        FIXED: num_sequences * length,
    }[DIVIDED_BY[name]]
    return total / max(divisor, 1), np.concatenate(gradients) / max(divisor, 1)
