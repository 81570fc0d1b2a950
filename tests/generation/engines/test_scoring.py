"""Scoring on the torch engine: whatever the passes, and only where it can."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.errors import RequestRefused
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.engines.torch import scoring
from tests.generation.engine_support import ARCHITECTURES, Driver, forward_logprobs, make_engine, make_model, request


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_in_several_passes_are_scored_alike(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_LOGIT_BYTES", 0)
    monkeypatch.setattr(scoring, "_MIN_TOKENS", 7)
    model = make_model(architecture)
    generator = np.random.default_rng(0)
    asked = [generator.integers(0, 97, length).tolist() for length in (1, 20, 7, 2, 6, 33)]
    scored = Driver(make_engine(model)).run(
        *(request(f"r{i}", prompt, score_top_k=97 + i, max_tokens=1) for i, prompt in enumerate(asked))
    )
    for number, (prompt, done) in enumerate(zip(asked, scored, strict=True)):
        scores = done.scores
        assert scores is not None
        if len(prompt) > 1:
            expected = forward_logprobs(model, prompt[:1], np.array(prompt[1:]))
            np.testing.assert_allclose(scores.logprobs[1:], expected, rtol=0, atol=1e-4)
        assert (scores.top_ids[:, 97:] == -1).all()
        assert scores.top_ids.shape == (len(prompt), 97 + number)
        np.testing.assert_allclose(np.exp(scores.top_logprobs[1:, :97]).sum(1), 1, rtol=1e-5)
        assert (np.diff(scores.top_logprobs[1:, :97]) <= 0).all()


def test_a_step_scores_as_many_prompts_as_have_room_for_the_longest() -> None:
    engine = make_engine(make_model())
    for i, length in enumerate([200, *[1] * 40]):
        engine.add(request(f"r{i}", [1] * length, score_top_k=0, max_tokens=1))
    assert [len(engine.step()) for _ in range(2)] == [10, 31]
    assert not engine.has_work


def test_an_engine_that_scores_nothing_refuses() -> None:
    with pytest.raises(RequestRefused, match="request r asks for scores of its tokens, which this engine does not"):
        SimulatedEngine().add(request("r", [1, 2], score_top_k=0, max_tokens=1))
