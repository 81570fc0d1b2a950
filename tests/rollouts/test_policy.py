from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from tailrace.batching import sample_group
from tailrace.environments import answer_tool_calls
from tailrace.errors import BudgetExceeded, EnvironmentFailed, RequestRefused, RolloutError, SettingsError
from tailrace.generation.rpc.messages import GenerateCall, unpack_calls
from tailrace.records import (
    FinishReason,
    Group,
    GroupId,
    Message,
    Reply,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
    ToolSpec,
)
from tailrace.rollouts import ChatRenderer, RolloutPolicy
from tailrace.transport.channels import encode
from tests.support.scripted_generate import Sampled, ScriptedGenerate

ADD: ToolSpec = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def said(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}  # type: ignore[typeddict-item]


class Talk:
    """A policy, its rollout and what the engine saw."""

    def __init__(
        self,
        renderer: ChatRenderer,
        replies: Sequence[str | Sampled | Exception] = ("Ada",),
        *,
        max_turns: int = 9,
        sampling: SamplingParams | None = None,
        system_prompt: str | None = None,
        rollout_id: str = "r7",
        **limits: int,
    ) -> None:
        task = Task(TaskId("names/train/7"), "names", 7, {})
        self.rollout = Rollout(RolloutId(rollout_id), GroupId("g7"), task, sampling or SamplingParams(max_tokens=64))
        self.generate = ScriptedGenerate(renderer.tokenizer, replies)
        self.tokenizer = renderer.tokenizer
        self.policy = RolloutPolicy(
            self.rollout,
            renderer=renderer,
            generate=self.generate,
            max_turns=max_turns,
            system_prompt=system_prompt,
            **limits,
        )

    def prompt(self, call: int) -> str:
        return self.tokenizer.decode(self.generate.calls[call].prompt_token_ids.tolist())


async def test_a_reply_is_recorded_and_returned(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    reply = await talk.policy.chat([user("who?")])
    assert reply.message == said("Ada")
    assert reply.finish_reason is FinishReason.STOP
    assert talk.rollout.messages == [user("who?"), said("Ada")]
    (branch,) = talk.rollout.branches
    assert branch.token_ids[branch.loss_mask].tolist() == reply.completion.token_ids.tolist()


async def test_requests_of_a_branch_share_a_session(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    reply = await talk.policy.chat([user("a")])
    await talk.policy.chat([user("a"), reply.message, user("b")])
    await talk.policy.chat([user("other")])
    assert [call.session_id for call in talk.generate.calls] == ["r7/0", "r7/0", "r7/1"]
    assert len({call.request_id for call in talk.generate.calls}) == 3


@pytest.mark.parametrize(
    "handed_back",
    [
        said("Ada\n"),
        said("  Ada", reasoning_content=""),
    ],
)
async def test_a_reply_handed_back_in_another_form_is_realigned(renderer: ChatRenderer, handed_back: Message) -> None:
    talk = Talk(renderer, [" Ada\n"])
    await talk.policy.chat([user("a")])
    await talk.policy.chat([user("a"), handed_back, user("b")])
    assert talk.prompt(1).startswith(talk.prompt(0) + " Ada\n<|im_end|>")
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["realigned_turns"] == 1


@pytest.mark.parametrize("model", ["chatml", "hermes", "qwen3"])
async def test_what_follows_a_reply_may_be_a_further_one_on_its_branch(
    renderer_of: Callable[[str], ChatRenderer], model: str
) -> None:
    talk = Talk(renderer_of(model), ["Ada", "Bob"])
    reply = await talk.policy.chat([user("a")])
    await talk.policy.chat([user("a"), reply.message])
    assert talk.prompt(1) == talk.prompt(0) + "Ada<|im_end|>\n<|im_start|>assistant\n"
    assert talk.rollout.messages == [user("a"), said("Ada"), said("Bob")]
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["realigned_turns"] == talk.rollout.metrics.get("rewritten_turns", 0) == 0


async def test_a_reply_handed_back_with_a_name_is_the_same(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada"])
    reply = await talk.policy.chat([user("a")])
    await talk.policy.chat([user("a"), {**reply.message, "name": "planner"}, user("b")])
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["realigned_turns"] == 0


async def test_a_turn_that_fails_leaves_nothing_on_its_branch_and_takes_no_tokens_of_the_budget(
    renderer: ChatRenderer,
) -> None:
    talk = Talk(renderer, ["Ada", RequestRefused("no"), RequestRefused("no"), "Bob"])
    with pytest.raises(RequestRefused):
        await Talk(renderer, [RequestRefused("no")]).policy.chat([user("a")])
    reply = await talk.policy.chat([user("a")])
    before = talk.rollout.num_tokens
    for question in ("b" * 500, "c"):
        with pytest.raises(RequestRefused):
            await talk.policy.chat([user("a"), reply.message, user(question)])
    assert talk.rollout.num_tokens == before
    assert talk.rollout.messages == [user("a"), said("Ada")]
    await talk.policy.chat([user("a"), reply.message, user("b")])
    (branch,) = talk.rollout.branches
    assert len(branch.completion_spans) == 2
    assert talk.rollout.messages == [user("a"), said("Ada"), user("b"), said("Bob")]
    assert talk.rollout.turns == 4


async def test_a_reply_that_cannot_be_read_leaves_nothing_on_its_branch(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(renderer, ["Ada", "no", "Bob"])
    reply = await talk.policy.chat([user("a")])
    with monkeypatch.context() as broken:
        broken.setattr(renderer, "parse", Mock(side_effect=RecursionError))
        with pytest.raises(RecursionError):
            await talk.policy.chat([user("a"), reply.message, user("b")])
    await talk.policy.chat([user("a"), reply.message, user("b")])
    (branch,) = talk.rollout.branches
    assert len(branch.completion_spans) == 2
    assert talk.rollout.messages == [user("a"), said("Ada"), user("b"), said("Bob")]


async def test_a_first_turn_that_fails_gives_its_place_to_the_next_conversation(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, [RequestRefused("no"), "Ada", RequestRefused("no"), "Bob"])
    with pytest.raises(RequestRefused):
        await talk.policy.chat([user("a")])
    reply = await talk.policy.chat([user("b")], temperature=0.5)
    with pytest.raises(RequestRefused):
        await talk.policy.chat([user("c")])
    await talk.policy.chat([user("a")])
    assert reply.branch == 0
    assert [branch.temperature for branch in talk.rollout.branches] == [0.5, None]
    assert [len(branch.completion_spans) for branch in talk.rollout.branches] == [1, 1]


@pytest.mark.parametrize("by_tokens", [False, True], ids=["messages", "tokens"])
async def test_a_fork_that_fails_leaves_nothing_and_is_counted_once_when_it_is_tried_again(
    renderer: ChatRenderer, by_tokens: bool
) -> None:
    question = user("the quick brown fox " * 20)
    prompt = len(renderer.render([question]))
    talk = Talk(renderer, ["Ada", "Bob", RolloutError("lost"), "Cleo"], max_rollout_tokens=2 * prompt + 150)
    first = await talk.policy.chat([question])
    await talk.policy.chat([question, first.message, user("b")])
    before = talk.rollout.num_tokens
    (branch,) = talk.rollout.branches
    ((_, end), _) = branch.completion_spans
    shared = branch.token_ids[:end].copy()

    async def fork() -> Reply:
        if by_tokens:
            return await talk.policy.continue_tokens(np.concatenate([shared, renderer.render([user("c")])]))
        return await talk.policy.chat([question, first.message, user("c")])

    with pytest.raises(RolloutError):
        await fork()
    assert talk.rollout.num_tokens == before
    assert (await fork()).content == "Cleo"
    assert talk.rollout.branches[1].token_ids[:end].tolist() == shared.tolist()
    assert not talk.rollout.branches[1].loss_mask[:end].any()


@pytest.mark.parametrize("temperature", [None, 0.5], ids=["an earlier reply", "another temperature"])
async def test_tokens_that_fork_a_branch_keep_the_conversation_that_they_begin_with(
    renderer: ChatRenderer, temperature: float | None
) -> None:
    talk = Talk(renderer, ["Ada", "Bob", "Cleo"])
    talk.policy.demonstrate([user("a"), said("well")])
    first = await talk.policy.continue_tokens(renderer.render([user("a")]))
    opening, more = talk.rollout.messages[:1], renderer.render([user("c")])
    shared = talk.rollout.branches[1].token_ids.copy()
    begun = talk.rollout.first_reply
    assert begun is not None
    if temperature is None:
        await talk.policy.continue_tokens(np.concatenate([shared, renderer.render([user("b")])]))
    forked = await talk.policy.continue_tokens(np.concatenate([shared, more]), temperature=temperature)
    assert talk.rollout.messages == [*opening, first.message, user(renderer.text(more.tolist())), forked.message]
    assert talk.rollout.first_reply == msgspec.structs.replace(begun, branch=2)
    assert not talk.rollout.branches[2].loss_mask[: len(shared)].any()


async def test_rewritten_history_starts_a_branch_and_is_counted(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    await talk.policy.chat([user("a")])
    await talk.policy.chat([user("a"), said("Something else"), user("b")])
    assert len(talk.rollout.branches) == 2
    assert talk.rollout.metrics["rewritten_turns"] == 1
    assert "Something else" in talk.prompt(1)


async def test_a_changed_question_starts_a_branch(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    reply = await talk.policy.chat([user("a")])
    await talk.policy.chat([user("A!"), reply.message, user("b")])
    assert len(talk.rollout.branches) == 2


async def test_what_the_agent_does_to_its_messages_does_not_change_what_was_recorded(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    messages = [user("a")]
    reply = await talk.policy.chat(messages)
    reply.message["content"] = "rewritten in place"
    await talk.policy.chat([*messages, reply.message, user("b")])
    assert talk.rollout.metrics["rewritten_turns"] == 1
    assert len(talk.rollout.branches) == 2


async def test_what_a_tool_does_to_its_arguments_does_not_change_what_was_recorded(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    def add(numbers: list[int]) -> str:
        numbers.sort()
        return f"{numbers}"

    talk = Talk(
        renderer_of("hermes"), ['<tool_call>{"name": "add", "arguments": {"numbers": [2, 1]}}</tool_call>', "3"]
    )
    reply = await talk.policy.chat([user("?")], tools=[ADD])
    answers = await answer_tool_calls(reply, {"add": add})
    await talk.policy.chat([user("?"), reply.message, *answers], tools=[ADD])
    (recorded,) = talk.rollout.messages[1]["tool_calls"]
    assert recorded["function"]["arguments"] == {"numbers": [2, 1]}
    assert talk.rollout.messages[2]["content"] == "[1, 2]"
    assert len(talk.rollout.branches) == 1


async def test_two_ways_on_from_one_reply_share_its_tokens_and_train_them_once(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    reply = await talk.policy.chat([user("a")])
    await talk.policy.chat([user("a"), reply.message, user("b")])
    await talk.policy.chat([user("a"), reply.message, user("c")])
    first, second = talk.rollout.branches
    shared = first.completion_spans[0][1]
    assert second.token_ids[:shared].tolist() == first.token_ids[:shared].tolist()
    assert not second.loss_mask[:shared].any()
    assert len(second.completion_spans) == 1


async def test_turns_at_the_same_time_each_get_their_branch(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada", "Bob", "Cleo", "Dan"])
    opening = await talk.policy.chat([user("a")])
    asked = [[user("a"), opening.message, user(question)] for question in ("b", "c", "d")]
    replies = await asyncio.gather(*(talk.policy.chat(messages) for messages in asked))
    assert [reply.content for reply in replies] == ["Bob", "Cleo", "Dan"]
    assert [len(branch.completion_spans) for branch in talk.rollout.branches] == [2, 1, 1]
    for messages, reply in zip(asked, replies, strict=True):
        await talk.policy.chat([*messages, reply.message, user("on")])
    assert [len(branch.completion_spans) for branch in talk.rollout.branches] == [3, 2, 2]


async def test_an_agent_gives_the_tokens_of_a_reply_more_for_a_loss_to_read(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada", "Bob Bob"])
    first = await talk.policy.chat([user("a")])
    second = await talk.policy.chat([user("a"), first.message, user("b")])
    count = second.completion.num_tokens
    talk.policy.set_column(second, "weights", np.arange(count) + 0.5)
    with pytest.raises(ValueError, match=f"has 1 values, and the reply {count} tokens"):
        talk.policy.set_column(second, "weights", [1.0])
    for name in ("teacher_logprobs", "proximal_logprobs", "reference_logprobs"):
        with pytest.raises(ValueError, match=f"column '{name}' is filled by Tailrace itself"):
            talk.policy.set_column(second, name, np.ones(count))
    (branch,) = talk.rollout.branches
    start, end = branch.completion_spans[1]
    weights = branch.columns["weights"]
    assert weights[:start].tolist() == [0.0] * start
    assert weights[start:end].tolist() == [place + 0.5 for place in range(count)]
    other = await talk.policy.chat([user("elsewhere")])
    talk.policy.set_column(other, "weights", np.ones(other.completion.num_tokens))
    assert talk.rollout.branches[1].columns["weights"].sum() == other.completion.num_tokens


@pytest.mark.parametrize("model", ["chatml", "smollm2", "hermes"])
async def test_a_demonstration_is_the_tokens_that_would_have_been_sampled(
    renderer_of: Callable[[str], ChatRenderer], model: str
) -> None:
    renderer = renderer_of(model)
    talk, other = Talk(renderer, ["Ada", "Bob"]), Talk(renderer)
    first = await talk.policy.chat([user("a")])
    messages = [user("a"), first.message, user("b")]
    await talk.policy.chat(messages)
    other.policy.demonstrate([*messages, said("Bob")], weight=0.5)
    (sampled,), (shown,) = talk.rollout.branches, other.rollout.branches
    assert talk.tokenizer.decode(shown.token_ids) == talk.tokenizer.decode(sampled.token_ids)
    assert not shown.loss_mask.any()
    assert (shown.num_completion_tokens, shown.temperature) == (0, 1.0)
    start, end = sampled.completion_spans[1]
    assert shown.columns["cross_entropy_weights"].tolist() == [0.0] * start + [0.5] * (end - start)
    assert shown.num_weighted == end - start
    assert int(shown.token_ids[-1]) in renderer.stop_token_ids


async def test_a_reply_after_a_demonstration_names_its_own_branch(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada", "Bob", "Cleo"])
    replies = [await talk.policy.chat([user("a")])]
    talk.policy.demonstrate([user("b"), said("Bob")])
    replies.append(await talk.policy.chat([user("c")]))
    replies.append(await talk.policy.chat([user("c"), replies[1].message, user("d")]))
    assert [reply.branch for reply in replies] == [0, 2, 2]
    talk.policy.set_column(replies[1], "weights", np.ones(replies[1].completion.num_tokens))
    assert [set(branch.columns) for branch in talk.rollout.branches] == [set(), {"cross_entropy_weights"}, {"weights"}]
    for reply in replies:
        branch = talk.rollout.branches[reply.branch]
        assert branch.token_ids[reply.start_token :][: reply.completion.num_tokens].tolist() == (
            reply.completion.token_ids.tolist()
        )


async def test_a_family_s_renderer_shows_a_demonstration_too(renderer_of: Callable[[str], ChatRenderer]) -> None:
    talk = Talk(renderer_of("qwen3"))
    talk.policy.demonstrate([user("b"), said("Bob")])
    (branch,) = talk.rollout.branches
    shown = branch.columns["cross_entropy_weights"] > 0
    assert talk.tokenizer.decode(branch.token_ids[shown].tolist()).endswith("Bob<|im_end|>")
    assert talk.tokenizer.decode(branch.token_ids[~shown].tolist()).endswith("<|im_start|>assistant\n")


async def test_a_tool_call_is_demonstrated_as_the_template_shows_it(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    talk = Talk(renderer_of("hermes"))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk.policy.demonstrate([user("1+1?"), said("", tool_calls=[call])], tools=[ADD])
    (branch,) = talk.rollout.branches
    weights = branch.columns["cross_entropy_weights"]
    assert '"name": "add", "arguments": {"a": 1}' in talk.tokenizer.decode(branch.token_ids[weights > 0].tolist())


@pytest.mark.parametrize(
    ("limits", "messages", "error", "message"),
    [
        ({"takes_demonstrations": False}, [said("Bob")], SettingsError, "write trainer.loss.cross_entropy"),
        ({"max_model_tokens": 5}, [said("Bob")], ValueError, "tokens is longer than the context of 5 "),
        ({"row_tokens": 5}, [said("Bob")], ValueError, "tokens does not fit a row of scheduling.row_tokens = 5"),
        ({}, [user("Bob")], EnvironmentFailed, "ends with the assistant's message"),
    ],
)
async def test_a_demonstration_that_cannot_be_taken_says_why(
    renderer: ChatRenderer, limits: dict[str, int], messages: list[Message], error: type[Exception], message: str
) -> None:
    talk = Talk(renderer, **limits)
    with pytest.raises(error, match=message):
        talk.policy.demonstrate([user("a"), *messages])
    assert not talk.rollout.branches


async def test_a_demonstration_may_be_longer_than_what_is_sampled(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, max_rollout_tokens=5, row_tokens=500)
    talk.policy.demonstrate([user("a"), said("Bob")])
    assert [branch.num_tokens > 5 for branch in talk.rollout.branches] == [True]


async def test_what_is_demonstrated_takes_nothing_from_the_turns_that_follow(renderer: ChatRenderer) -> None:
    prompt = len(renderer.render([user("a")]))
    talk = Talk(renderer, ["Ada, Bob, Cleo, Ada, Bob"], max_rollout_tokens=prompt + 5)
    talk.policy.demonstrate([user("a"), said("the quick brown fox " * 9)])
    assert (await talk.policy.chat([user("a")])).completion.num_tokens == 5
    with pytest.raises(BudgetExceeded, match=f"its {prompt + 5 + prompt} tokens use up"):
        await talk.policy.chat([user("a")])


async def test_an_evaluation_leaves_demonstrations_out(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, takes_demonstrations=None)  # type: ignore[arg-type]
    talk.policy.demonstrate([user("a"), said("Bob")])
    assert not talk.rollout.branches


async def test_a_turn_that_failed_can_be_tried_again(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada", RequestRefused("no"), "Bob"])
    reply = await talk.policy.chat([user("a")])
    with pytest.raises(RequestRefused):
        await talk.policy.chat([user("a"), reply.message, user("b")])
    await talk.policy.chat([user("a"), reply.message, user("b")])
    assert talk.prompt(2) == talk.prompt(1)


async def test_other_tools_start_another_branch(renderer_of: Callable[[str], ChatRenderer]) -> None:
    talk = Talk(renderer_of("hermes"))
    reply = await talk.policy.chat([user("a")])
    await talk.policy.chat([user("a"), reply.message, user("b")], tools=[ADD])
    assert len(talk.rollout.branches) == 2
    assert '"name": "add"' in talk.prompt(1)


async def test_tools_changed_in_place_are_other_tools(renderer_of: Callable[[str], ChatRenderer]) -> None:
    talk, tools = Talk(renderer_of("hermes"), ["1", "2"]), [deepcopy(ADD)]
    reply = await talk.policy.chat([user("a")], tools=tools)
    tools[0]["parameters"]["properties"]["augend"] = {"type": "integer"}
    await talk.policy.chat([user("a"), reply.message, user("b")], tools=tools)
    assert len(talk.rollout.branches) == 2
    assert "augend" in talk.prompt(1)


@pytest.mark.parametrize("model", ["hermes", "qwen3"])
async def test_tool_calls_are_parsed_and_tool_output_is_context(
    renderer_of: Callable[[str], ChatRenderer], model: str
) -> None:
    call = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    talk = Talk(renderer_of(model), [call, "It is 2."])
    first = await talk.policy.chat([user("1+1?")], tools=[ADD])
    assert [call["function"] for call in first.tool_calls] == [{"name": "add", "arguments": {"a": 1}}]
    assert first.content == "Let me see."
    output: Message = {"role": "tool", "content": "TWO", "tool_call_id": first.tool_calls[0]["id"]}
    last = await talk.policy.chat([user("1+1?"), first.message, output], tools=[ADD])
    assert last.content == "It is 2."
    (branch,) = talk.rollout.branches
    assert "TWO" in talk.prompt(1)
    assert "TWO" not in talk.tokenizer.decode(branch.token_ids[branch.loss_mask].tolist())
    assert talk.rollout.metrics["tool_calls"] == 1
    ((start, end),) = branch.tool_spans
    assert "TWO" in talk.tokenizer.decode(branch.token_ids[start:end].tolist())
    assert not branch.loss_mask[start:end].any()
    assert branch.loss_mask[[start - 1, end]].all()


CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}}}}}\n</tool_call>'


@pytest.mark.parametrize("model", ["hermes", "qwen3"])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "add"',
        "<tool_call>\n7\n</tool_call>",
        CALL.format(f"[{2**64}]"),
        *(CALL.format(number) for number in ("NaN", "[-Infinity]", "1e999")),
        CALL.format(r'"\ud83d"'),
        pytest.param(CALL.format("[" * 200 + "]" * 200), id="deep"),
        pytest.param(CALL.format("[" * 1100), id="deeper than Python reads"),
        pytest.param("<tool_call>" + "[" * 1100 + "</tool_call>", id="deep and no object"),
        pytest.param(CALL.format("9" * 5000), id="more digits than Python reads"),
    ],
)
async def test_a_malformed_tool_call_is_counted_and_stays_text(
    renderer_of: Callable[[str], ChatRenderer], model: str, text: str
) -> None:
    talk = Talk(renderer_of(model), [text], sampling=SamplingParams(max_tokens=8192))
    reply = await talk.policy.chat([user("?")], tools=[ADD])
    assert reply.tool_calls == []
    assert reply.malformed_tool_calls == 1
    assert "tool_calls" not in reply.message
    assert text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip() in reply.content


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("model", ["hermes", "qwen3"])
async def test_calls_of_a_turn_that_offers_no_tools_are_its_text(
    renderer_of: Callable[[str], ChatRenderer], model: str, tools: list[ToolSpec] | None
) -> None:
    """A prompt may ask for calls itself, and is scored by what was written."""
    written = f"So: {CALL.format(1)} or {CALL.format(2)}."
    talk = Talk(renderer_of(model), [written, "2"], sampling=SamplingParams(max_tokens=256))
    reply = await talk.policy.chat([user("1+1?")], tools=tools)
    assert (reply.message, reply.tool_calls) == (said(written), [])
    await talk.policy.chat([user("1+1?"), reply.message, user("and?")], tools=tools)
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["tool_calls"] == 0


async def test_arguments_handed_back_as_a_json_string_are_the_same_call(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    talk = Talk(renderer_of("hermes"), ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "2"])
    reply = await talk.policy.chat([user("?")], tools=[ADD])
    as_openai_does = said("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}])
    await talk.policy.chat([user("?"), as_openai_does, {"role": "tool", "content": "2"}], tools=[ADD])
    assert reply.message["content"] == ""
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["realigned_turns"] == 1


async def test_a_completion_that_ends_for_length_marks_the_rollout_truncated(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada, Bob, Cleo"])
    reply = await talk.policy.chat([user("a")], max_tokens=2)
    assert reply.finish_reason is FinishReason.LENGTH
    assert talk.generate.calls[0].sampling.max_tokens == 2
    assert talk.rollout.truncated


async def test_an_agent_may_lower_the_token_limit_but_never_raise_it(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    await talk.policy.chat([user("a")], max_tokens=1000)
    assert talk.generate.calls[0].sampling.max_tokens == 64
    assert talk.generate.calls[0].sampling.stop_token_ids == renderer.stop_token_ids


async def test_no_turn_beyond_the_cap(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, max_turns=1)
    reply = await talk.policy.chat([user("a")])
    with pytest.raises(BudgetExceeded, match=r"names/train/7.*rollouts.max_turns"):
        await talk.policy.chat([user("a"), reply.message, user("b")])
    assert talk.rollout.turns == 1


async def test_the_last_completion_gets_what_the_rollouts_token_budget_leaves(renderer: ChatRenderer) -> None:
    prompt = len(renderer.render([user("a")]))
    talk = Talk(renderer, ["Ada, Bob, Cleo, Ada, Bob"], max_rollout_tokens=prompt + 5)
    reply = await talk.policy.chat([user("a")])
    assert reply.completion.num_tokens == 5
    with pytest.raises(BudgetExceeded, match="max_rollout_tokens"):
        await talk.policy.chat([user("a"), reply.message, user("b")])
    assert talk.rollout.num_tokens == prompt + 5


async def test_turns_at_the_same_time_are_cut_by_what_others_used_of_the_token_budget_and_not_by_what_they_might(
    renderer: ChatRenderer,
) -> None:
    prompt, reply = len(renderer.render([user("a")])), "Ada, Bob, Cleo, Ada, Bob"
    whole = len(renderer.tokenizer.encode(reply)) + 1
    talk = Talk(renderer, [reply], max_rollout_tokens=2 * prompt + 64 + 5)
    both = await asyncio.gather(talk.policy.chat([user("a")]), talk.policy.chat([user("b")]))
    assert [one.completion.num_tokens for one in both] == [whole, whole]
    assert [call.sampling.max_tokens for call in talk.generate.calls] == [64, 64 + 5 - whole]


async def test_a_turn_waits_where_others_may_take_all_that_is_left_of_the_token_budget(renderer: ChatRenderer) -> None:
    prompt = len(renderer.render([user("a")]))
    talk = Talk(renderer, ["Ada", RolloutError("lost"), "Cleo"], max_rollout_tokens=3 * prompt + 40)
    first, lost, last = await asyncio.gather(
        *(talk.policy.chat([user(question)]) for question in "abc"), return_exceptions=True
    )
    assert isinstance(lost, RolloutError)
    assert [getattr(reply, "content", None) for reply in (first, last)] == ["Ada", "Cleo"]
    assert talk.rollout.num_tokens <= 3 * prompt + 40
    with pytest.raises(BudgetExceeded, match="max_rollout_tokens"):
        await talk.policy.chat([user("the quick brown fox " * 99)])
    assert talk.rollout.turns == 3


async def test_a_turn_that_waits_for_tokens_of_the_budget_can_be_cancelled_and_ends_with_its_rollout(
    renderer: ChatRenderer,
) -> None:
    prompt = len(renderer.render([user("a")]))
    talk = Talk(renderer, max_rollout_tokens=prompt + 64)
    talk.generate.delay = lambda: 60.0
    turns = [asyncio.create_task(talk.policy.chat([user(question)])) for question in "abc"]
    await asyncio.sleep(0)
    turns[1].cancel()
    await asyncio.wait({turns[1]}, timeout=5)
    assert (turns[1].cancelled(), turns[2].done()) == (True, False)
    talk.policy.close()
    await asyncio.wait(turns, timeout=5)
    assert all(turn.cancelled() for turn in turns)
    assert talk.rollout.turns == 1


async def test_a_prompt_longer_than_the_models_context_names_both_lengths(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, max_model_tokens=16)
    with pytest.raises(BudgetExceeded, match=r"a prompt of \d\d+ tokens leaves no room in the context of 16 \(the l"):
        await talk.policy.chat([user("the quick brown fox " * 9)])
    assert talk.generate.calls == []


async def test_each_turn_of_a_seeded_rollout_has_a_seed_of_its_own(renderer: ChatRenderer) -> None:
    async def seeds() -> list[int | None]:
        talk = Talk(renderer, sampling=SamplingParams(seed=5))
        reply = await talk.policy.chat([user("a")])
        await talk.policy.chat([user("a"), reply.message, user("b")])
        return [call.sampling.seed for call in talk.generate.calls]

    first = await seeds()
    assert first == await seeds()
    assert len(set(first)) == 2
    assert None not in first


async def test_rollouts_whose_agents_ask_for_one_seed_differ_all_the_same(renderer: ChatRenderer) -> None:
    async def seeds(rollout_id: str) -> list[int | None]:
        talk = Talk(renderer, rollout_id=rollout_id)
        for _ in range(2):
            await talk.policy.chat([user("a")], seed=7)
        return [call.sampling.seed for call in talk.generate.calls]

    first, second = await seeds("g7.0.0"), await seeds("g7.1.0")
    assert first == await seeds("g7.0.0")
    assert len({*first, *second}) == 4


async def test_an_agents_seed_gives_a_seeded_rollout_the_same_draws_in_each_evaluation(renderer: ChatRenderer) -> None:
    async def seeds(rollout_id: str, own: int) -> list[int | None]:
        talk = Talk(renderer, rollout_id=rollout_id, sampling=SamplingParams(seed=own))
        for _ in range(2):
            await talk.policy.chat([user("a")], seed=7)
        return [call.sampling.seed for call in talk.generate.calls]

    first, other = await seeds("eval-10/own/eval/3#3.0", 3), await seeds("eval-10/own/eval/4#4.0", 4)
    assert first == await seeds("eval-20/own/eval/3#3.0", 3)
    assert len({*first, *other}) == 4


async def test_a_system_prompt_from_the_settings_replaces_the_conversations_own(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, system_prompt="Be brief.")
    reply = await talk.policy.chat([{"role": "system", "content": "Be long."}, user("a")])
    await talk.policy.chat([{"role": "system", "content": "Be long."}, user("a"), reply.message, user("b")])
    assert talk.prompt(0).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "Be long." not in talk.prompt(1)
    assert len(talk.rollout.branches) == 1


async def test_a_conversation_that_the_template_refuses_says_so(renderer_of: Callable[[str], ChatRenderer]) -> None:
    talk = Talk(renderer_of("strict"))
    with pytest.raises(EnvironmentFailed, match="refuses this conversation: roles must alternate"):
        await talk.policy.chat([user("a"), user("b")])


async def test_an_empty_conversation_is_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(EnvironmentFailed, match="conversation is empty"):
        await Talk(renderer).policy.chat([])


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORTED])
async def test_a_completion_that_did_not_finish_costs_the_rollout(renderer: ChatRenderer, reason: FinishReason) -> None:
    talk = Talk(renderer, [Sampled([], reason)])
    with pytest.raises(RolloutError, match=f"generation ended as {reason}"):
        await talk.policy.chat([user("a")])


async def test_a_turn_at_another_temperature_begins_a_branch_whose_past_bears_no_loss(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada", "Leo", "Max"])
    first = await talk.policy.chat([user("a")])
    second = await talk.policy.chat([user("a"), first.message, user("b")], temperature=0.5)
    await talk.policy.chat([user("a"), first.message, user("b"), second.message, user("c")], temperature=0.5)
    assert [call.sampling.temperature for call in talk.generate.calls] == [1.0, 0.5, 0.5]
    assert [branch.temperature for branch in talk.rollout.branches] == [None, 0.5]
    plain, cooler = talk.rollout.branches
    shared = plain.num_tokens
    assert cooler.token_ids[:shared].tolist() == plain.token_ids.tolist()
    assert not cooler.loss_mask[:shared].any()
    sampled = sample_group(Group(GroupId("g7"), talk.rollout.task, [talk.rollout], [1.0]), oldest_version=0)
    assert [sample.temperature for sample in sampled.samples] == [1.0, 0.5]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, -1.0, float("nan")])
async def test_a_temperature_that_cannot_be_trained_on_is_refused(renderer: ChatRenderer, temperature: float) -> None:
    with pytest.raises(ValueError, match=r"sampled at a temperature of 0.01 or above"):
        await Talk(renderer).policy.chat([user("a")], temperature=temperature)


async def test_numbers_may_be_numpys(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, ["Ada", "Leo"])
    reply = await talk.policy.chat(
        [user("a")], max_tokens=np.int64(7), temperature=np.float32(0.5), seed=np.int64(3), stop=np.array(["x", "y"])
    )
    tokens = np.concatenate([reply.prompt_token_ids, reply.completion.token_ids, [1]]).astype(np.int64)
    await talk.policy.continue_tokens(tokens, max_tokens=np.uint8(5), stop_token_ids=np.array([2, 3]))
    first, second = talk.generate.calls
    assert (first.sampling.max_tokens, first.sampling.temperature) == (7, 0.5)
    assert (second.sampling.max_tokens, second.sampling.stop_token_ids) == (5, (2, 3))
    for call in talk.generate.calls:
        (received,) = unpack_calls(encode(GenerateCall(call_id=0, request=call)))
        assert received.request.sampling == call.sampling


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"max_tokens": 100 / 2}, r"chat\(max_tokens=50.0\) takes whole numbers: 100 // 2 is one"),
        ({"max_tokens": True}, r"chat\(max_tokens=True\) takes whole numbers"),
        ({"max_tokens": "64"}, r"chat\(max_tokens='64'\) takes whole numbers"),
        ({"max_tokens": np.int64(0)}, r"chat\(max_tokens=0\) asks for no token"),
        ({"temperature": "0.5"}, r"chat\(temperature='0.5'\) takes a number"),
        ({"temperature": True}, r"chat\(temperature=True\) takes a number"),
        ({"temperature": float("inf")}, r"0.01 or above, and a finite one"),
        ({"seed": 0.5}, r"chat\(seed=0.5\) takes whole numbers"),
        ({"stop": [7]}, r"chat\(stop=\[7\]\) takes a string, or several"),
        ({"stop": b"x"}, r"chat\(stop=b'x'\) takes a string, or several"),
    ],
)
async def test_what_no_turn_can_have_is_refused_before_it_costs_one(
    renderer: ChatRenderer, asked: dict[str, Any], error: str
) -> None:
    talk = Talk(renderer)
    with pytest.raises((TypeError, ValueError), match=error):
        await talk.policy.chat([user("a")], **asked)
    with pytest.raises((TypeError, ValueError), match=error):
        await talk.policy.continue_tokens(np.array([1, 2], np.int32), **asked)
    assert (talk.rollout.turns, talk.generate.calls) == (0, [])


@pytest.mark.parametrize(
    ("token_ids", "stop_token_ids", "error"),
    [
        ([0.5, 1.0], None, r"token_ids\) takes whole numbers, \[num_tokens\]; it was given float64 \[2\]"),
        ([[1, 2]], None, r"it was given int64 \[1, 2\]"),
        ([1, 2**31], None, r"token_ids\) holds numbers that no token has"),
        ([1, 2], (0.5,), r"stop_token_ids=0.5\) takes whole numbers"),
        ([1, 2], (2**31,), r"stop_token_ids\) holds 2147483648"),
    ],
)
async def test_what_no_token_has_as_its_id_is_refused(
    renderer: ChatRenderer, token_ids: Any, stop_token_ids: Any, error: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        await Talk(renderer).policy.continue_tokens(token_ids, stop_token_ids=stop_token_ids)


async def test_a_greedy_evaluation_stays_greedy(renderer: ChatRenderer) -> None:
    talk = Talk(renderer, sampling=SamplingParams(temperature=0.0, max_tokens=64))
    await talk.policy.chat([user("a")], temperature=0.7)
    assert talk.generate.calls[0].sampling.temperature == 0.0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("stop", ["</answer>", "\n", "42</"])
async def test_a_reply_ends_with_a_stop_string_and_the_conversation_goes_on(
    renderer: ChatRenderer, stop: str, is_streamed: bool
) -> None:
    text = "<answer>\n42</answer> and more\n"
    talk = Talk(renderer, [text, "fine"])
    talk.generate.chunk_tokens = 3 if is_streamed else None
    reply = await talk.policy.chat([user("a")], stop=["###", stop])
    assert (reply.content, reply.finish_reason) == (text[: text.index(stop)], FinishReason.STOP)
    kept = renderer.tokenizer.decode(reply.completion.token_ids.tolist())
    assert stop in kept
    assert stop not in renderer.tokenizer.decode(reply.completion.token_ids[:-1].tolist())
    assert talk.generate.streamed < len(text) if is_streamed else True
    await talk.policy.chat([user("a"), reply.message, user("b")])
    (branch,) = talk.rollout.branches
    assert talk.prompt(1).startswith(talk.prompt(0) + kept)
    assert branch.num_completion_tokens == reply.completion.num_tokens + len(renderer.tokenizer.encode("fine")) + 1


async def test_without_a_stop_string_in_it_a_reply_is_whole(renderer: ChatRenderer) -> None:
    reply = await Talk(renderer, ["Ada"]).policy.chat([user("a")], stop=["###"])
    assert (reply.content, reply.completion.num_tokens) == ("Ada", len(renderer.tokenizer.encode("Ada")) + 1)


async def test_where_routed_experts_are_recorded_those_of_the_reply_up_to_its_stop_string_are_kept(
    renderer: ChatRenderer,
) -> None:
    talk = Talk(renderer, ["Ada</answer> and more"], records_experts=True)
    talk.generate.chunk_tokens = 1  # nobody listens, or the request would be aborted
    talk.generate.records_experts = True
    reply = await talk.policy.chat([user("a")], stop=["</answer>"])
    (branch,) = talk.rollout.branches
    (chunk,) = branch.payload_chunks
    assert (reply.content, talk.generate.streamed) == ("Ada", 0)
    assert (chunk.start, chunk.end, chunk.ref is None) == (0, branch.num_tokens, False)
    assert talk.rollout.metrics["cut_tokens"] == len(renderer.tokenizer.encode(" and more")) + 1


async def test_an_empty_stop_string_is_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(ValueError, match="an empty string"):
        await Talk(renderer).policy.chat([user("a")], stop=["x", ""])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hello", r"a conversation is a list of messages, .* this one is a str"),
        (user("hello"), r"a conversation is a list of messages, .* this one is a dict"),
        ([user("hello"), "again"], r"a message is a dict, .* message 1 of the conversation is a str"),
    ],
)
async def test_a_conversation_is_a_list_of_messages(renderer: ChatRenderer, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        await Talk(renderer).policy.chat(given)


async def test_a_reply_in_place_of_its_message_is_told(renderer: ChatRenderer) -> None:
    policy = Talk(renderer).policy
    conversation: list[Any] = [user("hello")]
    conversation += [await policy.chat(conversation), user("again")]
    with pytest.raises(TypeError, match=r"message 1 of the conversation is a Reply; append .* `reply\.message`"):
        await policy.chat(conversation)


async def test_content_may_be_text_parts_and_nothing_else(renderer: ChatRenderer) -> None:
    talk = Talk(renderer)
    parts: Any = [{"type": "text", "text": "who "}, {"type": "text", "text": "is it?"}]
    await talk.policy.chat([{"role": "user", "content": parts}])
    assert talk.rollout.messages[0] == user("who is it?")
    image: Any = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(ValueError, match="a part of type 'image_url': the policy reads text only"):
        await talk.policy.chat([{"role": "user", "content": image}])
