"""Masks: which tokens of a batch count at all, whatever the loss.

A `Mask` may need whole sequences; a `PointwiseMask` judges each token by itself, and leaves a pointwise loss pointwise.
`load_mask` makes the one that settings mean. What a mask rejects adds neither loss nor gradient.
"""

from collections.abc import Callable, Mapping

from tailrace.training.losses.masks.geometric_ratio import GeometricRatio
from tailrace.training.losses.masks.icepop import IcePop
from tailrace.training.losses.masks.off_policy_sequence import OffPolicySequence
from tailrace.training.losses.masks.protocol import Mask, PointwiseMask
from tailrace.training.losses.masks.sequence_ratio import SequenceRatio
from tailrace.training.settings.masks import (
    GeometricRatioSettings,
    IcePopSettings,
    MaskSettings,
    OffPolicySequenceSettings,
    SequenceRatioSettings,
)

__all__ = ["MASKS", "Mask", "PointwiseMask", "load_mask"]

MASKS: Mapping[type, Callable[..., Mask]] = {
    IcePopSettings: IcePop,
    SequenceRatioSettings: SequenceRatio,
    GeometricRatioSettings: GeometricRatio,
    OffPolicySequenceSettings: OffPolicySequence,
}
"""By the class of their settings, from which each is made."""


def load_mask(settings: MaskSettings) -> Mask:
    """The mask that `settings` mean."""
    return MASKS[type(settings)](settings)
