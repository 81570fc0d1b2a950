from __future__ import annotations

import pytest
from pydantic import ValidationError

from tailrace.rollouts import RolloutSettings
from tailrace.rollouts.settings import WIDEST_NUCLEUS


def test_training_samples_the_full_distribution_at_a_temperature() -> None:
    sampling = RolloutSettings(temperature=0.7, max_tokens=9).training_sampling()
    assert (sampling.top_p, sampling.top_k, sampling.returns_supports) == (1.0, 0, False)
    assert (sampling.temperature, sampling.max_tokens) == (0.7, 9)


def test_a_nucleus_in_training_is_bounded_and_comes_back_with_each_token() -> None:
    sampling = RolloutSettings(top_p=0.9).training_sampling()
    assert (sampling.top_p, sampling.top_k, sampling.returns_supports) == (0.9, WIDEST_NUCLEUS, True)
    assert RolloutSettings(top_p=0.9, top_k=50_000).training_sampling().top_k == 50_000
    sampling = RolloutSettings(top_k=20).training_sampling()
    assert (sampling.top_p, sampling.top_k, sampling.returns_supports) == (1.0, 20, True)
    assert not RolloutSettings(top_k=20).evaluation_sampling().returns_supports


@pytest.mark.parametrize(
    ("given", "message"),
    [({"temperature": 0}, "temperature"), ({"top_k": 1}, "nothing to learn from"), ({"top_p": 0}, "top_p")]
    + [({name: 0.1}, "Extra inputs") for name in ("min_p", "repetition_penalty", "presence_penalty")],
)
def test_what_cannot_be_trained_on_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutSettings.model_validate(given)


def test_evaluation_may_use_a_nucleus() -> None:
    settings = RolloutSettings.model_validate({"evaluation": {"temperature": 0, "top_p": 0.9, "top_k": 5}})
    sampling = settings.evaluation_sampling(seed=3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.9, 5, 3)


def test_a_rollout_must_have_room_for_a_prompt_beside_one_completion() -> None:
    with pytest.raises(ValidationError, match="no room for a prompt"):
        RolloutSettings(max_tokens=64, max_rollout_tokens=64)
