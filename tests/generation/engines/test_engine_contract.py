"""What every engine promises, asked of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tailrace.errors import GenerationError, ModelError, RequestRefused
from tailrace.records import Completion, FinishReason
from tests.generation.engine_kinds import BLOCK_TOKENS, MAX_MODEL_TOKENS, SLOTS, EngineKind, contract_model
from tests.generation.engine_support import (
    VOCAB,
    forward_logprobs,
    forward_logprobs_of_all,
    greedy_reference,
    prompts,
    request,
    restricted_logprobs,
)

LONG_PROMPT = [*range(1, 3 * BLOCK_TOKENS // 2), 5, 9]


def test_greedy_equals_generate_while_requests_join_and_leave(engines: EngineKind) -> None:
    driver = engines.make(chunk_tokens=5)
    asked = {f"r{i}": (prompt, 5 + 6 * i % 23) for i, prompt in enumerate(prompts(8))}
    for name, (prompt, max_tokens) in asked.items():
        driver.engine.add(request(name, prompt, temperature=0, max_tokens=max_tokens))
        driver.step()
        driver.step()
    driver.finish()
    for name, (prompt, max_tokens) in asked.items():
        assert driver.done[name].token_ids.tolist() == greedy_reference(contract_model(), prompt, max_tokens)
        assert driver.done[name].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_plain_forward_pass(engines: EngineKind, temperature: float) -> None:
    asked = [request(f"r{i}", p, temperature=temperature, max_tokens=20) for i, p in enumerate(prompts(6))]
    for one, done in zip(asked, engines.make().run(*asked), strict=True):
        expected = forward_logprobs(contract_model(), one.prompt_token_ids.tolist(), done.token_ids, temperature)
        engines.require_close(done.logprobs, expected)


def test_logprobs_are_of_the_distribution_that_was_sampled_from(engines: EngineKind) -> None:
    [done] = engines.make().run(request("r", [1, 2, 3], top_k=1, max_tokens=12))
    np.testing.assert_allclose(done.logprobs, 0, atol=1e-5)
    [nucleus] = engines.make().run(request("r", [1, 2, 3], top_k=5, max_tokens=12))
    plain = forward_logprobs(contract_model(), [1, 2, 3], nucleus.token_ids)
    assert (nucleus.logprobs > plain).all()


@pytest.mark.parametrize("top_k", [VOCAB, 2**31, 2**62])
def test_a_top_k_that_no_vocabulary_reaches_keeps_all_tokens(engines: EngineKind, top_k: int) -> None:
    [done] = engines.make().run(request("r", [1, 2, 3], top_k=top_k, max_tokens=12))
    engines.require_close(done.logprobs, forward_logprobs(contract_model(), [1, 2, 3], done.token_ids))


def test_what_was_sampled_from_is_told_or_asking_for_it_refused(engines: EngineKind) -> None:
    driver = engines.make(chunk_tokens=5)
    sampling = {"top_p": 0.9, "top_k": 30, "returns_supports": True, "max_tokens": 12}
    asked = [request(f"r{i}", prompt, temperature=0.6 + 0.2 * i, **sampling) for i, prompt in enumerate(prompts(6))]
    if not driver.engine.limits.returns_supports:
        with pytest.raises(RequestRefused, match="request r0 is for training with top-p or top-k"):
            driver.engine.add(asked[0])
        assert not driver.engine.has_work
        [done] = driver.run(request("measured", [1, 2], top_p=0.9, max_tokens=3))
        assert done.supports is None
        return
    for one, done in zip(asked, driver.run(*asked), strict=True):
        prompt, temperature = one.prompt_token_ids.tolist(), one.sampling.temperature
        expected = restricted_logprobs(contract_model(), prompt, done, temperature)
        engines.require_close(done.logprobs, expected)
        assert done.supports is not None
        assert 1 <= done.supports.counts.min() < done.supports.counts.max() <= 30


def test_prompts_are_scored_as_by_a_plain_forward_pass_beside_what_runs(engines: EngineKind) -> None:
    driver = engines.make()
    asked = [[3], LONG_PROMPT, *prompts(5, seed=1), LONG_PROMPT]
    running = request("running", LONG_PROMPT, temperature=0, max_tokens=30)
    driver.engine.add(running)
    driver.step()
    scoring = [request(f"s{i}", prompt, score_top_k=i % 4, max_tokens=1) for i, prompt in enumerate(asked)]
    for number, (prompt, done) in enumerate(zip(asked, driver.run(*scoring), strict=True)):
        scores = done.scores
        assert scores is not None
        assert scores.top_ids.shape == scores.top_logprobs.shape == (len(prompt), number % 4)
        assert scores.logprobs[0] == 0
        if len(prompt) == 1:
            continue
        own = forward_logprobs(contract_model(), prompt[:1], np.array(prompt[1:]))
        engines.require_close(scores.logprobs[1:], own)
        for place in range(1, len(prompt)):
            whole = forward_logprobs_of_all(contract_model(), prompt[:place])
            found = whole[scores.top_ids[place]]
            if number % 4:
                engines.require_close(scores.top_logprobs[place], found)
                engines.require_close(found, np.sort(whole)[::-1][: number % 4])
    assert driver.done["running"].token_ids.tolist() == greedy_reference(contract_model(), LONG_PROMPT, 30)
    with pytest.raises(RequestRefused, match=r"one of which must be left \(the least of generator.max_cache_tokens"):
        driver.engine.add(request("long", [1] * MAX_MODEL_TOKENS, score_top_k=1, max_tokens=1))


def test_scoring_can_be_aborted(engines: EngineKind) -> None:
    driver = engines.make()
    driver.engine.add(request("s", LONG_PROMPT, score_top_k=1, max_tokens=1))
    driver.engine.add(request("other", LONG_PROMPT, score_top_k=1, max_tokens=1))
    driver.engine.abort("s")
    driver.finish()
    assert driver.done["s"].finish_reason is FinishReason.ABORTED
    assert driver.done["s"].scores is None
    assert driver.done["other"].scores is not None


def test_a_greedy_completion_has_the_logprobs_of_temperature_1(engines: EngineKind) -> None:
    [done, _] = engines.make().run(
        request("greedy", [1, 2, 3], temperature=0, max_tokens=12), request("beside", [4, 5], max_tokens=12)
    )
    engines.require_close(done.logprobs, forward_logprobs(contract_model(), [1, 2, 3], done.token_ids))


def test_a_session_computes_only_what_its_next_turn_adds(engines: EngineKind) -> None:
    driver = engines.make()
    [first] = driver.run(request("turn1", LONG_PROMPT, session="s", max_tokens=20))
    second_prompt = [*LONG_PROMPT, *first.token_ids.tolist(), 5, 6, 7]
    before = driver.engine.statistics()
    [second] = driver.run(request("turn2", second_prompt, session="s", max_tokens=12))
    known = len(LONG_PROMPT) + 19  # all but the last sampled token, which no pass has seen
    cached = known - known % engines.cache_block_tokens
    after = driver.engine.statistics()
    assert second.metrics["cached_prompt_tokens"] == cached > 0
    prefilled = after.prefilled_tokens_total - before.prefilled_tokens_total
    assert len(second_prompt) - 1 <= prefilled + cached <= len(second_prompt)
    engines.require_close(second.logprobs, forward_logprobs(contract_model(), second_prompt, second.token_ids))


@pytest.mark.parametrize("shared", [False, True])
def test_another_sessions_prompt_of_old_weights_is_reused_only_where_asked_for(
    engines: EngineKind, shared: bool
) -> None:
    newer = contract_model(1)
    driver = engines.make(share_prefix_across_versions=shared)
    driver.run(request("old", LONG_PROMPT, group="g", max_tokens=3))
    driver.engine.load_model_state_dict(newer.state_dict(), 1)
    [done] = driver.run(request("new", LONG_PROMPT, group="g", max_tokens=8))
    assert (done.metrics["cached_prompt_tokens"] > 0) == shared
    assert done.metrics["mixed_cache_tokens"] == (8 if shared else 0)
    if not shared:
        engines.require_close(done.logprobs, forward_logprobs(newer, LONG_PROMPT, done.token_ids))


def test_what_other_weights_of_the_same_version_cached_is_as_old_as_any(engines: EngineKind) -> None:
    """A trainer that was started again trains its last versions once more."""
    newer, driver = contract_model(1), engines.make()
    driver.engine.load_model_state_dict(contract_model().state_dict(), 1)
    driver.run(request("old", LONG_PROMPT, group="g", max_tokens=3))
    driver.engine.add(request("running", [4, 2], max_tokens=20))
    for _ in range(6):
        driver.step()
    driver.engine.load_model_state_dict(newer.state_dict(), 1)
    [done] = driver.run(request("new", LONG_PROMPT, group="g", max_tokens=8))
    assert (done.metrics["cached_prompt_tokens"], done.metrics["mixed_cache_tokens"]) == (0, 0)
    engines.require_close(done.logprobs, forward_logprobs(newer, LONG_PROMPT, done.token_ids))
    assert driver.done["running"].metrics["mixed_cache_tokens"] > 0


def test_the_first_weights_that_come_are_those_that_the_engine_began_with(engines: EngineKind) -> None:
    driver = engines.make()
    driver.run(request("before", LONG_PROMPT, group="g", max_tokens=3))
    driver.engine.load_model_state_dict(contract_model().state_dict(), 0)
    [done] = driver.run(request("after", LONG_PROMPT, group="g", max_tokens=3))
    assert done.metrics["cached_prompt_tokens"] > 0


@pytest.mark.parametrize(("kv_cache", "reused"), [("keep", True), ("reset_prefix", False)])
def test_a_session_reuses_its_own_older_prefix_only_under_keep(
    engines: EngineKind, kv_cache: str, reused: bool
) -> None:
    newer = contract_model(1)
    driver = engines.make(kv_cache=kv_cache)
    [first] = driver.run(request("turn1", LONG_PROMPT, session="s", max_tokens=4))
    driver.engine.load_model_state_dict(newer.state_dict(), 1)
    prompt = [*LONG_PROMPT, *first.token_ids.tolist(), 8]
    [second] = driver.run(request("turn2", prompt, session="s", max_tokens=6))
    assert (second.metrics["cached_prompt_tokens"] > 0) == reused
    assert second.metrics["mixed_cache_tokens"] == (6 if reused else 0)
    if not reused:
        engines.require_close(second.logprobs, forward_logprobs(newer, prompt, second.token_ids))


def test_new_weights_take_over_mid_completion_over_the_old_cache(engines: EngineKind) -> None:
    old, new, prompt = contract_model(), contract_model(1), prompts(2)[1]
    driver = engines.make()
    driver.engine.add(request("r", prompt, max_tokens=30))
    for _ in range(12):
        driver.step()
    weights = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    driver.engine.load_model_state_dict(weights, 7)
    for tensor in weights.values():
        tensor.zero_()  # the engine copied
    driver.finish()
    done = driver.done["r"]
    boundary = int((done.policy_versions == 0).sum())
    assert done.policy_versions.tolist() == [0] * boundary + [7] * (30 - boundary)
    assert 0 < boundary < 30
    assert done.metrics["mixed_cache_tokens"] == 30 - boundary
    engines.require_close(done.logprobs[:boundary], forward_logprobs(old, prompt, done.token_ids)[:boundary])
    engines.require_close(done.logprobs[boundary:], _over_old_cache(old, new, prompt, done, boundary))


@torch.no_grad()
def _over_old_cache(old, new, prompt: list[int], done: Completion, boundary: int) -> np.ndarray:
    """What `new` says of the tokens from `boundary` on, over keys and values that `old` made before."""
    seen = [*prompt, *done.token_ids.tolist()[: boundary - 1]]
    cache = old(torch.tensor([seen]), use_cache=True).past_key_values
    rest = torch.tensor([done.token_ids.tolist()[boundary - 1 :]])
    predicted = new(rest, past_key_values=cache).logits[0, :-1].log_softmax(-1)
    return predicted[torch.arange(len(rest[0]) - 1), rest[0, 1:]].numpy()


def test_requests_that_had_to_wait_run_under_the_newest_weights_alone(engines: EngineKind) -> None:
    new, driver = contract_model(1), engines.make()
    driver.run(request("before", LONG_PROMPT, max_tokens=2))
    for i in range(SLOTS):
        driver.engine.add(request(f"running{i}", [1, 2, i], max_tokens=20))
    driver.step()
    driver.engine.add(request("waiting", LONG_PROMPT, max_tokens=8))
    driver.step()
    assert driver.engine.statistics().waiting == 1
    driver.engine.load_model_state_dict(new.state_dict(), 1)
    driver.finish()
    done = driver.done["waiting"]
    assert set(done.policy_versions.tolist()) == {1}
    assert (done.metrics["cached_prompt_tokens"], done.metrics["mixed_cache_tokens"]) == (0, 0)
    engines.require_close(done.logprobs, forward_logprobs(new, LONG_PROMPT, done.token_ids))


def test_a_reset_cache_is_computed_again_by_the_present_weights(engines: EngineKind) -> None:
    new, prompt = contract_model(1), prompts(2)[1]
    driver = engines.make()
    driver.engine.add(request("r", prompt, max_tokens=20))
    for _ in range(8):
        driver.step()
    with pytest.raises(GenerationError, match="1 running"):
        driver.engine.reset_prefix_cache(preempt_running=False)
    driver.engine.reset_prefix_cache(preempt_running=True)
    driver.engine.load_model_state_dict(new.state_dict(), 1)
    driver.finish()
    done = driver.done["r"]
    after = done.policy_versions == 1
    assert 0 < after.sum() < 20
    assert done.metrics["preemptions"] == 1
    assert done.metrics["mixed_cache_tokens"] == 0
    old_logprobs, new_logprobs = (forward_logprobs(one, prompt, done.token_ids) for one in (contract_model(), new))
    engines.require_close(done.logprobs[~after], old_logprobs[~after])
    engines.require_close(done.logprobs[after], new_logprobs[after])


def test_an_idle_engine_forgets_all_it_cached(engines: EngineKind) -> None:
    driver = engines.make()
    driver.run(request("turn1", LONG_PROMPT, session="s", max_tokens=4))
    driver.engine.reset_prefix_cache(preempt_running=False)
    [again] = driver.run(request("turn2", LONG_PROMPT, session="s", max_tokens=4))
    assert again.metrics["cached_prompt_tokens"] == 0


def test_tied_weights_may_come_under_either_name_and_bad_state_dicts_change_nothing(engines: EngineKind) -> None:
    newer = contract_model(1)
    weights = dict(newer.state_dict())
    driver = engines.make()
    for spoiled, message in (
        ({**weights, "stranger": torch.zeros(1)}, "lacks: stranger"),
        ({**weights, "model.norm.weight": torch.zeros(3)}, "model.norm.weight has shape"),
        ({n: t for n, t in weights.items() if n != "model.norm.weight"}, "lacks weights of the model"),
    ):
        with pytest.raises(ModelError, match=message):
            driver.engine.load_model_state_dict(spoiled, 1)
    assert driver.engine.statistics().policy_version == 0
    [before] = driver.run(request("before", [1, 2, 3], temperature=0, max_tokens=8))
    assert before.token_ids.tolist() == greedy_reference(contract_model(), [1, 2, 3], 8)
    for left_out in ("lm_head.weight", "model.embed_tokens.weight"):
        driver.engine.load_model_state_dict(contract_model().state_dict(), 1)
        driver.engine.load_model_state_dict({n: t for n, t in weights.items() if n != left_out}, 2)
        [after] = driver.run(request("after" + left_out, [4, 2, 3], temperature=0, max_tokens=8))
        assert after.token_ids.tolist() == greedy_reference(newer, [4, 2, 3], 8)


def test_a_seed_samples_the_same_whatever_runs_beside_it(engines: EngineKind) -> None:
    [alone] = engines.make().run(request("r", [1, 2, 3], seed=11, max_tokens=25))
    others = [request(f"o{i}", prompt, max_tokens=9) for i, prompt in enumerate(prompts(6))]
    crowded = engines.make().run(*others, request("r", [1, 2, 3], seed=11, max_tokens=25))[-1]
    assert crowded.token_ids.tolist() == alone.token_ids.tolist()
    [other] = engines.make().run(request("r", [1, 2, 3], seed=12, max_tokens=25))
    assert other.token_ids.tolist() != alone.token_ids.tolist()


def test_streams_of_requests_without_a_seed_begin_again_where_they_are_told_to(engines: EngineKind) -> None:
    driver, drawn = engines.make(), list[list[int]]()
    for number, seed in enumerate((2**40 + 5, 6, 2**40 + 5)):
        driver.engine.reseed(seed)
        asked = [request(f"r{number}-{i}", [1, 2, 3], max_tokens=25) for i in range(2)]
        drawn.append([token for done in driver.run(*asked) for token in done.token_ids.tolist()])
    assert drawn[0] == drawn[2] != drawn[1]


def test_an_interrupted_greedy_completion_continues_as_if_it_never_stopped(engines: EngineKind) -> None:
    whole = greedy_reference(contract_model(), [1, 2, 3], 20)
    driver = engines.make()
    driver.engine.add(request("r", [1, 2, 3], temperature=0, max_tokens=20))
    for _ in range(8):
        driver.step()
    driver.engine.abort("r")
    driver.step()
    part = driver.done["r"]
    assert part.finish_reason is FinishReason.ABORTED
    assert not driver.engine.has_work
    assert 0 < part.num_tokens < 20
    [rest] = engines.make().run(request("r", [1, 2, 3], prefix=part, temperature=0, max_tokens=20))
    assert [*part.token_ids, *rest.token_ids] == whole
    assert rest.finish_reason is FinishReason.LENGTH


def test_an_id_may_come_again_as_soon_as_its_request_was_aborted(engines: EngineKind) -> None:
    driver = engines.make()
    driver.engine.add(request("r", [1, 2, 3], temperature=0, max_tokens=20))
    for _ in range(4):
        driver.step()
    driver.engine.abort("r")
    driver.step()
    driver.chunks.clear()
    [again] = driver.run(request("r", [4, 2, 3], temperature=0, max_tokens=9))
    assert again.token_ids.tolist() == greedy_reference(contract_model(), [4, 2, 3], 9)


def test_abort_ends_waiting_requests_and_leaves_others_alone(engines: EngineKind) -> None:
    driver = engines.make()
    for i in range(SLOTS):
        driver.engine.add(request(f"running{i}", [1, 2], temperature=0, max_tokens=10))
    driver.engine.add(request("waiting", [3, 4], max_tokens=10))
    driver.step()
    driver.engine.abort("waiting")
    driver.engine.abort("unknown")
    driver.finish()
    assert driver.done["waiting"].num_tokens == 0
    assert driver.done["running0"].token_ids.tolist() == greedy_reference(contract_model(), [1, 2], 10)


def test_a_stop_token_ends_the_completion_and_is_its_last(engines: EngineKind) -> None:
    reference = greedy_reference(contract_model(), [1, 2, 3], 20)
    stop = reference[6]
    [done] = engines.make().run(
        request("r", [1, 2, 3], temperature=0, max_tokens=20, stop_token_ids=(90, 91, 92, 93, 94, 95, stop))
    )
    assert done.finish_reason is FinishReason.STOP
    assert done.token_ids.tolist() == reference[: reference.index(stop) + 1]


def test_the_context_limit_ends_a_completion_for_length(engines: EngineKind) -> None:
    prompt = [token % VOCAB for token in range(MAX_MODEL_TOKENS - 2)]
    [done] = engines.make().run(request("r", prompt, max_tokens=50))
    assert (done.num_tokens, done.finish_reason) == (2, FinishReason.LENGTH)


def test_chunks_are_reported_on_the_way(engines: EngineKind) -> None:
    driver = engines.make(chunk_tokens=4)
    driver.run(request("r", [1, 2], max_tokens=10))
    assert [len(chunk.token_ids) for chunk in driver.chunks["r"]] == [4, 4, 2]


def test_the_last_chunk_tells_where_the_time_went(engines: EngineKind) -> None:
    driver = engines.make()
    for i in range(SLOTS + 1):
        driver.engine.add(request(f"r{i}", [1, 2, i], max_tokens=10))
    driver.finish()
    waited, ran = driver.done[f"r{SLOTS}"].metrics, driver.done["r0"].metrics
    for metrics in (waited, ran):
        assert 0 <= metrics["queue_s"] <= metrics["time_to_first_token_s"]
        assert metrics["decode_s"] > 0
        assert metrics["preemptions"] == metrics["nonfinite_logprobs"] == 0
    assert waited["queue_s"] > ran["time_to_first_token_s"]


def test_statistics_count_what_runs_and_what_waits(engines: EngineKind) -> None:
    driver = engines.make()
    sampled = driver.engine.statistics().sampled_tokens_total
    for i in range(SLOTS + 2):
        driver.engine.add(request(f"r{i}", [1, 2, i], max_tokens=6))
    driver.step()
    driver.step()
    during = driver.engine.statistics()
    assert (during.running, during.waiting) == (SLOTS, 2)
    assert SLOTS * 3 <= during.running_tokens <= SLOTS * 6
    assert 0 < during.kv_tokens <= during.kv_capacity_tokens
    driver.finish()
    after = driver.engine.statistics()
    assert (after.running, after.waiting, after.running_tokens) == (0, 0, 0)
    assert after.sampled_tokens_total - sampled == (SLOTS + 2) * 6


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", [], max_tokens=1), "empty prompt"),
        (request("r", [1] * MAX_MODEL_TOKENS, max_tokens=1), f"context holds {MAX_MODEL_TOKENS}"),
        (request("r", [1, VOCAB], max_tokens=1), f"token id {VOCAB}"),
        (request("r", [-1], max_tokens=1), "token id -1"),
        (request("r", [1], temperature=-1.0), "temperature"),
        (request("r", [1], temperature=float("nan")), "temperature"),
        (request("r", [1], temperature=1e-40), "temperature is 1e-40; it must be 0 .greedy., or 0.01 or above"),
        (request("r", [1], max_tokens=0), "max_tokens"),
        (request("r", [1], stop_token_ids=tuple(range(129))), "names 129 tokens; 128 are the most"),
        (request("r", [1], stop_token_ids=(5, 2**63)), f"holds {2**63}, which no token has"),
        (request("r", [1], n=2), "one sequence"),
    ],
)
def test_impossible_requests_are_refused_by_name(engines: EngineKind, bad, message: str) -> None:
    engine = engines.make().engine
    with pytest.raises(RequestRefused, match=f"request r.*{message}"):
        engine.add(bad)
    assert not engine.has_work


def test_a_request_id_that_runs_already_is_refused(engines: EngineKind) -> None:
    driver = engines.make()
    driver.engine.add(request("r", [1], max_tokens=4))
    with pytest.raises(RequestRefused, match="running already"):
        driver.engine.add(request("r", [2], max_tokens=4))
    driver.finish()
    assert driver.done["r"].num_tokens == 4


def test_logits_that_are_not_finite_end_one_request_and_poison_nothing_after(engines: EngineKind) -> None:
    driver = engines.make()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in contract_model().state_dict().items()}
    driver.engine.load_model_state_dict(broken, 1)
    [lost] = driver.run(request("r", LONG_PROMPT, session="s", max_tokens=10))
    assert (lost.finish_reason, lost.num_tokens) == (FinishReason.ERROR, 0)
    assert lost.metrics["nonfinite_logprobs"] == 1
    driver.engine.load_model_state_dict(contract_model().state_dict(), 2)
    [done] = driver.run(request("next", LONG_PROMPT, session="s", temperature=0, max_tokens=12))
    assert done.token_ids.tolist() == greedy_reference(contract_model(), LONG_PROMPT, 12)


def test_every_order_of_arrival_gives_the_same_greedy_tokens(engines: EngineKind) -> None:
    asked = {f"r{i}": prompt for i, prompt in enumerate(prompts(3, seed=5, longest=12))}
    driver = engines.make()
    seen = set()
    for order in itertools.permutations(asked):
        driver.chunks.clear()
        driver.run(*(request(name, asked[name], temperature=0, max_tokens=7) for name in order))
        seen.add(tuple(tuple(driver.done[name].token_ids.tolist()) for name in asked))
    assert len(seen) == 1
