from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tailrace.environments import EnvironmentSpec, Policy
from tailrace.errors import BudgetExceeded, EngineFailed, RolloutError
from tailrace.gateway import Gateway
from tailrace.records import FinishReason, GroupId, RolloutId, SamplingParams, Task
from tailrace.rollouts import ChatRenderer, Rollouter, RolloutSettings
from tests.support.loaded import loaded
from tests.support.scripted_generate import Sampled, ScriptedGenerate
from tests.support.served_policies import Served, served, user

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        "strict": True,
    },
}
CALL = {"type": "function", "id": "c", "function": {"name": "add", "arguments": "{}"}}
CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
)


def client_of(talk: Served, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=talk.endpoint.openai_url, api_key=talk.endpoint.key, **options)


async def post(talk: Served, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(talk.endpoint.root_url + path, json=body, headers={**talk.headers, **headers})


def asks(content: str = "who?", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [user(content)], **more}


async def test_what_openais_client_is_told_is_what_was_sampled_and_recorded(renderer: ChatRenderer) -> None:
    async with served(renderer, [" Ada\n", "Bob"]) as talk, client_of(talk) as client:
        messages: list[Any] = [user("who?")]
        first = await client.chat.completions.create(model="any", messages=messages, logprobs=True)
        messages += [first.choices[0].message, user("and?")]
        second = await client.chat.completions.create(model="any", messages=messages)
    choice, branch = first.choices[0], talk.rollout.branches[0]
    start, end = branch.completion_spans[0]
    assert choice.message.content == " Ada\n"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(branch.logprobs[start:end].tolist())
    assert "".join(one.token for one in choice.logprobs.content).startswith(" Ada\n")
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (start, end - start)
    assert second.choices[0].message.content == "Bob"
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics.get("rewritten_turns", 0) == 0
    talk.assert_recorded_as_sampled()


@pytest.mark.parametrize("model", ["chatml", "qwen3"])
async def test_what_follows_a_reply_is_a_further_one(renderer_of: Callable[[str], ChatRenderer], model: str) -> None:
    async with served(renderer_of(model), ["Ada", "Bob"]) as talk, client_of(talk) as client:
        messages: list[Any] = [user("who?")]
        first = await client.chat.completions.create(model="any", messages=messages)
        messages.append(first.choices[0].message)
        second = await client.chat.completions.create(model="any", messages=messages)
    assert second.choices[0].message.content == "Bob"
    assert talk.prompt(1).endswith("Ada<|im_end|>\n<|im_start|>assistant\n")
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics.get("rewritten_turns", 0) == 0
    talk.assert_recorded_as_sampled()


async def test_the_bytes_of_a_token_that_is_part_of_a_character_are_not_told(renderer: ChatRenderer) -> None:
    async with served(renderer, ["A😀"]) as talk:
        answer = (await post(talk, asks(logprobs=True))).json()
    told = [(one["token"], one["bytes"]) for one in answer["choices"][0]["logprobs"]["content"]]
    assert answer["choices"][0]["message"]["content"] == "A😀"
    assert (told[0], told[-1]) == (("A", [65]), ("<|im_end|>", list(b"<|im_end|>")))
    assert [told_bytes for _, told_bytes in told[1:-1]] == [None] * 4


async def test_parallel_tool_calls_go_out_and_their_results_come_back_on_one_branch(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    async with served(renderer_of("hermes"), [CALLS, CALLS, "7"]) as talk, client_of(talk) as client:
        messages: list[Any] = [user("1 + 2, 3 + 4?")]
        seen: list[str] = []
        for _ in range(2):
            reply = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
            choice = reply.choices[0]
            assert choice.finish_reason == "tool_calls"
            calls: Any = choice.message.tool_calls
            assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
            messages.append(choice.message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
            seen += [call.id for call in calls]
        last = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
    assert len(set(seen)) == 4
    assert last.choices[0].message.content == "7"
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["realigned_turns"] == 0
    talk.assert_recorded_as_sampled()


async def test_calls_with_numbers_that_json_has_not_are_told_as_the_text_that_is_recorded(
    renderer_of: Callable[[str], ChatRenderer],
) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": NaN, "b": 1e999}}</tool_call>'
    replies = [CALLS + call, "7"]
    async with served(renderer_of("hermes"), replies, max_tokens=256) as talk, client_of(talk) as client:
        messages: list[Any] = [user("?")]
        first: Any = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
        told = first.choices[0].message
        messages.append(told)
        messages += [{"role": "tool", "tool_call_id": one.id, "content": "5"} for one in told.tool_calls]
        await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
    assert told.content == talk.rollout.messages[1]["content"] == call
    assert [json.loads(one.function.arguments) for one in told.tool_calls] == [
        one["function"]["arguments"] for one in talk.rollout.messages[1]["tool_calls"]
    ]
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["malformed_tool_calls"] == 1
    talk.assert_recorded_as_sampled()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("more", [{}, {"tools": [ADD], "tool_choice": "none"}])
@pytest.mark.parametrize("model", ["hermes", "qwen3"])
async def test_calls_that_no_tool_was_offered_for_are_text_that_comes_back_as_sampled(
    renderer_of: Callable[[str], ChatRenderer], model: str, more: dict[str, Any], streams: bool
) -> None:
    """For agents that ask for calls in their prompt, and read them themselves."""
    said = f"So: {CALLS} Then."
    replies = [f"<think>hm</think>{said}", "4"]
    async with served(renderer_of(model), replies, max_tokens=256) as talk, client_of(talk) as client:
        asked: dict[str, Any] = {"model": "any", "messages": [user("1 + 2?")], **more}
        if streams:
            async with client.chat.completions.stream(**asked) as stream:
                first: Any = await stream.get_final_completion()
        else:
            first = await client.chat.completions.create(**asked)
        choice = first.choices[0]
        asked["messages"] += [{"role": "assistant", "content": choice.message.content}, user("It is 3.")]
        await client.chat.completions.create(**asked)
    assert (choice.message.content, choice.message.reasoning_content) == (said, "hm")
    assert (choice.message.tool_calls or [], choice.finish_reason) == ([], "stop")
    assert len(talk.rollout.branches) == 1
    assert talk.rollout.metrics["malformed_tool_calls"] == talk.rollout.metrics["tool_calls"] == 0
    talk.assert_recorded_as_sampled()


async def test_what_litellm_adds_to_messages_changes_nothing(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada", "Bob"]) as talk:
        reply = (await post(talk, asks())).json()["choices"][0]["message"]
        reply |= {
            "provider_specific_fields": {"refusal": None},
            "annotations": [{"type": "url_citation"}],
            "thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "s"}],
        }
        more = {**user("and?"), "cache_control": {"type": "ephemeral"}}
        second = await post(talk, {"model": "m", "messages": [user("who?"), reply, more]})
    assert second.status_code == 200, second.text
    assert len(talk.rollout.branches) == 1


async def test_names_of_messages_reach_the_policy(renderer_of: Callable[[str], ChatRenderer]) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Add.", "name": "rules"},
        {"role": "user", "content": "1 + 2?", "name": "Max"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": "planner"},
        {"role": "tool", "tool_call_id": "c", "content": "3", "name": "add"},
        {"role": "user", "content": "So?", "name": ""},
    ]
    async with served(renderer_of("hermes"), ["3", "Yes."]) as talk:
        reply = (await post(talk, {"model": "m", "messages": messages, "tools": [ADD]})).json()["choices"][0]["message"]
        messages += [{**reply, "name": "planner"}, {**user("Really?"), "name": "Eva"}]
        second = await post(talk, {"model": "m", "messages": messages, "tools": [ADD]})
        refused = await post(talk, {"model": "m", "messages": [{**user("?"), "name": 5}]})
    assert second.status_code == 200, second.text
    names = [message.get("name") for message in talk.rollout.messages]
    assert talk.rollout.metrics["realigned_turns"] == 0
    assert names == ["rules", "Max", "planner", None, None, None, "Eva", None]
    assert len(talk.rollout.branches) == 1
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].name")


async def test_tokens_are_streamed_as_they_are_sampled(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada and Bob"], stepwise=True) as talk, client_of(talk) as client:
        stream = await _started(talk, client)
        heard = ""
        for _ in range(100):
            chunk = await anext(stream)
            heard += chunk.choices[0].delta.content or ""
            if chunk.choices[0].delta.content:
                break
            talk.generate.allow(1)
        assert 0 < len(heard) < len("Ada and Bob")
        assert not talk.generate.completions
        talk.generate.allow(64)
        chunks = [chunk async for chunk in stream]
    heard += "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert heard == "Ada and Bob"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == talk.generate.completions[0].num_tokens
    talk.assert_recorded_as_sampled()


async def _started(talk: Served, client: openai.AsyncOpenAI, **more: Any) -> Any:
    """A stream whose first token was sampled."""
    talk.generate.allow(1)
    options: Any = {"include_usage": True}
    return await client.chat.completions.create(**asks(**more), stream=True, stream_options=options)


@pytest.mark.parametrize("before", ["", "\n"])
async def test_a_stream_with_tools_or_reasoning_says_in_the_end_what_the_reply_says(
    renderer_of: Callable[[str], ChatRenderer], before: str
) -> None:
    replies = [f"{before}<think>hm</think>So: {CALLS}", f"{before}<think>hm</think>Three"]
    async with served(renderer_of("hermes"), replies) as talk, client_of(talk) as client:
        async with client.chat.completions.stream(**asks(tools=[ADD])) as stream:
            whole = await stream.get_final_completion()
        choice: Any = whole.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "So:"
        assert choice.message.reasoning_content == "hm"
        assert [json.loads(call.function.arguments)["a"] for call in choice.message.tool_calls] == [1, 3]
        plain = [chunk async for chunk in await client.chat.completions.create(**asks("b"), stream=True)]
    deltas: list[Any] = [chunk.choices[0].delta for chunk in plain]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "Three"


async def test_a_stream_is_kept_alive_while_nothing_is_sampled(renderer: ChatRenderer) -> None:
    async with (
        served(renderer, stepwise=True, settings={"keep_alive_s": 0.05}) as talk,
        httpx.AsyncClient(timeout=30, base_url=talk.endpoint.openai_url, headers=talk.headers) as client,
        client.stream("POST", "/chat/completions", json=asks(stream=True)) as response,
    ):
        lines = response.aiter_lines()
        while not (await anext(lines)).startswith(": nothing sampled yet"):
            pass
        talk.generate.allow(64)
        assert [line async for line in lines][-2] == "data: [DONE]"


async def test_a_stream_ends_before_a_stop_string(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada and Bob and Cleo"]) as talk, client_of(talk) as client:
        stream = await client.chat.completions.create(**asks(stop=["Bob a", "nd Cl"]), stream=True)
        heard = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert heard == talk.rollout.messages[-1]["content"] == "Ada and "


async def test_a_client_that_leaves_cancels_its_request_and_the_rollout_goes_on(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada", "Bob"], stepwise=True) as talk:
        for streams in (False, True):
            talk.generate.allow(1)
            begun, cancelled = talk.generate.begun, talk.generate.cancelled
            asking = asyncio.create_task(post(talk, asks(stream=streams)))
            await talk.generate.until(begun=begun + 1)
            asking.cancel()
            await talk.generate.until(cancelled=cancelled + 1)
        talk.generate.allow(64)
        answer = (await post(talk, asks())).json()
    assert answer["choices"][0]["message"]["content"] == "Bob"
    assert talk.rollout.turns == 3
    talk.assert_recorded_as_sampled()


@pytest.mark.parametrize("given_up", ["and?", "and who else?"])
@pytest.mark.parametrize("history", [0, 1])
async def test_whoever_asks_again_after_a_cancelled_turn_goes_on_with_the_same_branch(
    renderer: ChatRenderer, history: int, given_up: str
) -> None:
    replies = ["Ada", "", "Bob"][1 - history :]
    async with served(renderer, replies, stepwise=True) as talk:
        messages: list[Any] = []
        for _ in range(history):
            messages.append(user("who?"))
            talk.generate.allow(len(renderer.tokenizer.encode("Ada")) + 1)
            first = await post(talk, {"model": "m", "messages": messages})
            messages.append(first.json()["choices"][0]["message"])
        asking = asyncio.create_task(post(talk, {"model": "m", "messages": [*messages, user(given_up)]}))
        await talk.generate.until(begun=history + 1)
        asking.cancel()
        await talk.generate.until(cancelled=1)
        talk.generate.allow(64)
        answer = (await post(talk, {"model": "m", "messages": [*messages, user("and?")]})).json()
    assert answer["choices"][0]["message"]["content"] == "Bob"
    (branch,) = talk.rollout.branches
    assert len(branch.completion_spans) == history + 1
    assert renderer.tokenizer.decode(branch.token_ids.tolist()).count("and") == 1
    assert len({call.session_id for call in talk.generate.scripted.calls}) == 1
    assert talk.rollout.metrics.get("rewritten_turns", 0) == 0
    talk.assert_recorded_as_sampled()


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "headers",
    [
        ({"idempotency-key": "k"}, {"idempotency-key": "k"}),
        ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}),
    ],
)
async def test_a_retry_gets_the_first_answer_and_samples_nothing(
    renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
    headers: tuple[dict[str, str], dict[str, str]],
    streams: bool,
    is_over: bool,
) -> None:
    monkeypatch.setattr("tailrace.gateway.turns.SPARE_S", 60.0)  # however slow the machine is
    async with served(renderer, ["Ada", "Bob"], stepwise=True) as talk:
        asking = asyncio.create_task(post(talk, asks(stream=streams), **headers[0]))
        await talk.generate.until(begun=1)
        if is_over:
            talk.generate.allow(64)
            await asking
        else:
            asking.cancel()
        retried = asyncio.create_task(post(talk, asks(stream=streams), **headers[1]))
        talk.generate.allow(64)
        answer = (await retried).text
    assert '"content":"A' in answer
    assert talk.generate.begun == talk.rollout.turns == 1
    talk.assert_recorded_as_sampled()


FIRST, AGAIN = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


async def test_a_retry_of_one_of_several_equal_requests_is_not_given_the_answer_of_another(
    renderer: ChatRenderer,
) -> None:
    async with served(renderer, ["Ada", RolloutError("it is lost"), "Bob"]) as talk:
        answers = [await post(talk, asks(), **headers) for headers in (FIRST, FIRST, AGAIN)]
    assert [answer.status_code for answer in answers] == [200, 503, 200]
    assert answers[-1].json()["choices"][0]["message"]["content"] == "Bob"


async def test_a_retry_of_the_one_of_several_equal_requests_whose_connection_broke_gets_its_answer(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.gateway.turns.SPARE_S", 60.0)  # however slow the machine is
    async with served(renderer, ["Ada", "Bob"], stepwise=True) as talk:
        talk.generate.allow(len(renderer.tokenizer.encode("Ada")) + 1)
        await post(talk, asks(), **FIRST)
        broken = asyncio.create_task(post(talk, asks(), **FIRST))
        await talk.generate.until(begun=2)
        broken.cancel()
        async with asyncio.timeout(30):
            while not talk.gateway.tally.requests["chat", 0]:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.01)
        talk.generate.allow(64)
        answer = (await post(talk, asks(), **AGAIN)).json()
    assert answer["choices"][0]["message"]["content"] == "Bob"
    assert talk.generate.begun == 2


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_retry_finds_its_turn_however_many_were_asked_for_since(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    monkeypatch.setattr("tailrace.gateway.turns.SPARE_S", 60.0)  # however slow the machine is
    async with served(renderer, stepwise=True, max_turns=10) as talk:
        keys = [{"idempotency-key": str(number)} if keyed else {} for number in range(9)]
        asking = []
        for number, key in enumerate(keys):
            asking.append(asyncio.create_task(post(talk, asks(f"{number}?"), **FIRST, **key)))
            await talk.generate.until(begun=number + 1)
        asking[0].cancel()
        asking.append(asyncio.create_task(post(talk, asks("0?"), **AGAIN, **keys[0])))
        async with asyncio.timeout(30):
            while not talk.gateway.tally.retries and talk.generate.begun == 9:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.01)
        talk.generate.allow(99)
        answers = await asyncio.gather(*asking[1:])
    assert [answer.status_code for answer in answers] == [200] * 9
    assert talk.generate.begun == talk.rollout.turns == 9


async def test_the_same_request_twice_is_two_turns_unless_it_is_a_retry(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada", "Bob"]) as talk, client_of(talk) as client:
        said = [(await client.chat.completions.create(**asks())).choices[0].message.content for _ in range(2)]
        clash = await post(talk, asks(), **{"idempotency-key": "k"})
        other = await post(talk, asks("b"), **{"idempotency-key": "k"})
    assert said == ["Ada", "Bob"]
    assert (clash.status_code, other.status_code) == (200, 422)


async def test_without_budget_a_reply_ends_for_its_length_and_whoever_asks_on_is_refused(
    renderer: ChatRenderer,
) -> None:
    async with served(renderer, max_turns=1) as talk, client_of(talk) as client:
        replies = [await client.chat.completions.create(**asks()) for _ in range(2)]
        assert [reply.choices[0].finish_reason for reply in replies] == ["stop", "length"]
        assert replies[1].choices[0].message.content == ""
        with pytest.raises(openai.RateLimitError, match=r"all of its 1 turns are used \(rollouts.max_turns\)"):
            await client.chat.completions.create(**asks())
    assert talk.gateway.tally.requests == {("chat", 200): 2, ("chat", 429): 1}


@pytest.mark.parametrize("then", ["ends", "fails", "asks less"])
async def test_an_agent_fails_for_want_of_room_only_where_it_never_had_a_reply(
    renderer: ChatRenderer, then: str
) -> None:
    """Whatever it made of the empty one."""

    async def agent(task: Task, policy: Policy) -> float:
        try:
            async with policy.endpoint() as endpoint, httpx.AsyncClient(base_url=endpoint.path_url) as client:
                answer = (await client.post("/v1/chat/completions", json=asks("the quick brown fox " * 40))).json()
                assert answer["choices"][0]["finish_reason"] == "length"
                if then != "ends":
                    raise ValueError("an empty reply")
        except ValueError:
            if then == "fails":
                raise
        if then == "asks less":
            await policy.chat([user("a")])
        return 1.0

    spec = EnvironmentSpec(name="own", agent=agent, train_tasks=[{}])
    settings = RolloutSettings(max_tokens=16, max_rollout_tokens=100)
    generate = ScriptedGenerate(renderer.tokenizer, ["Ada"])
    async with (
        Gateway() as gateway,
        Rollouter(settings, loaded(spec), renderer=renderer, generate=generate, endpoints=gateway) as rollouter,
    ):
        running = rollouter.run(spec.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))
        if then == "asks less":
            assert (await running).messages[-1]["content"] == "Ada"
            return
        with pytest.raises(BudgetExceeded, match=r"its \d+ tokens use up rollouts.max_rollout_tokens = 100") as raised:
            await running
    assert ("ValueError: an empty reply" in str(raised.value)) == (then == "fails")


async def test_a_prompt_that_fills_the_context_takes_the_soft_end_from_no_later_one(renderer: ChatRenderer) -> None:
    long = "the quick brown fox " * 40
    async with served(renderer, max_model_tokens=100) as talk:
        answers = [await post(talk, asks(content)) for content in ("who?", long, "in short?", f"other {long}", long)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]
    ends = [answer.json()["choices"][0]["finish_reason"] for answer in answers[:4]]
    assert ends == ["stop", "length", "stop", "length"]
    assert "leaves no room in the context of 100 (the least of generator.max_cache_tokens" in answers[4].text


async def test_a_completion_that_is_cut_ends_for_its_length(renderer: ChatRenderer) -> None:
    cut = Sampled(renderer.tokenizer.encode("Ada and Bob"), FinishReason.LENGTH)
    async with served(renderer, [cut]) as talk, client_of(talk) as client:
        reply = await client.chat.completions.create(**asks(max_tokens=3))
    assert reply.choices[0].finish_reason == "length"
    assert talk.generate.scripted.calls[0].sampling.max_tokens == 3


async def test_system_messages_that_change_every_turn_may_keep_the_branch(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada", "Bob"], settings={"system_messages": "first"}) as talk:
        messages: list[Any] = [{"role": "developer", "content": "It is 9:00."}, user("who?")]
        reply = (await post(talk, {"model": "m", "messages": messages})).json()["choices"][0]["message"]
        messages = [{"role": "system", "content": "It is 9:01."}, user("who?"), reply, user("and?")]
        assert (await post(talk, {"model": "m", "messages": messages})).status_code == 200
    assert len(talk.rollout.branches) == 1
    assert "9:01" not in talk.prompt(1)


async def test_agents_that_ask_the_same_keep_their_own_system_messages(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada", "Bob", "Cleo", "Dan"], settings={"system_messages": "first"}) as talk:
        talks: list[list[Any]] = []
        for name in ("planner", "critic"):
            talks.append([{"role": "system", "content": f"You are the {name}, at 9:00."}, user("who?")])
            talks[-1].append((await post(talk, {"model": "m", "messages": talks[-1]})).json()["choices"][0]["message"])
        for name, (_, *messages) in zip(("planner", "critic"), talks, strict=True):
            later = {"role": "system", "content": f"You are the {name}, at 9:01."}
            await post(talk, {"model": "m", "messages": [later, *messages, user("and?")]})
    assert [f"the {name}, at 9:00" in talk.prompt(call) for call, name in enumerate(("planner", "critic") * 2)] == [
        True
    ] * 4
    assert len(talk.rollout.branches) == 2


async def test_agents_that_are_answered_the_same_keep_their_own_system_messages(renderer: ChatRenderer) -> None:
    async with served(renderer, ["Ada"], settings={"system_messages": "first"}) as talk:
        talks: list[list[Any]] = []
        for name in ("planner", "critic"):
            talks.append([{"role": "system", "content": f"You are the {name}."}, user("who?")])
            talks[-1].append((await post(talk, {"model": "m", "messages": talks[-1]})).json()["choices"][0]["message"])
        for messages in talks:
            await post(talk, {"model": "m", "messages": [*messages, user("and?")]})
    assert ["planner" in talk.prompt(call) for call in range(4)] == [True, False, True, False]
    assert len(talk.rollout.branches) == 2


async def test_the_key_may_be_in_the_path(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk, httpx.AsyncClient() as client:
        answer = await client.post(f"{talk.endpoint.path_url}/v1/chat/completions", json=asks())
    assert answer.json()["choices"][0]["message"]["content"] == "Ada"


async def test_vllms_way_to_keep_all_tokens_is_what_a_run_that_keeps_them_samples(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk:
        answer = await post(talk, asks(top_k=-1, min_p=0.0))
    assert answer.status_code == 200, answer.text
    assert talk.generate.scripted.calls[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("own", "taken", "refused"),
    [({"top_p": 0.95}, (-1, 0), 20), ({"top_p": 0.95, "top_k": 20}, (20,), 0), ({"top_k": 4096}, (4096,), 0)],
)
async def test_a_runs_own_top_k_may_be_asked_for_and_no_other(
    renderer: ChatRenderer, own: dict[str, Any], taken: tuple[int, ...], refused: int
) -> None:
    settings = RolloutSettings.model_validate(own)
    async with served(renderer, sampling=settings.training_sampling()) as talk:
        answers = [await post(talk, asks(top_k=top_k)) for top_k in taken]
        other = await post(talk, asks(top_k=refused))
    assert [answer.status_code for answer in answers] == [200] * len(taken), answers[0].text
    assert other.status_code == 400
    assert f"the run's own, {settings.top_k};" in other.json()["error"]["message"]


async def test_a_seed_and_a_temperature_are_the_requests_own_or_the_runs(renderer: ChatRenderer) -> None:
    for whose, temperature in (("client", 0.5), ("run", 1.0)):
        async with served(renderer, settings={"sampling": whose}) as talk:
            await post(talk, asks(temperature=0.5, seed=7, top_p=1.0 if whose == "client" else 0.1))
        sampling = talk.generate.scripted.calls[0].sampling
        assert sampling.temperature == temperature
        assert (sampling.seed is None) == (whose == "run")


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"n": 2}, "n"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b", "tool_calls": [CALL]}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "b"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "b"}}]}, "messages[0].audio"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    renderer: ChatRenderer, more: dict[str, Any], parameter: str
) -> None:
    async with served(renderer) as talk:
        for streams in (False, True):
            answer = await post(talk, asks(stream=streams) | more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert talk.rollout.turns == 0


@pytest.mark.parametrize("temperature", [0, -1, 1e-40])
async def test_a_temperature_that_cannot_be_trained_on_is_refused(renderer: ChatRenderer, temperature: float) -> None:
    async with served(renderer) as talk:
        answer = await post(talk, asks(temperature=temperature))
    assert answer.status_code == 400
    assert "temperature of 0.01 or above" in answer.json()["error"]["message"]


async def test_keys_open_their_own_rollout_and_no_other(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk:
        async with talk.policy.endpoint() as other:
            foreign = await post(talk, asks(), f"/rollouts/{other.key}/v1/chat/completions")
        ended = await post(talk, asks(), authorization=f"Bearer {other.key}")
        forged = await post(talk, asks(), authorization=f"Bearer {talk.endpoint.key[:-1]}x")
        missing = await post(talk, asks(), authorization="")
        by_path = await post(talk, asks(), f"/rollouts/{other.key}/v1/chat/completions", authorization="")
        of_anthropic = await post(talk, asks(), authorization="", **{"x-api-key": talk.endpoint.key})
        elsewhere = await post(talk, asks(), "/v1/elsewhere")
    answers = [foreign, ended, forged, missing, by_path, of_anthropic, elsewhere]
    assert [answer.status_code for answer in answers] == [401, 410, 401, 401, 410, 200, 404]
    assert all("error" in answer.json() for answer in answers if answer.status_code != 200)
    assert talk.rollout.turns == 1


async def test_requests_of_a_rollout_that_ends_are_told_so(renderer: ChatRenderer) -> None:
    async with served(renderer, stepwise=True) as talk:
        asking = asyncio.create_task(post(talk, asks()))
        await talk.generate.until(begun=1)
        talk.policy.close()
        assert (await asking).status_code == 410
    assert talk.generate.cancelled == 1


async def test_an_agent_reports_its_reward(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk:
        wrong = await post(talk, {"reward": "much"}, f"/rollouts/{talk.endpoint.key}/reward")
        assert talk.endpoint.reported is None
        right = await post(talk, {"reward": 1, "metrics": {"steps": 2}}, f"/rollouts/{talk.endpoint.key}/reward")
        await talk.endpoint.ended()
    assert (wrong.status_code, right.status_code) == (400, 200)
    assert talk.endpoint.reported is not None
    assert (talk.endpoint.reported.reward, talk.endpoint.reported.metrics) == (1.0, {"steps": 2.0})


@pytest.mark.parametrize(
    "report",
    [{"info": {"id": 2**128}}, {"info": {"ids": [-(2**63) - 1]}}, {"reward": 10**400}, {"metrics": {"a": 10**400}}],
    ids=["integer", "negative", "reward", "metric"],
)
async def test_a_report_that_no_process_could_be_sent_is_refused(
    renderer: ChatRenderer, report: dict[str, Any]
) -> None:
    async with served(renderer) as talk:
        refused = await post(talk, {"reward": 1, **report}, f"/rollouts/{talk.endpoint.key}/reward")
    assert refused.status_code == 400, refused.text
    assert talk.endpoint.reported is None


async def test_arguments_that_no_process_could_be_sent_stay_text(renderer_of: Callable[[str], ChatRenderer]) -> None:
    given = [f'{{"id": {2**128}}}', '{"ids": ' + "[" * 200 + "]" * 200 + "}", {"id": 2**64}, {"id": 2**63}]
    calls = [{"type": "function", "id": "c", "function": {"name": "add", "arguments": one}} for one in given]
    messages: list[Any] = [user("?"), {"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "done"} for _ in calls]
    async with served(renderer_of("hermes")) as talk:
        answer = await post(talk, {"model": "m", "messages": messages, "tools": [ADD]})
    assert answer.status_code == 200, answer.text
    recorded = [call["function"]["arguments"] for call in talk.rollout.messages[1]["tool_calls"]]
    assert recorded == [*given[:2], f'{{"id":{2**64}}}', {"id": 2**63}]
    assert f'"id": {2**128}' in talk.prompt(0)


async def test_an_agent_of_a_rollouter_speaks_http(renderer: ChatRenderer) -> None:
    async def agent(task: Task, policy: Policy) -> float:
        async with (
            policy.endpoint() as endpoint,
            openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client,
        ):
            reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "who?"}])
        return float(reply.choices[0].message.content == "Ada")

    spec = EnvironmentSpec(name="own", agent=agent, train_tasks=[{}])
    for replies, fails in ((["Ada"], None), ([EngineFailed("the engine is gone")], EngineFailed)):
        generate = ScriptedGenerate(renderer.tokenizer, replies)
        async with (
            Gateway() as gateway,
            Rollouter(
                RolloutSettings(), loaded(spec), renderer=renderer, generate=generate, endpoints=gateway
            ) as rollouter,
        ):
            running = rollouter.run(spec.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))
            if fails is None:
                rollout = await running
                assert rollout.reward is not None
                assert rollout.reward.value == 1.0
                continue
            with pytest.raises(fails):
                await running


async def test_vllms_token_ids_are_told_to_whoever_asks(renderer: ChatRenderer) -> None:
    async with served(renderer, sampling=SamplingParams(max_tokens=8)) as talk:
        answer = (await post(talk, asks(return_token_ids=True))).json()
    (branch,) = talk.rollout.branches
    assert answer["prompt_token_ids"] + answer["choices"][0]["token_ids"] == branch.token_ids.tolist()
