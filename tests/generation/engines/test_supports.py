"""The torch engine tells what each token was sampled from, whatever happens to its request meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.generation.completions import assembled
from tailrace.records import Completion, FinishReason, Supports
from tests.generation.engine_support import Driver, make_engine, make_model, prompts, request, restricted_logprobs

ASKS = {"top_p": 0.9, "returns_supports": True}


def require_told(model, prompt: list[int], done: Completion, temperature: float = 1.0) -> None:
    expected = restricted_logprobs(model, prompt, done, temperature)
    np.testing.assert_allclose(done.logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 20}])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_logprobs_are_renormalised_over_what_was_kept(model, sampling: dict[str, float], temperature: float) -> None:
    driver = Driver(make_engine(model, slots=3, chunk_tokens=4))
    asked = [
        request(f"r{i}", prompt, temperature=temperature, returns_supports=True, max_tokens=5 + 3 * i, **sampling)
        for i, prompt in enumerate(prompts(7))
    ]
    for one, done in zip(asked, driver.run(*asked), strict=True):
        require_told(model, one.prompt_token_ids.tolist(), done, temperature)


def test_what_others_ask_for_changes_nothing(model) -> None:
    driver = Driver(make_engine(model, slots=4, chunk_tokens=3))
    kinds = [ASKS, {}, {"top_k": 4}, {"temperature": 0, **ASKS}]
    asked = [request(f"r{i}", p, max_tokens=20 - i, **kinds[i % 4]) for i, p in enumerate(prompts(8))]
    for index, (one, done) in enumerate(zip(asked, driver.run(*asked), strict=True)):
        assert (done.supports is not None) == (index % 4 == 0)
        if done.supports is not None:
            require_told(model, one.prompt_token_ids.tolist(), done)


def test_more_than_the_log_first_holds_and_long_after_it_was_full(model) -> None:
    """10,000 tokens of more than ten ids each go through room for 4,096 ids; a preempted request's wait meanwhile."""
    driver = Driver(make_engine(model, slots=4, chunk_tokens=64, max_model_tokens=256))
    asked = [request(f"r{i}", [1 + i % 90], temperature=1.5, max_tokens=250, seed=i, **ASKS) for i in range(40)]
    for place, (one, done) in enumerate(zip(asked, driver.run(*asked), strict=True)):
        assert done.supports is not None
        assert len(done.supports.token_ids) > 10 * 250
        if place % 13 == 0:
            require_told(model, one.prompt_token_ids.tolist(), done, 1.5)


def test_a_preempted_request_keeps_what_it_has_not_reported(model) -> None:
    new, prompt = make_model(seed=1), [5, 6, 7]
    driver = Driver(make_engine(model, chunk_tokens=64))
    driver.engine.add(request("r", prompt, max_tokens=30, **ASKS))
    for _ in range(12):
        driver.step()
    driver.engine.reset_prefix_cache(preempt_running=True)
    driver.engine.load_model_state_dict(new.state_dict(), 1)
    driver.finish()
    done = driver.done["r"]
    fresh = done.policy_versions == 1
    assert 0 < fresh.sum() < 30
    for weights, where in ((model, ~fresh), (new, fresh)):
        expected = restricted_logprobs(weights, prompt, done)
        np.testing.assert_allclose(done.logprobs[where], expected[where], rtol=0, atol=1e-4)


def test_an_interrupted_request_goes_on_elsewhere_with_the_supports_it_has(model) -> None:
    prompt, first = [1, 2, 3], Driver(make_engine(model, chunk_tokens=4))
    first.engine.add(request("r", prompt, max_tokens=20, **ASKS))
    for _ in range(9):
        first.step()
    first.engine.abort("r")
    first.step()
    part = assembled(None, first.chunks["r"], FinishReason.ABORTED)
    assert 4 < part.num_tokens < 20
    second = Driver(make_engine(model, chunk_tokens=4, seed=1))
    second.run(request("r+1", prompt, prefix=part, max_tokens=20, **ASKS))
    whole = assembled(part, second.chunks["r+1"], FinishReason.LENGTH)
    assert whole.num_tokens == 20
    require_told(model, prompt, whole)


def test_a_token_that_is_not_finite_leaves_no_support_behind(model) -> None:
    import torch

    driver = Driver(make_engine(model))
    driver.engine.add(request("r", [1, 2, 3], max_tokens=20, **ASKS))
    for _ in range(5):
        driver.step()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    driver.engine.load_model_state_dict(broken, 1)
    driver.finish()
    [chunk] = driver.chunks["r"]
    assert chunk.finish_reason is FinishReason.ERROR
    assert isinstance(chunk.supports, Supports)
    assert chunk.supports.num_tokens == len(chunk.token_ids) > 2
