"""The torch engine runs mixtures of experts and hands out what every token was routed to, each position once."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedModel

from tailrace.errors import ModelError
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.records import Completion, FinishReason
from tests.generation.engine_support import (
    Driver,
    forward_logprobs,
    greedy_reference,
    make_engine,
    make_model,
    prompts,
    request,
)
from tests.support.expert_models import FAMILIES, expert_model, perturb_routers, plain_routing


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return expert_model("qwen3-moe")


def make_driver(model: PreTrainedModel, **options: object) -> Driver:
    return Driver(make_engine(model, return_routed_experts=True, **options))


def last_chunk(driver: Driver, name: str) -> SampledTokens:
    chunks = driver.chunks[name]
    assert [chunk.routed_experts is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    return chunks[-1]


def assert_routed_from(driver: Driver, name: str, model: PreTrainedModel, token_ids: list[int], start: int) -> None:
    """The request handed out what `model` chooses for positions `start` to all but the last."""
    chunk = last_chunk(driver, name)
    assert chunk.routed_experts is not None
    assert chunk.routed_experts_start == start
    expected = plain_routing(model, token_ids).numpy()[start:-1]
    assert chunk.routed_experts.shape == expected.shape
    np.testing.assert_array_equal(np.sort(chunk.routed_experts, axis=-1), np.sort(expected, axis=-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_logprobs_and_routing_are_those_of_transformers(family: str) -> None:
    model = expert_model(family)
    driver = make_driver(model, slots=3, prefill_chunk_tokens=7, chunk_tokens=5)
    assert driver.engine.limits.returns_experts
    asked = {f"r{index}": prompt for index, prompt in enumerate(prompts(7))}
    done = driver.run(*(request(name, prompt, temperature=0, max_tokens=12) for name, prompt in asked.items()))
    for (name, prompt), completion in zip(asked.items(), done, strict=True):
        token_ids = completion.token_ids.tolist()
        assert token_ids == greedy_reference(model, prompt, 12)
        np.testing.assert_allclose(
            completion.logprobs, forward_logprobs(model, prompt, completion.token_ids), atol=1e-4
        )
        assert_routed_from(driver, name, model, [*prompt, *token_ids], start=0)
        assert last_chunk(driver, name).routed_experts.dtype == np.uint8


def test_requests_of_all_ages_that_change_places_keep_their_own_routing(model: PreTrainedModel) -> None:
    driver = make_driver(model, slots=20)
    asked = [request(f"r{index}", p, max_tokens=4 + 37 * index % 150) for index, p in enumerate(prompts(30))]
    for one in asked[:20]:
        driver.engine.add(one)
        driver.step()
    driver.run(*asked[20:])
    for one in asked:
        tokens = [*one.prompt_token_ids.tolist(), *driver.done[one.request_id].token_ids.tolist()]
        assert_routed_from(driver, one.request_id, model, tokens, start=0)


def test_a_session_is_handed_only_what_its_next_turn_forwarded(model: PreTrainedModel) -> None:
    driver = make_driver(model)
    first_prompt = prompts(2, longest=30)[1]
    [first] = driver.run(request("turn1", first_prompt, session="s", max_tokens=12))
    second_prompt = [*first_prompt, *first.token_ids.tolist(), 5, 6, 7]
    [second] = driver.run(request("turn2", second_prompt, session="s", max_tokens=12))
    tokens = [*second_prompt, *second.token_ids.tolist()]
    assert_routed_from(driver, "turn2", model, tokens, start=len(first_prompt) + 11)


def test_a_session_whose_history_was_rewritten_is_handed_everything_again(model: PreTrainedModel) -> None:
    driver = make_driver(model)
    driver.run(request("turn1", range(1, 21), session="s", max_tokens=8))
    rewritten = [*range(1, 15), 50, 51, 52]
    [second] = driver.run(request("turn2", rewritten, session="s", max_tokens=8))
    assert second.metrics["cached_prompt_tokens"] == 14
    assert_routed_from(driver, "turn2", model, [*rewritten, *second.token_ids.tolist()], start=0)


def test_a_prompt_copied_from_the_group_comes_with_its_routing(model: PreTrainedModel) -> None:
    driver = make_driver(model, slots=8, prefill_chunk_tokens=16)
    prompt = prompts(2, seed=3)[1] + [7] * 20
    done = driver.run(*(request(f"r{index}", prompt, group="g", max_tokens=10) for index in range(8)))
    assert driver.engine.statistics().prefilled_tokens_total == len(prompt) - 1
    for index, one in enumerate(done):
        assert_routed_from(driver, f"r{index}", model, [*prompt, *one.token_ids.tolist()], start=0)


def test_a_prompt_whose_row_is_taken_over_comes_with_its_routing(model: PreTrainedModel) -> None:
    driver = make_driver(model, slots=1)
    prompt = list(range(1, 21))
    driver.run(request("first", prompt, group="g", max_tokens=4))
    driver.engine.add(request("second", prompt, group="g", max_tokens=4))
    for _ in range(10):
        driver.step()
    done = driver.done["second"]
    assert done.metrics["cached_prompt_tokens"] == len(prompt) - 1
    assert_routed_from(driver, "second", model, [*prompt, *done.token_ids.tolist()], start=0)


def interrupted(driver: Driver) -> Completion:
    driver.engine.add(request("r", [1, 2, 3], seed=5, max_tokens=20))
    for _ in range(8):
        driver.step()
    driver.engine.abort("r")
    driver.step()
    return driver.done["r"]


def test_an_interrupted_request_is_handed_its_part_and_the_one_that_continues_the_rest(model: PreTrainedModel) -> None:
    driver = make_driver(model)
    part = interrupted(driver)
    assert part.finish_reason is FinishReason.ABORTED
    sampled = part.token_ids.tolist()
    assert_routed_from(driver, "r", model, [1, 2, 3, *sampled], start=0)
    [whole] = driver.run(request("again", [1, 2, 3], session="r", seed=5, max_tokens=20, prefix=part))
    tokens = [1, 2, 3, *sampled, *whole.token_ids.tolist()]
    assert_routed_from(driver, "again", model, tokens, start=3 + len(sampled) - 1)


def test_one_that_starts_over_after_an_abort_is_handed_everything(model: PreTrainedModel) -> None:
    driver = make_driver(model)
    interrupted(driver)
    [whole] = driver.run(request("again", [1, 2, 3], session="r", seed=5, max_tokens=20))
    assert_routed_from(driver, "again", model, [1, 2, 3, *whole.token_ids.tolist()], start=0)


def test_recomputed_positions_keep_the_routing_that_sampling_saw(model: PreTrainedModel) -> None:
    driver = make_driver(model, kv_cache="recompute")
    driver.engine.add(request("r", range(1, 12), temperature=0, max_tokens=12))
    for _ in range(6):
        driver.step()
    other = expert_model("qwen3-moe")
    perturb_routers(other, 3.0)
    driver.engine.reset_prefix_cache(preempt_running=True)
    driver.engine.load_model_state_dict(other.state_dict(), version=1)
    driver.finish()
    chunk, done = last_chunk(driver, "r"), driver.done["r"]
    tokens = [*range(1, 12), *done.token_ids.tolist()]
    boundary = 11 + int(np.count_nonzero(done.policy_versions == 0)) - 1
    old, new = plain_routing(model, tokens).numpy(), plain_routing(other, tokens).numpy()
    assert not np.array_equal(old[:boundary], new[:boundary])
    np.testing.assert_array_equal(chunk.routed_experts[:boundary], old[:boundary])
    np.testing.assert_array_equal(chunk.routed_experts[boundary:], new[boundary:-1])


def test_a_request_that_never_ran_is_handed_nothing(model: PreTrainedModel) -> None:
    driver = make_driver(model)
    driver.engine.add(request("r", [1, 2, 3]))
    driver.engine.abort("r")
    driver.step()
    assert last_chunk(driver, "r").routed_experts is None


def test_a_model_without_experts_cannot_return_any() -> None:
    with pytest.raises(ModelError, match="return_routed_experts"):
        make_driver(make_model("qwen3"))
