from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

from tailrace.errors import GenerationError, ModelError, RequestRefused
from tailrace.generation.engines.torch import TorchEngine
from tailrace.records import FinishReason
from tests.generation.engine_support import (
    ARCHITECTURES,
    VOCAB,
    Driver,
    forward_logprobs,
    greedy_reference,
    make_engine,
    make_model,
    over_old_cache,
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
    assert driver.engine.statistics().cached_prompt_tokens_total == cached
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
    assert driver.engine.statistics().evicted_sessions_total == 1
    [c, a] = driver.run(*(request(name + "2", turns[name], session=name, max_tokens=6) for name in "ca"))
    assert c.metrics["cached_prompt_tokens"] > 0
    assert a.metrics["cached_prompt_tokens"] == 0
    for name, done in (("c", c), ("a", a)):
        np.testing.assert_allclose(done.logprobs, forward_logprobs(model, turns[name], done.token_ids), atol=1e-4)


def test_a_group_computes_its_prompt_once(model) -> None:
    driver = Driver(make_engine(model, slots=8, prefill_chunk_tokens=16))
    prompt = prompts(2, seed=3)[1] + [7] * 20
    done = driver.run(*(request(f"r{i}", prompt, group="g", max_tokens=10) for i in range(8)))
    assert driver.engine.statistics().prefilled_tokens_total == len(prompt) - 1
    assert len({tuple(one.token_ids.tolist()) for one in done}) > 1
    for one in done:
        np.testing.assert_allclose(one.logprobs, forward_logprobs(model, prompt, one.token_ids), atol=1e-4)


def test_a_group_does_not_share_a_prompt_computed_by_old_weights(model) -> None:
    driver = Driver(make_engine(model))
    prompt, newer = list(range(1, 30)), make_model(seed=1)
    driver.run(request("old", prompt, group="g", max_tokens=3))
    driver.engine.load_model_state_dict(newer.state_dict(), 1)
    [done] = driver.run(request("new", prompt, group="g", max_tokens=8))
    np.testing.assert_allclose(done.logprobs, forward_logprobs(newer, prompt, done.token_ids), atol=1e-4)


def test_new_weights_take_over_mid_completion_over_the_old_cache(model) -> None:
    newer, prompt = make_model(seed=1), prompts(2)[1]
    driver = Driver(make_engine(model))
    driver.engine.add(request("r", prompt, max_tokens=30))
    for _ in range(12):
        driver.step()
    weights = {name: tensor.clone() for name, tensor in newer.state_dict().items()}
    driver.engine.load_model_state_dict(weights, 7)
    for tensor in weights.values():
        tensor.zero_()  # the engine copied
    while driver.engine.has_work:
        driver.step()
    done = driver.done["r"]
    boundary = int((done.policy_versions == 0).sum())
    assert done.policy_versions.tolist() == [0] * boundary + [7] * (30 - boundary)
    assert 0 < boundary < 30
    old = forward_logprobs(model, prompt, done.token_ids)
    np.testing.assert_allclose(done.logprobs[:boundary], old[:boundary], atol=1e-4)
    np.testing.assert_allclose(
        done.logprobs[boundary:], over_old_cache(model, newer, prompt, done, boundary), atol=1e-4
    )


def test_a_reset_cache_is_computed_again_by_the_present_weights(model) -> None:
    newer, prompt = make_model(seed=1), prompts(2)[1]
    driver = Driver(make_engine(model))
    driver.engine.add(request("r", prompt, max_tokens=20))
    for _ in range(8):
        driver.step()
    driver.engine.load_model_state_dict(newer.state_dict(), 1)
    with pytest.raises(GenerationError, match="1 running"):
        driver.engine.reset_prefix_cache(preempt_running=False)
    driver.engine.reset_prefix_cache(preempt_running=True)
    while driver.engine.has_work:
        driver.step()
    done = driver.done["r"]
    new = done.policy_versions == 1
    expected = forward_logprobs(newer, prompt, done.token_ids)
    np.testing.assert_allclose(done.logprobs[new], expected[new], atol=1e-4)


def test_tied_weights_may_come_under_either_name_and_bad_state_dicts_change_nothing(model) -> None:
    newer = make_model(seed=1)
    weights = dict(newer.state_dict())
    engine = make_engine(model)
    for spoiled, message in (
        ({**weights, "stranger": torch.zeros(1)}, "lacks: stranger"),
        ({**weights, "model.norm.weight": torch.zeros(3)}, "model.norm.weight has shape"),
        ({n: t for n, t in weights.items() if n != "model.norm.weight"}, "lacks weights of the model"),
    ):
        with pytest.raises(ModelError, match=message):
            engine.load_model_state_dict(spoiled, 1)
    driver = Driver(engine)
    [before] = driver.run(request("before", [1, 2, 3], temperature=0, max_tokens=8))
    assert before.token_ids.tolist() == greedy_reference(model, [1, 2, 3], 8)
    del weights["lm_head.weight"]
    engine.load_model_state_dict(weights, 1)
    [after] = driver.run(request("after", [4, 2, 3], temperature=0, max_tokens=8))
    assert after.token_ids.tolist() == greedy_reference(newer, [4, 2, 3], 8)


def test_a_seed_samples_the_same_whatever_runs_beside_it(model) -> None:
    [alone] = Driver(make_engine(model)).run(request("r", [1, 2, 3], seed=11, max_tokens=25))
    others = [request(f"o{i}", prompt, max_tokens=9) for i, prompt in enumerate(prompts(6))]
    driver = Driver(make_engine(model, prefill_chunk_tokens=5))
    crowded = driver.run(*others, request("r", [1, 2, 3], seed=11, max_tokens=25))[-1]
    assert crowded.token_ids.tolist() == alone.token_ids.tolist()
    [other] = Driver(make_engine(model)).run(request("r", [1, 2, 3], seed=12, max_tokens=25))
    assert other.token_ids.tolist() != alone.token_ids.tolist()


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


def test_abort_ends_waiting_requests_and_leaves_others_alone(model) -> None:
    driver = Driver(make_engine(model, slots=1))
    driver.engine.add(request("running", [1, 2], temperature=0, max_tokens=10))
    driver.engine.add(request("waiting", [3, 4], max_tokens=10))
    driver.step()
    driver.engine.abort("waiting")
    driver.engine.abort("unknown")
    while driver.engine.has_work:
        driver.step()
    assert driver.done["waiting"].num_tokens == 0
    assert driver.done["running"].token_ids.tolist() == greedy_reference(make_model(), [1, 2], 10)


def test_a_stop_token_ends_the_completion_and_is_its_last(model) -> None:
    reference = greedy_reference(model, [1, 2, 3], 20)
    stop = reference[6]
    ends = reference.index(stop) + 1
    [done] = Driver(make_engine(model)).run(
        request("r", [1, 2, 3], temperature=0, max_tokens=20, stop_token_ids=(90, 91, 92, 93, 94, 95, stop))
    )
    assert done.finish_reason is FinishReason.STOP
    assert done.token_ids.tolist() == reference[:ends]


def test_the_context_limit_ends_a_completion_for_length(model) -> None:
    driver = Driver(make_engine(model, max_model_tokens=32))
    [done] = driver.run(request("r", range(1, 31), max_tokens=50))
    assert (done.num_tokens, done.finish_reason) == (2, FinishReason.LENGTH)


def test_chunks_are_reported_on_the_way(model) -> None:
    driver = Driver(make_engine(model, chunk_tokens=4))
    driver.run(request("r", [1, 2], max_tokens=10))
    assert [len(chunk.token_ids) for chunk in driver.chunks["r"]] == [4, 4, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", [], max_tokens=1), "empty prompt"),
        (request("r", range(64), max_tokens=1), "context holds 64"),
        (request("r", [1, VOCAB], max_tokens=1), f"token id {VOCAB}"),
        (request("r", [-1], max_tokens=1), "token id -1"),
        (request("r", [1], temperature=-1.0), "temperature"),
        (request("r", [1], temperature=float("nan")), "temperature"),
        (request("r", [1], max_tokens=0), "max_tokens"),
    ],
)
def test_impossible_requests_are_refused_by_name(model, bad, message: str) -> None:
    engine = make_engine(model, max_model_tokens=64)
    with pytest.raises(RequestRefused, match=f"request r.*{message}"):
        engine.add(bad)
    assert not engine.has_work


def test_logits_that_are_not_finite_end_one_request_and_poison_nothing_after(model) -> None:
    driver = Driver(make_engine(model, slots=1))
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    driver.engine.load_model_state_dict(broken, 1)
    [lost] = driver.run(request("r", range(1, 40), max_tokens=10))
    assert (lost.finish_reason, lost.num_tokens) == (FinishReason.ERROR, 0)
    driver.engine.load_model_state_dict(model.state_dict(), 2)
    [done] = driver.run(request("next", [1, 2, 3], temperature=0, max_tokens=12))
    assert done.token_ids.tolist() == greedy_reference(model, [1, 2, 3], 12)


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


def test_bfloat16_logprobs_stay_close_to_a_plain_forward_pass() -> None:
    model = make_model().to(torch.bfloat16)
    driver = Driver(make_engine(model, slots=8))
    asked = [request(f"r{i}", p, max_tokens=30) for i, p in enumerate(prompts(8))]
    differences = [
        np.abs(done.logprobs - forward_logprobs(model, one.prompt_token_ids.tolist(), done.token_ids))
        for one, done in zip(asked, driver.run(*asked), strict=True)
    ]
    assert np.concatenate(differences).mean() < 0.1


def test_every_order_of_arrival_gives_the_same_greedy_tokens(model) -> None:
    asked = {f"r{i}": prompt for i, prompt in enumerate(prompts(3, seed=5, longest=12))}
    seen = set()
    for order in itertools.permutations(asked):
        driver = Driver(make_engine(model, slots=2, prefill_chunk_tokens=4))
        driver.run(*(request(name, asked[name], temperature=0, max_tokens=7) for name in order))
        seen.add(tuple(tuple(driver.done[name].token_ids.tolist()) for name in asked))
    assert len(seen) == 1


def test_bfloat16_generates_what_autocast_over_float32_weights_says() -> None:
    """Of the weights only the matrices are rounded: logits in bfloat16 would be off by hundredths of a nat."""
    model = make_model().to(torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    asked = [request(f"r{i}", prompt, max_tokens=20) for i, prompt in enumerate(prompts(6))]
    completions = Driver(make_engine(model)).run(*asked)
    model.float()
    differences = []
    for one, done in zip(asked, completions, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.base_model(torch.tensor([[*one.prompt_token_ids.tolist(), *done.token_ids.tolist()]]))[0][0]
        logits = model.get_output_embeddings()(hidden.float()).log_softmax(-1)[len(one.prompt_token_ids) - 1 : -1]
        expected = logits[torch.arange(len(done.token_ids)), torch.tensor(done.token_ids.tolist())]
        differences.append(np.abs(done.logprobs - expected.detach().numpy()))
    assert np.concatenate(differences).mean() < 0.006
