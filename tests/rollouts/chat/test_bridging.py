"""Laws of bridging: sampled tokens stay, only new messages are rendered, loss lies on what was sampled alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.records import FinishReason, GroupId, Message, Rollout, RolloutId, SamplingParams, Task, TaskId
from tailrace.rollouts import ChatRenderer, RolloutPolicy
from tests.support.chat_models import LLAMA2, save_chat_model
from tests.support.scripted_generate import Sampled, ScriptedGenerate

MODELS = ["chatml", "smollm2", "hermes", "strict", "qwen3"]
TEXT = st.text(st.characters(exclude_categories=["Cs", "Co", "Cn"]), max_size=20)
TOKENS = st.lists(st.integers(3, 400), max_size=12)


def rollout(**sampling: float) -> Rollout:
    task = Task(TaskId("t/0"), "t", 0, {})
    return Rollout(RolloutId("r"), GroupId("g"), task, SamplingParams(max_tokens=16, **sampling))


def play(renderer: ChatRenderer, questions: list[str], replies: list[Sampled]) -> tuple[Rollout, ScriptedGenerate]:
    """A conversation that only grows, its replies sampled as given."""
    generate = ScriptedGenerate(renderer.tokenizer, replies)
    played = rollout()
    policy = RolloutPolicy(played, renderer=renderer, generate=generate, max_turns=99)

    async def talk() -> None:
        messages: list[Message] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append((await policy.chat(messages)).message)

    asyncio.run(talk())
    return played, generate


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.lists(
        st.tuples(TEXT, TOKENS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])), min_size=1, max_size=4
    ),
)
def test_a_conversation_that_grows_is_one_branch_whose_loss_lies_on_sampled_tokens(
    renderer_of: Callable[[str], ChatRenderer], model: str, turns: list[tuple[str, list[int], FinishReason]]
) -> None:
    renderer = renderer_of(model)
    replies = [Sampled(tokens, reason) for _, tokens, reason in turns]
    played, generate = play(renderer, [question for question, _, _ in turns], replies)

    (branch,) = played.branches
    assert len(branch.completion_spans) == len(turns)
    for call, (start, end) in zip(generate.calls, branch.completion_spans, strict=True):
        np.testing.assert_array_equal(branch.token_ids[:start], call.prompt_token_ids)
        assert branch.loss_mask[start:end].all()
    for reply, (start, end) in zip(replies, branch.completion_spans, strict=True):
        sampled = branch.token_ids[start:end].tolist()
        assert sampled[: len(reply.token_ids)] == list(reply.token_ids)
    assert branch.loss_mask.sum() == branch.num_completion_tokens
    assert (branch.logprobs[~branch.loss_mask] == 0).all()
    assert played.turns == len(turns)
    assert "rewritten_turns" not in played.metrics


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), st.lists(st.sampled_from(["Ada, Bob", "Cleo", "the 1 2 fox"]), min_size=2, max_size=4))
def test_bridging_appends_what_a_whole_rendering_has_in_that_place(
    renderer_of: Callable[[str], ChatRenderer], model: str, texts: list[str]
) -> None:
    renderer = renderer_of(model)
    replies = [Sampled(renderer.tokenizer.encode(text)) for text in texts]
    _, generate = play(renderer, texts, replies)
    conversation: list[Message] = []
    for text, call in zip(texts, generate.calls, strict=True):
        conversation.append({"role": "user", "content": text})
        np.testing.assert_array_equal(call.prompt_token_ids, renderer.render(conversation))
        conversation.append({"role": "assistant", "content": text})


@pytest.mark.parametrize("model", MODELS)
def test_a_reply_cut_for_length_is_closed_by_the_context(
    renderer_of: Callable[[str], ChatRenderer], model: str
) -> None:
    renderer = renderer_of(model)
    _, cut = play(renderer, ["a", "b"], [Sampled([10, 11], FinishReason.LENGTH)])
    _, whole = play(renderer, ["a", "b"], [Sampled([10, 11])])
    np.testing.assert_array_equal(cut.calls[1].prompt_token_ids, whole.calls[1].prompt_token_ids)


def further(renderer: ChatRenderer, reply: Sampled) -> tuple[Rollout, list[int]]:
    """A reply and a further one after it: the tokens that the second prompt has behind those of the first."""
    generate = ScriptedGenerate(renderer.tokenizer, [reply])
    played = rollout()
    policy = RolloutPolicy(played, renderer=renderer, generate=generate, max_turns=2)

    async def talk() -> None:
        question: Message = {"role": "user", "content": "who?"}
        await policy.chat([question, (await policy.chat([question])).message])

    asyncio.run(talk())
    first, second = (call.prompt_token_ids.tolist() for call in generate.calls)
    return played, second[len(first) :]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("text", ["Ada", "<think>\nhm\n</think>\n\nAda", "<tool_call>\nAda"])
@pytest.mark.parametrize("model", MODELS)
def test_between_a_reply_and_a_further_one_stands_what_a_whole_rendering_has_there(
    renderer_of: Callable[[str], ChatRenderer], model: str, text: str, reason: FinishReason
) -> None:
    renderer = renderer_of(model)
    sampled = renderer.tokenizer.encode(text)
    played, added = further(renderer, Sampled(sampled, reason))
    whole = renderer.render([{"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ada"}]).tolist()
    assert len(played.branches) == 1
    assert added[: len(sampled)] == sampled
    assert added[len(sampled)] in renderer.stop_token_ids
    assert whole[-len(added[len(sampled) :]) :] == added[len(sampled) :]


@pytest.mark.parametrize("text", ["<think>\nhm", "<think>\nhm<|im_end|>", "Ada<|endoftext|>"])
def test_a_further_reply_of_a_family_begins_a_branch_where_the_one_before_is_not_closed_as_its_template_does(
    renderer_of: Callable[[str], ChatRenderer], text: str
) -> None:
    renderer = renderer_of("qwen3")
    played, _ = further(renderer, Sampled(renderer.tokenizer.encode(text), FinishReason.LENGTH))
    assert len(played.branches) == 2


def test_a_reply_that_holds_the_sentinel_is_not_split_in_the_wrong_place(renderer: ChatRenderer) -> None:
    text = "\u2042sentinel-reply\u2042"
    reply = Sampled(renderer.tokenizer.encode("fine"))
    played, _ = play(renderer, [text, "next"], [reply])
    assert [branch.loss_mask.sum() for branch in played.branches] == [len(reply.token_ids) + 1] * 2
    assert played.metrics["rewritten_turns"] == 1


def test_the_qwen3_family_keeps_the_reasoning_of_earlier_turns(renderer_of: Callable[[str], ChatRenderer]) -> None:
    renderer = renderer_of("qwen3")
    reply = Sampled(renderer.tokenizer.encode("<think>\nhm\n</think>\n\nAda"))
    played, generate = play(renderer, ["who?", "sure?"], [reply])
    assert len(played.branches) == 1
    assert "<think>\nhm\n</think>" in renderer.tokenizer.decode(generate.calls[1].prompt_token_ids.tolist())
    assert played.messages[1] == {"role": "assistant", "content": "Ada", "reasoning_content": "hm"}


def test_drift_is_counted_and_the_sampled_tokens_stay(renderer: ChatRenderer) -> None:
    letters = [renderer.tokenizer.encode(letter)[0] for letter in "Ada"]
    assert renderer.tokenizer.encode("Ada") != letters
    played, generate = play(renderer, ["a", "b"], [Sampled(letters)])
    assert played.metrics["drifted_turns"] == 2
    assert played.metrics["realigned_turns"] == 1
    assert len(played.branches) == 1
    assert letters == generate.calls[1].prompt_token_ids[len(generate.calls[0].prompt_token_ids) :][:3].tolist()


def test_a_reply_that_was_sampled_with_its_end_gets_no_second_one_after_the_templates_space(tmp_path: Path) -> None:
    renderer = ChatRenderer(save_chat_model(tmp_path, template=LLAMA2))
    end = renderer.stop_token_ids[0]
    reply = Sampled(renderer.tokenizer.encode("Ada"))
    _, sampled = play(renderer, ["who?", "sure?"], [reply])
    _, cut = play(renderer, ["who?", "sure?"], [Sampled(reply.token_ids, FinishReason.LENGTH)])
    for generate in (sampled, cut):
        assert generate.calls[1].prompt_token_ids.tolist().count(end) == 1
