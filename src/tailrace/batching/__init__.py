"""Groups to batches: advantages, filters, samples, packing.

Scored groups flow in; a `PlannedBatch` flows out, with its plan of rows and ranks and the loss's planned denominator
computed once, here. Pure functions, O(samples): nothing here waits, sends, knows a model, or looks at a token.
"""

from tailrace.batching.advantages import INCREMENTAL, compute_advantages, group_advantages
from tailrace.batching.batches import FormedBatch, form_batch
from tailrace.batching.filters import ZERO_SPREAD, filter_reason
from tailrace.batching.packing import Packing, RowPlan, plan_rows
from tailrace.batching.samples import STALE, SampledGroup, sample_group
from tailrace.batching.settings import AdvantageName, BatchingSettings

__all__ = [
    "INCREMENTAL",
    "STALE",
    "ZERO_SPREAD",
    "AdvantageName",
    "BatchingSettings",
    "FormedBatch",
    "Packing",
    "RowPlan",
    "SampledGroup",
    "compute_advantages",
    "filter_reason",
    "form_batch",
    "group_advantages",
    "plan_rows",
    "sample_group",
]
