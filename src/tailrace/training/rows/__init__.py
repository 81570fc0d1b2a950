"""Packed rows on their way through a model: tensors of micro-batches, attention that stays within samples.

In: rows of samples as the batch has them. Out: what a model's forward takes; prompts that samples share are computed
once, and a row may be divided among ranks. Nothing here knows weights or losses.
"""
