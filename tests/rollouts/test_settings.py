from __future__ import annotations

import pytest
from pydantic import ValidationError

from tailrace.rollouts import RolloutSettings


def test_training_samples_the_full_distribution_at_a_temperature() -> None:
    sampling = RolloutSettings(temperature=0.7, max_tokens=9).training_sampling()
    assert (sampling.top_p, sampling.top_k) == (1.0, 0)
    assert (sampling.temperature, sampling.max_tokens) == (0.7, 9)


def test_a_temperature_of_zero_or_a_nucleus_is_refused_in_training() -> None:
    with pytest.raises(ValidationError, match="temperature"):
        RolloutSettings(temperature=0)
    with pytest.raises(ValidationError, match="top_p"):
        RolloutSettings.model_validate({"top_p": 0.9})


def test_evaluation_may_use_a_nucleus() -> None:
    settings = RolloutSettings.model_validate({"evaluation": {"temperature": 0, "top_p": 0.9, "top_k": 5}})
    sampling = settings.evaluation_sampling(seed=3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.9, 5, 3)


def test_a_rollout_must_have_room_for_a_prompt_beside_one_completion() -> None:
    with pytest.raises(ValidationError, match="no room for a prompt"):
        RolloutSettings(max_tokens=64, max_rollout_tokens=64)
