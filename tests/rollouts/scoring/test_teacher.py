"""A teacher scores the tokens that were sampled, or the group has failed; one that does not fit is refused before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tailrace.errors import ModelError, ScoringFailed, SettingsError, TeacherFailed
from tailrace.records import Branch, Group, GroupId, RolloutId, Task, TaskId
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.scoring import EndpointScorer, Teacher, TeacherPlan
from tests.scheduling.world import make_rollout
from tests.support.judge_endpoint import Answer, endpoint
from tests.support.teacher_endpoint import PATHS, likeliest, likelihood, prompt_logprobs, teacher

TASK = Task(TaskId("toy/0"), "toy", 0, {})


def group_of(*tokens: int) -> Group:
    rollouts = [
        make_rollout(TASK, GroupId("g"), RolloutId(f"g.{number}"), reward=0.0, tokens=count)
        for number, count in enumerate(tokens)
    ]
    return Group(GroupId("g"), TASK, rollouts)


def teacher_at(url: str, *, top_k: int = 0, vocabulary: int = 1024, **given: Any) -> Teacher:
    scorer = EndpointScorer(url, "big", vocabulary=vocabulary, top_k=top_k)
    return Teacher(scorer, dataclasses.replace(TeacherPlan(retry_pause_s=0.001), **given))


async def scored(group: Group, *answers: Any, **given: Any) -> list[Any]:
    """What was asked."""
    async with endpoint(*answers, paths=PATHS) as serving:
        asking = teacher_at(serving.url, **given)
        try:
            assert await asking(group) is group
        finally:
            await asking.close()
    return serving.asked


async def test_each_sampled_token_of_each_branch_is_scored_where_it_stands() -> None:
    group = group_of(3, 5)
    shown = Branch(temperature=1.0)
    shown.extend_context([1, 2, 3])
    shown.set_column("cross_entropy_weights", [1.0], start=2)
    group.rollouts[0].branches.append(shown)
    asked = await scored(group, teacher(list))
    branches = [rollout.branches[0] for rollout in group.rollouts]
    assert sorted(one["prompt"] for one in asked) == sorted(branch.token_ids.tolist() for branch in branches)
    assert {one["model"] for one in asked} == {"big"}
    for branch in branches:
        expected = [likelihood(token) for token in branch.token_ids.tolist()]
        np.testing.assert_allclose(branch.columns["teacher_logprobs"], np.where(branch.loss_mask, expected, 0))
    assert set(branches[0].columns) == {"teacher_logprobs"}
    assert "teacher_logprobs" not in shown.columns
    assert group.metrics["teacher_calls"] == 2
    assert group.metrics["teacher_scored_tokens"] == sum(branch.num_tokens for branch in branches)


async def test_its_likeliest_tokens_are_told_in_order_and_those_that_the_policy_has_not_are_left_out() -> None:
    group = group_of(3, 5)
    await scored(group, teacher(list, top_k=4), top_k=4, vocabulary=5)
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        ids, logprobs = branch.columns["teacher_top_ids"], branch.columns["teacher_top_logprobs"]
        assert (ids.dtype, logprobs.dtype, ids.shape) == (np.int32, np.float32, (branch.num_tokens, 4))
        assert (ids[~branch.loss_mask] == -1).all()
        for token, told in zip(branch.token_ids[branch.loss_mask], ids[branch.loss_mask], strict=True):
            own = [token] if token < 5 and token not in {1, 3} else []
            assert [one for one in told if one >= 0] == [1, 3, *own]
        likely = likeliest(4)
        np.testing.assert_allclose(logprobs[branch.loss_mask][:, :2], [[likely[1], likely[3]]] * branch.loss_mask.sum())


@pytest.mark.parametrize(
    "failure",
    [
        Answer(status=503),
        Answer(closes=True),
        Answer(body=b"{}"),
        Answer(body=b'{"choices": []}'),
        Answer(body=b'{"choices": [{"prompt_logprobs": null}]}'),
        prompt_logprobs([1, 2, 3]),
        prompt_logprobs([1, 2, 7, 7, 7]),
    ],
    ids=["status", "closed", "nothing", "no choice", "no log-probabilities", "too few", "other tokens"],
)
async def test_a_call_that_fails_is_repeated_and_then_costs_the_group(failure: Answer) -> None:
    group = group_of(3)
    asked = await scored(group, failure, teacher(list))
    assert len(asked) == 2
    again = group_of(3)
    with pytest.raises(ExceptionGroup) as caught:
        await scored(again, failure, retries=1)
    (failed,) = caught.value.exceptions
    assert isinstance(failed, TeacherFailed)
    assert failed.may_pass
    assert (again.metrics["teacher_calls"], again.metrics["teacher_failed_groups"]) == (2, 1)
    assert str(failed).startswith("task toy/0: the teacher scored nothing; the last answer: http")
    assert not again.rollouts[0].branches[0].columns


async def test_a_call_that_cannot_succeed_is_not_repeated() -> None:
    async with endpoint(Answer(status=404, body=b"no such model"), paths=PATHS) as serving:
        with pytest.raises(ExceptionGroup) as caught:
            await teacher_at(serving.url)(group_of(3))
    assert len(serving.asked) == 1
    assert "answered 404: no such model" in str(caught.value.exceptions[0])


async def test_a_teacher_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await scored(group_of(3), Answer(hangs=True), timeout_s=0.05, retries=0)
    assert "no answer within 0.05 s (distillation.timeout_s)" in str(caught.value.exceptions[0])


async def test_a_turn_at_another_temperature_cannot_be_scored() -> None:
    group = group_of(3)
    group.rollouts[0].branches[0].temperature = 0.5
    with pytest.raises(ScoringFailed, match=r"sampled at temperature 0\.5, and a teacher tells"):
        await scored(group, teacher(list))


async def fitting(renderer: ChatRenderer, answer: Any, max_tokens: int = 512, top_k: int = 0) -> None:
    async with endpoint(answer, paths=PATHS) as serving:
        scorer = EndpointScorer(serving.url, "big", vocabulary=renderer.tokenizer.num_tokens, top_k=top_k)
        try:
            await scorer.require_fitting(renderer.tokenizer, max_tokens)
        finally:
            await scorer.close()


async def test_a_teacher_with_the_policy_s_tokenizer_fits(renderer: ChatRenderer) -> None:
    await fitting(renderer, teacher(renderer.tokenizer.encode))
    await fitting(renderer, teacher(renderer.tokenizer.encode, top_k=3), top_k=3)


def shifted(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """One token is another one."""
    return lambda text: [401 if token == 300 else token for token in encode(text)]


async def test_a_teacher_that_does_not_fit_is_refused(renderer: ChatRenderer) -> None:
    encode = renderer.tokenizer.encode
    with pytest.raises(ModelError, match="has another tokenizer than the policy"):
        await fitting(renderer, teacher(shifted(encode)))
    with pytest.raises(ModelError, match="takes 512 tokens, and a rollout's branch may have 512"):
        await fitting(renderer, teacher(encode, max_model_len=512))
    with pytest.raises(ModelError, match=r"does not say which tokenizer it has: .* answered 404"):
        await fitting(renderer, Answer(status=404))
    with pytest.raises(ModelError, match="does not say which tokenizer it has"):
        await EndpointScorer("http://127.0.0.1:9/v1", "big", vocabulary=9).require_fitting(renderer.tokenizer, 512)


async def test_a_teacher_that_has_an_added_token_less_is_refused(renderer: ChatRenderer) -> None:
    last = renderer.tokenizer.num_tokens - 1
    with pytest.raises(ModelError, match="has another tokenizer than the policy"):
        await fitting(renderer, teacher(lambda text: [one for one in renderer.tokenizer.encode(text) if one != last]))


async def test_a_teacher_that_does_not_score_or_names_too_few_tokens_is_refused(renderer: ChatRenderer) -> None:
    tokenizes = teacher(renderer.tokenizer.encode)

    def only_tokenizes(request: Any) -> Answer:
        return Answer(status=400, body=b"no") if isinstance(request["prompt"], list) else tokenizes(request)

    def names_two(request: Any) -> Answer:
        return prompt_logprobs(request["prompt"], 2) if isinstance(request["prompt"], list) else tokenizes(request)

    with pytest.raises(ModelError, match=r"does not score tokens: .* answered 400: no"):
        await fitting(renderer, only_tokenizes)
    with pytest.raises(ModelError, match=r"names 3 likely tokens, and .*top_k is 5: start it with `--max-logprobs`"):
        await fitting(renderer, names_two, top_k=5)


def test_a_key_that_is_not_there_is_told() -> None:
    with pytest.raises(
        SettingsError, match=r"trainer\.loss\.distillation\.api_key_variable is 'NO_SUCH_KEY', and no such"
    ):
        EndpointScorer("http://127.0.0.1:9/v1", "big", vocabulary=9, api_key_variable="NO_SUCH_KEY")
