"""Groups to batches: advantages, filters, samples, packing.

Scored groups flow in; a `PlannedBatch` flows out, with its plan of rows and ranks and the loss's planned denominator
computed once, here. Pure functions, O(samples): nothing here waits, sends, knows a model, or looks at a token.
"""

from tailrace.batching.advantages import (
    INCREMENTAL,
    ZERO_SPREAD,
    compute_advantages,
    filter_reason,
    required_advantages,
    teaches_anyway,
)
from tailrace.batching.batches import FormedBatch, form_batch, reported_batch
from tailrace.batching.packing import Packing
from tailrace.batching.samples import STALE, SampledGroup, sample_group
from tailrace.batching.settings import BatchingSettings

__all__ = [
    "INCREMENTAL",
    "STALE",
    "ZERO_SPREAD",
    "BatchingSettings",
    "FormedBatch",
    "Packing",
    "SampledGroup",
    "compute_advantages",
    "filter_reason",
    "form_batch",
    "reported_batch",
    "required_advantages",
    "sample_group",
    "teaches_anyway",
]
