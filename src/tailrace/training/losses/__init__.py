"""Losses: log-probabilities and entropies of the policy in, a loss for each token out.

A `Loss` gets every token of a micro-batch that bears loss at once, sample after sample, so it may need whole
sequences. A `PointwiseLoss` judges each token by itself and knows its derivative, which spares the head a second pass.
A `Component` is added to it, with a divisor of its own (`add_up`).
`load_loss` finds the one that settings name: built in, or `module:function` of one's own. A loss never sees the model,
never divides by a figure of the batch (its `Divisor` says by which), and never waits for the device.
"""

from tailrace.training.losses.components import (
    CandidateComponent,
    Component,
    ScaledCandidates,
    TokenComponent,
    add_up,
    candidates_of,
)
from tailrace.training.losses.divisor import Divisor
from tailrace.training.losses.protocol import Loss, LossTokens, MeasuredLoss, PointwiseLoss, WeightedLoss
from tailrace.training.losses.registry import LOSSES, load_components, load_loss

__all__ = [
    "LOSSES",
    "CandidateComponent",
    "Component",
    "Divisor",
    "Loss",
    "LossTokens",
    "MeasuredLoss",
    "PointwiseLoss",
    "ScaledCandidates",
    "TokenComponent",
    "WeightedLoss",
    "add_up",
    "candidates_of",
    "load_components",
    "load_loss",
]
