from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tailrace.errors import ModelError
from tailrace.generation.engines.torch import TorchEngine
from tailrace.records import Completion, FinishReason, GenerationRequest
from tests.generation.engine_support import (
    ARCHITECTURES,
    SHAPE,
    Driver,
    forward_logprobs,
    greedy_reference,
    make_engine,
    make_model,
    prompts,
    request,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate_while_requests_join_and_leave(architecture: str) -> None:
    model = make_model(architecture)
    driver = Driver(make_engine(model, slots=3, prefill_chunk_tokens=7, chunk_tokens=5))
    asked = {f"r{i}": (prompt, 5 + 6 * i % 23) for i, prompt in enumerate(prompts(8))}
    for name, (prompt, max_tokens) in asked.items():
        driver.engine.add(request(name, prompt, temperature=0, max_tokens=max_tokens))
        driver.step()
        driver.step()
    while driver.engine.has_work:
        driver.step()
    for name, (prompt, max_tokens) in asked.items():
        assert driver.done[name].token_ids.tolist() == greedy_reference(model, prompt, max_tokens)
        assert driver.done[name].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_plain_forward_pass(architecture: str, temperature: float) -> None:
    model = make_model(architecture)
    driver = Driver(make_engine(model, slots=3, prefill_chunk_tokens=16))
    asked = [request(f"r{i}", p, temperature=temperature, max_tokens=20) for i, p in enumerate(prompts(6))]
    for one, done in zip(asked, driver.run(*asked), strict=True):
        expected = forward_logprobs(model, one.prompt_token_ids.tolist(), done.token_ids, temperature)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_many_requests_of_all_ages_change_places_and_keep_their_own_context(architecture: str) -> None:
    model = make_model(architecture)
    driver = Driver(make_engine(model, slots=36))
    asked = [request(f"r{i}", p, max_tokens=4 + 37 * i % 70) for i, p in enumerate(prompts(60))]
    for one in asked[:36]:
        driver.engine.add(one)
        driver.step()
    driver.run(*asked[36:])
    for one in asked:
        done = driver.done[one.request_id]
        expected = forward_logprobs(model, one.prompt_token_ids.tolist(), done.token_ids)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


def test_a_session_computes_only_what_its_next_turn_adds(model) -> None:
    driver = Driver(make_engine(model))
    first_prompt = prompts(2, longest=30)[1]
    [first] = driver.run(request("turn1", first_prompt, session="s", max_tokens=12))
    second_prompt = [*first_prompt, *first.token_ids.tolist(), 5, 6, 7]
    prefilled = driver.engine.statistics().prefilled_tokens_total
    [second] = driver.run(request("turn2", second_prompt, session="s", max_tokens=12))
    cached = len(first_prompt) + 11  # all but the last sampled token, which no pass has seen
    assert second.metrics["cached_prompt_tokens"] == cached
    assert driver.engine.statistics().prefilled_tokens_total - prefilled == len(second_prompt) - 1 - cached
    np.testing.assert_allclose(second.logprobs, forward_logprobs(model, second_prompt, second.token_ids), atol=1e-4)


def test_a_session_whose_history_was_rewritten_reuses_what_still_agrees(model) -> None:
    driver = Driver(make_engine(model))
    driver.run(request("turn1", range(1, 21), session="s", max_tokens=8))
    rewritten = [*range(1, 15), 50, 51, 52]
    [second] = driver.run(request("turn2", rewritten, session="s", max_tokens=8))
    assert second.metrics["cached_prompt_tokens"] == 14
    np.testing.assert_allclose(second.logprobs, forward_logprobs(model, rewritten, second.token_ids), atol=1e-4)


def test_sessions_survive_between_turns_until_the_least_recent_is_evicted(model) -> None:
    driver = Driver(make_engine(model, slots=3))
    turns = dict(zip("abc", prompts(4, longest=20)[1:], strict=True))
    for name, prompt in turns.items():
        [done] = driver.run(request(name + "1", prompt, session=name, max_tokens=6))
        turns[name] = [*prompt, *done.token_ids.tolist(), 9]
    driver.run(request("d1", [3, 1, 4], session="d", max_tokens=6))
    [c, b, a] = driver.run(*(request(name + "2", turns[name], session=name, max_tokens=6) for name in "cba"))
    for kept in (c, b):
        assert kept.metrics["cached_prompt_tokens"] > 0
    assert a.metrics["cached_prompt_tokens"] == 0
    for name, done in (("c", c), ("b", b), ("a", a)):
        np.testing.assert_allclose(done.logprobs, forward_logprobs(model, turns[name], done.token_ids), atol=1e-4)


def test_a_group_computes_its_prompt_once(model) -> None:
    driver = Driver(make_engine(model, slots=8, prefill_chunk_tokens=16))
    prompt = prompts(2, seed=3)[1] + [7] * 20
    done = driver.run(*(request(f"r{i}", prompt, group="g", max_tokens=10) for i in range(8)))
    assert driver.engine.statistics().prefilled_tokens_total == len(prompt) - 1
    assert len({tuple(one.token_ids.tolist()) for one in done}) > 1
    for one in done:
        np.testing.assert_allclose(one.logprobs, forward_logprobs(model, prompt, one.token_ids), atol=1e-4)


def test_with_one_slot_a_group_takes_over_the_row_of_its_own_prompt(model) -> None:
    driver = Driver(make_engine(model, slots=1))
    prompt = list(range(1, 21))
    for index in range(3):
        driver.engine.add(request(f"r{index}", prompt, group="g", max_tokens=4))
    steps_until(driver, ["r0", "r1", "r2"])
    assert driver.engine.statistics().prefilled_tokens_total == len(prompt) - 1
    for one in driver.done.values():
        np.testing.assert_allclose(one.logprobs, forward_logprobs(model, prompt, one.token_ids), atol=1e-4)


def test_the_only_idle_row_is_taken_though_the_prompt_would_be_copied_from_it(model) -> None:
    driver = Driver(make_engine(model, slots=2))
    prompt = list(range(1, 21))
    driver.run(request("first", prompt, group="g", max_tokens=4))
    driver.engine.add(request("other", [3, 1, 4], max_tokens=100))
    driver.step()
    driver.engine.add(request("second", prompt, group="g", max_tokens=4))
    steps_until(driver, ["second"])
    assert "other" not in driver.done
    second = driver.done["second"]
    assert second.metrics["cached_prompt_tokens"] == len(prompt) - 1
    np.testing.assert_allclose(second.logprobs, forward_logprobs(model, prompt, second.token_ids), atol=1e-4)


def steps_until(driver: Driver, names: list[str], *, most: int = 60) -> None:
    for _ in range(most):
        driver.step()
        if driver.done.keys() >= set(names):
            return
    raise AssertionError(f"after {most} steps, {[*driver.done]} of {names} are done")


def test_an_interrupted_completion_continues_as_if_it_never_stopped(model) -> None:
    [whole] = Driver(make_engine(model)).run(request("r", [1, 2, 3], seed=5, max_tokens=20))
    driver = Driver(make_engine(model))
    driver.engine.add(request("r", [1, 2, 3], seed=5, max_tokens=20))
    for _ in range(8):
        driver.step()
    driver.engine.abort("r")
    driver.step()
    part = driver.done["r"]
    assert part.finish_reason is FinishReason.ABORTED
    assert not driver.engine.has_work
    assert 0 < part.num_tokens < 20
    [rest] = Driver(make_engine(model)).run(request("r", [1, 2, 3], prefix=part, seed=5, max_tokens=20))
    assert [*part.token_ids, *rest.token_ids] == whole.token_ids.tolist()


@pytest.mark.parametrize(
    "build",
    [
        lambda: MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)),
        lambda: BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)),
    ],
)
def test_a_model_that_is_more_than_attention_over_keys_and_values_is_refused(build) -> None:
    with pytest.raises(ModelError, match="cannot run on the torch engine"):
        TorchEngine(build())


def test_a_sliding_window_that_only_masks_know_is_found_out_where_no_probe_is_as_long() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen2MoeConfig(
        **SHAPE, **experts, shared_expert_intermediate_size=16, num_key_value_heads=2,
        use_sliding_window=True, sliding_window=32, max_window_layers=2,
    )  # fmt: skip
    with pytest.raises(ModelError, match="sliding window of 32 tokens"):
        TorchEngine(Qwen2MoeForCausalLM(config))


def test_a_context_ends_where_positions_would_be_rotated_in_another_way() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    torch.manual_seed(0)
    model = Phi3ForCausalLM(
        Phi3Config(**SHAPE, num_key_value_heads=4, original_max_position_embeddings=48, rope_parameters=rope)
    ).eval()
    driver = Driver(make_engine(model))
    asked = [request("long", prompts(2)[1], max_tokens=200), request("short", [1], max_tokens=30)]
    for one, done in zip(asked, driver.run(*asked), strict=True):
        expected = forward_logprobs(model, one.prompt_token_ids.tolist(), done.token_ids)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
    assert driver.done["long"].num_tokens == 48 - len(asked[0].prompt_token_ids)


def test_bfloat16_is_no_further_from_float32_than_a_plain_forward_pass_in_bfloat16() -> None:
    model = make_model().to(torch.bfloat16)
    asked = [request(f"r{i}", p, max_tokens=30) for i, p in enumerate(prompts(8))]
    completions = Driver(make_engine(model, slots=8)).run(*asked)
    plain, exact = (
        np.concatenate([
            forward_logprobs(forward, one.prompt_token_ids.tolist(), done.token_ids)
            for one, done in zip(asked, completions, strict=True)
        ])
        for forward in (model, copy.deepcopy(model).float())
    )  # fmt: skip
    found, rounding = np.concatenate([done.logprobs for done in completions]), np.abs(plain - exact)
    assert 0 < np.abs(found - exact).mean() < 1.1 * rounding.mean()
    assert np.abs(found - exact).max() < 1.5 * rounding.max()


def test_bfloat16_generates_what_autocast_over_float32_weights_says() -> None:
    """Of the weights only the matrices are rounded: logits in bfloat16 would be off by hundredths of a nat."""
    model, asked, completions = sampled_in_bfloat16(native_kernels=False)
    assert difference(forward_logprobs_under_autocast(model, asked, completions), completions) < 0.006


def test_native_passes_in_bfloat16_are_as_close_to_exact_ones_as_autocast_is() -> None:
    """They round elsewhere, which moves log-probabilities as much as rounding itself does, and no further."""
    model, asked, completions = sampled_in_bfloat16(native_kernels=True)
    pairs = zip(asked, completions, strict=True)
    exact = [forward_logprobs(model, one.prompt_token_ids.tolist(), done.token_ids) for one, done in pairs]
    rounded = forward_logprobs_under_autocast(model, asked, completions)
    autocast = np.abs(np.concatenate(rounded) - np.concatenate(exact)).mean()
    assert 0 < difference(exact, completions) < 1.2 * autocast


def sampled_in_bfloat16(*, native_kernels: bool) -> tuple[PreTrainedModel, list[GenerationRequest], list[Completion]]:
    """The model with its weights as they were rounded, in float32, and what an engine sampled in bfloat16."""
    model = make_model().to(torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    asked = [request(f"r{i}", prompt, max_tokens=20) for i, prompt in enumerate(prompts(6))]
    completions = Driver(make_engine(model, native_kernels=native_kernels)).run(*asked)
    return model.float(), asked, completions


def forward_logprobs_under_autocast(
    model: PreTrainedModel, asked: list[GenerationRequest], completions: list[Completion]
) -> list[np.ndarray]:
    found = []
    for one, done in zip(asked, completions, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.base_model(torch.tensor([[*one.prompt_token_ids.tolist(), *done.token_ids.tolist()]]))[0][0]
        logits = model.get_output_embeddings()(hidden.float()).log_softmax(-1)[len(one.prompt_token_ids) - 1 : -1]
        expected = logits[torch.arange(len(done.token_ids)), torch.tensor(done.token_ids.tolist())]
        found.append(expected.detach().numpy())
    return found


def difference(expected: list[np.ndarray], completions: list[Completion]) -> float:
    return float(np.abs(np.concatenate(expected) - np.concatenate([done.logprobs for done in completions])).mean())


@pytest.mark.parametrize("native_kernels", [True, False])
def test_new_weights_and_biases_reach_every_layer(native_kernels: bool) -> None:
    before, after = (Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2)).eval() for _ in range(2))
    for parameter in after.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    driver = Driver(make_engine(before, native_kernels=native_kernels))
    driver.run(request("old", prompts(1)[0], max_tokens=4))
    driver.engine.load_model_state_dict(after.state_dict(), version=1)
    asked = [request(f"r{i}", prompt, max_tokens=20) for i, prompt in enumerate(prompts(6))]
    for one, done in zip(asked, driver.run(*asked), strict=True):
        expected = forward_logprobs(after, one.prompt_token_ids.tolist(), done.token_ids)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


def test_a_prepared_model_state_dict_is_packed_already_and_taken_over_without_the_tensors() -> None:
    model, newer = make_model(), make_model(seed=1)
    one, other = Driver(make_engine(model)), Driver(make_engine(model))
    prepared = one.engine.prepare(newer.state_dict())
    other.engine.load_model_state_dict(newer.state_dict(), version=1)
    one.engine.load_model_state_dict(prepared, version=1)
    del prepared
    asked = [request(f"r{i}", prompt, max_tokens=20) for i, prompt in enumerate(prompts(4))]
    for found, expected in zip(one.run(*asked), other.run(*asked), strict=True):
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_what_is_not_this_models_is_refused_when_it_is_prepared() -> None:
    with pytest.raises(ModelError, match="names weights that the model lacks"):
        make_engine(make_model()).prepare(make_model("gpt_neox").state_dict())


def test_layers_that_compute_something_else_keep_their_own_code() -> None:
    model = GraniteForCausalLM(GraniteConfig(**SHAPE, num_key_value_heads=2, residual_multiplier=0.5)).eval()
    asked = [request(f"r{i}", prompt, max_tokens=20) for i, prompt in enumerate(prompts(4))]
    for one, done in zip(asked, Driver(make_engine(model)).run(*asked), strict=True):
        expected = forward_logprobs(model, one.prompt_token_ids.tolist(), done.token_ids)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
