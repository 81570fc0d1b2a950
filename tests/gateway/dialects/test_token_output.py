"""What tokens in, tokens out, tells of a completion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tailrace.gateway.dialects.token_output import ended, tokens
from tailrace.records import Completion, FinishReason, Supports

COMPLETION = Completion(
    token_ids=np.array([7, 8, 9], np.int32),
    logprobs=np.array([-1.0, -2.0, -0.5], np.float32),
    policy_versions=np.array([3, 3, 4], np.int32),
    finish_reason=FinishReason.STOP,
)


def test_each_stretch_of_one_version_is_told() -> None:
    assert ended(COMPLETION)["weight_versions"] == [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
    ]


def test_what_each_token_was_sampled_from_is_told_where_that_is_restricted() -> None:
    supports = Supports(np.array([7, 1, 2, 9], np.int32), np.array([1, 0, 3], np.int32))
    assert tokens(replace(COMPLETION, supports=supports))["sampling_mask"] == [[7], [], [1, 2, 9]]
    assert tokens(COMPLETION)["sampling_mask"] is None
