"""The policy as one rollout sees it: `chat` renders, generates, records and answers.

    messages ─longest_match─► the branch they extend ─bridge─► its new context ─generate─► its completion ─► Reply
                  │
                  └─ none: a new branch (from the start, or from the sampled tokens that the histories share)

Sampled tokens are never tokenized again: a branch that is forked copies them as context, without loss. A turn that is
cancelled or fails leaves nothing on its branch, so that whoever asks again goes on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from dataclasses import replace
from typing import NoReturn

import msgspec
import numpy as np

from tailrace.environments import ChatFormat, Endpoint
from tailrace.errors import BudgetExceeded, RolloutError, SettingsError
from tailrace.records import (
    CROSS_ENTROPY_WEIGHTS,
    Branch,
    Completion,
    FinishReason,
    FirstReply,
    Generate,
    GenerationRequest,
    Int32Array,
    Message,
    OnChunk,
    Reply,
    RequestId,
    Rollout,
    RolloutId,
    SamplingParams,
    ToolSpec,
    chunks_before,
    session_of,
)
from tailrace.records.columns import as_column
from tailrace.rollouts.chat.conversations import (
    AskedTurn,
    BranchConversation,
    Match,
    Place,
    Turn,
    first_reply_place,
    has_reply,
    longest_match,
    longest_prefix,
    sampled_texts,
)
from tailrace.rollouts.chat.rendering import ChatRenderer, Renderer
from tailrace.rollouts.chat.stop_strings import StopStringFound, StopStrings, listener_for
from tailrace.rollouts.chat.text_deltas import TextDeltas
from tailrace.rollouts.chat.text_parts import as_text
from tailrace.rollouts.endpoints import Endpoints, no_endpoints
from tailrace.rollouts.own_columns import require_own_column
from tailrace.rollouts.turn_budget import TurnBudget
from tailrace.rollouts.turn_options import (
    InvalidArgument,
    plain_options,
    plain_stop_token_ids,
    plain_token_ids,
    stop_strings,
)
from tailrace.rollouts.turn_sampling import turn_sampling
from tailrace.tracing.phases import phase

_LENGTH, _LOST = FinishReason.LENGTH, (FinishReason.ERROR, FinishReason.ABORTED)
"""Looked up once: a member of an enumeration takes six times as long as an attribute (Python 3.11)."""
_REFUSAL_S = 0.02
"""How long a request of a rollout that was cancelled waits for its refusal."""


class RolloutPolicy:
    """The model, for one rollout. Any number of `chat` calls may run at once, each on a branch of its own."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        renderer: Renderer,
        generate: Generate,
        max_turns: int,
        max_rollout_tokens: int | None = None,
        max_model_tokens: int | None = None,
        row_tokens: int | None = None,
        system_prompt: str | None = None,
        records_experts: bool = False,
        takes_demonstrations: bool | None = True,
        endpoints: Endpoints | None = None,
    ) -> None:
        """`max_rollout_tokens` bounds all branches of turns, `max_model_tokens` prompt and completion of one turn.

        Demonstrations are refused where it `takes_demonstrations` not, and dropped where that is None; one has
        `row_tokens` at most.
        """
        self._rollout = rollout
        self._renderer = renderer
        self._generate = generate
        self._budget = TurnBudget(
            rollout,
            max_turns=max_turns,
            max_rollout_tokens=max_rollout_tokens,
            max_model_tokens=max_model_tokens,
            row_tokens=row_tokens,
        )
        self._system_prompt, self._records_experts = system_prompt, records_experts
        self._takes_demonstrations, self._endpoints = takes_demonstrations, endpoints
        self.no_budget: BudgetExceeded | None = None
        """Why the latest request to one of its endpoints was given an empty reply."""
        self._conversations: list[BranchConversation] = []
        self._closed = False
        self._turns: set[asyncio.Task[object]] = set()
        """Tasks that wait for a completion."""

    @property
    def rollout_id(self) -> RolloutId:
        """Of the rollout that it belongs to."""
        return self._rollout.rollout_id

    @property
    def messages(self) -> list[Message]:
        """The conversation of the latest turn: see `Policy.messages`."""
        return self._rollout.messages

    @property
    def sampling(self) -> SamplingParams:
        """Of its rollout."""
        return self._rollout.sampling

    @property
    def max_model_tokens(self) -> int | None:
        """Of prompt and completion of one turn, at most."""
        return self._budget.max_model_tokens

    @property
    def chat_format(self) -> ChatFormat | None:
        """See `Endpoint.chat_format`."""
        return self._renderer.chat_format if isinstance(self._renderer, ChatRenderer) else None

    def prompt_of(self, messages: list[Message], tools: list[ToolSpec] | None = None) -> Int32Array:
        """The tokens of a conversation that nobody has begun: [num_tokens]. Raises as `chat` does; samples nothing."""
        return self._renderer.render(self._with_system_prompt(as_text(messages)), tools)

    def prompt_token_ids(self, reply: Reply) -> Int32Array:
        """What a reply was sampled after: [num_tokens]."""
        return self._rollout.branches[reply.branch].token_ids[: reply.start_token]

    def token_texts(self, token_ids: Int32Array) -> list[str]:
        """The text of each token alone."""
        return [self._renderer.text([token_id]) for token_id in token_ids.tolist()]

    async def chat(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """One turn: sample the next message of `messages`.

        `on_text` hears the reply's text while it is sampled, as far as it is sure: tools make that nothing. A `seed` is
        this turn's own; rollouts of a group differ all the same. Without tools, calls that the reply makes are its
        text.

        Raises:
            BudgetExceeded: No turn or token is left for it.
            RequestRefused: The engine cannot take it (longer than the model's context, ...).
            EnvironmentFailed: The model's chat template refuses the conversation.
            TypeError, ValueError: The conversation is no list of messages, or an option is not of its type, or out of
                its range; numpy's numbers are numbers.
            CancelledError: The rollout was cancelled, or has ended: nothing more is sampled for it.
        """
        task = await self._own_task()
        max_tokens, temperature, seed = plain_options(max_tokens, temperature, seed)
        messages, stop = self._with_system_prompt(as_text(messages)), stop_strings(stop)
        listener = listener_for(stop, self._renderer.text)

        def locate() -> Place:
            return self._locate(messages, tools, self._branch_temperature(temperature))

        asked, request = await self._begun(task, locate, max_tokens, seed)
        hears = None if on_text is None or tools else self._text_deltas(on_text, request, stop)
        completion = await self._sample(asked, request, task, listener, hears)
        with phase("parse"):
            return self._record(asked, request.prompt_token_ids, completion, listener, reads_calls=bool(tools))

    async def continue_tokens(
        self,
        token_ids: Int32Array,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: tuple[int, ...] | None = None,
        seed: int | None = None,
        on_chunk: OnChunk | None = None,
    ) -> Reply:
        """One turn by tokens: sample what follows `token_ids` [num_tokens], on the branch that they begin with.

        `stop_token_ids` are the model's own unless given. `on_chunk` hears the tokens while they are sampled, unless
        there is a `stop`, which may take some of them back. Raises as `chat` does, and `ValueError` where the run has a
        system prompt of its own, which tokens cannot be given.
        """
        task = await self._own_task()
        if self._system_prompt is not None:
            raise InvalidArgument("rollouts.system_prompt cannot be put into a prompt of tokens: leave it out")
        max_tokens, temperature, seed = plain_options(max_tokens, temperature, seed)
        token_ids = plain_token_ids(token_ids)
        if stop_token_ids is not None:
            stop_token_ids = plain_stop_token_ids(stop_token_ids)
        listener = listener_for(stop_strings(stop), self._renderer.text)

        def locate() -> Place:
            return self._locate_tokens(token_ids, self._branch_temperature(temperature))

        asked, request = await self._begun(task, locate, max_tokens, seed)
        if stop_token_ids is not None:
            sampling = msgspec.structs.replace(request.sampling, stop_token_ids=stop_token_ids)
            request = replace(request, sampling=sampling)
        completion = await self._sample(asked, request, task, listener, on_chunk if listener is None else None)
        with phase("parse"):
            return self._record(asked, request.prompt_token_ids, completion, listener)

    def demonstrate(self, messages: list[Message], *, tools: list[ToolSpec] | None = None, weight: float = 1.0) -> None:
        """Add a branch that nobody sampled: see `Policy.demonstrate`."""
        if self._takes_demonstrations is None:
            return
        if not self._takes_demonstrations:
            raise SettingsError(
                f"environment {self._rollout.task.environment!r} demonstrates replies, and nothing would learn from "
                "them: write trainer.loss.cross_entropy = { coefficient = 1.0 }"
            )
        with phase("render"):
            prompt, reply = self._renderer.demonstrate(self._with_system_prompt(as_text(messages)), tools)
        self._budget.demonstrate(len(prompt) + len(reply))
        branch = Branch(temperature=1.0)
        branch.extend_context(prompt)
        branch.extend_context(reply)
        branch.set_column(CROSS_ENTROPY_WEIGHTS, np.full(len(reply), weight, np.float32), start=len(prompt))
        self._rollout.branches.append(branch)

    def set_column(self, reply: Reply, name: str, values: object) -> None:
        """Give the tokens of a reply more for a loss to read: see `Policy.set_column`."""
        require_own_column(
            name, environment=self._rollout.task.environment, takes_demonstrations=self._takes_demonstrations
        )
        if len(column := as_column(name, values)) != reply.completion.num_tokens:
            raise InvalidArgument(
                f"column {name!r} has {len(column)} values, and the reply {reply.completion.num_tokens} tokens"
            )
        self._rollout.branches[reply.branch].set_column(name, column, start=reply.start_token)

    def endpoint(self) -> AbstractAsyncContextManager[Endpoint]:
        """An HTTP address for this policy: see `Policy.endpoint`."""
        if self._endpoints is None:
            raise no_endpoints(self._rollout.task.environment)
        return self._endpoints.open(self)

    def keep(self, messages: Sequence[Message]) -> None:
        """Add what follows the last reply to the conversation kept for people; the policy never answers it."""
        self._rollout.messages = [*self._rollout.messages, *messages]

    def stop(self) -> None:
        """The rollout is to end: no new turn from now on."""
        self._closed = True

    def close(self) -> None:
        """The agent has returned: no new turn, and those that tasks of its own still wait for are cancelled."""
        self._closed = True
        if self._turns:
            for task in self._turns - {asyncio.current_task()}:
                task.cancel()

    async def _own_task(self) -> asyncio.Task[object]:
        """The task of a turn that begins. Raises `CancelledError` where none may begin any more."""
        task = asyncio.current_task()
        assert task is not None  # coroutines run in tasks
        if self._closed or task.cancelling():
            await self._refuse()
        return task

    async def _refuse(self) -> NoReturn:
        """Raise `CancelledError`, after a pause, so that an agent that ignores it does not block the event loop."""
        await asyncio.sleep(_REFUSAL_S)
        raise asyncio.CancelledError(f"rollout {self._rollout.rollout_id} was cancelled or has ended")

    # ---- where the conversation goes on

    def _locate(self, messages: list[Message], tools: list[ToolSpec] | None, temperature: float | None) -> Place:
        """The branch to extend and the context to extend it with."""
        match = longest_match(self._conversations, messages, tools)
        if match is not None:
            context = self._bridge(match, messages, tools)
            if context is not None:
                counts = {"realigned_turns": float(match.realigned)}
                if match.is_tip and match.conversation.branch.temperature == temperature:
                    return Place(match.conversation, context, messages, counts)
                if has_reply(messages[match.turn.num_messages :]):
                    counts["rewritten_turns"] = 1.0
                return _forked(match, Place(self._open(tools, temperature), context, messages, counts))
        counts = {"rewritten_turns": 1.0} if self._conversations and has_reply(messages) else {}
        return Place(self._open(tools, temperature), self._renderer.render(messages, tools), messages, counts)

    def _locate_tokens(self, token_ids: Int32Array, temperature: float | None) -> Place:
        """The branch to extend, and the tokens that it does not have already."""
        match = longest_prefix(self._conversations, token_ids)
        context = token_ids if match is None else token_ids[match.turn.end_token :]
        said: Message = {"role": "user", "content": self._renderer.text(context.tolist())}
        if match is None:
            return Place(self._open(None, temperature), context, [said], {})
        seen = match.conversation
        messages = [*seen.messages[: match.turn.num_messages], said]
        if match.is_tip and seen.branch.temperature == temperature:
            return Place(seen, context, messages, {})
        return _forked(match, Place(self._open(None, temperature), context, messages, {}))

    def _bridge(self, match: Match, messages: list[Message], tools: list[ToolSpec] | None) -> Int32Array | None:
        seen, turn = match.conversation, match.turn
        return self._renderer.bridge(
            seen.branch.token_ids[: turn.end_token],
            turn.start_token,
            seen.messages[: turn.num_messages],
            messages[turn.num_messages :],
            tools,
        )

    def _open(self, tools: list[ToolSpec] | None, temperature: float | None) -> BranchConversation:
        """A new branch: in place of one whose only turn was never answered, where there is such.

        Tools are copied: the next turn's are compared with them, whatever the agent does to its own.
        """
        unused = (one.index for one in self._conversations if not one.turns and not one.is_waiting)
        return BranchConversation(next(unused, len(self._rollout.branches)), Branch(temperature), deepcopy(tools))

    # ---- how it is sampled

    def _branch_temperature(self, asked: float | None) -> float | None:
        """The temperature of a turn's branch; None: the rollout's own. What is greedy by its settings stays so."""
        own = self._rollout.sampling.temperature
        return None if own in (0, asked) else asked

    def _text_deltas(
        self, on_text: Callable[[str], None], request: GenerationRequest, stop: Sequence[str]
    ) -> TextDeltas | None:
        """Who reads along; None where a reply's tokens are not its text."""
        if not self._renderer.replies_in_plain_text(request.prompt_token_ids):
            return None
        ends = request.sampling.stop_token_ids
        return TextDeltas(on_text, decode=self._renderer.text, stop_token_ids=ends, stop=stop)

    # ---- one completion

    async def _begun(
        self, task: asyncio.Task[object], locate: Callable[[], Place], max_tokens: int | None, seed: int | None
    ) -> tuple[AskedTurn, GenerationRequest]:
        """The turn that begins where `locate` says, once the budget has something for it. Raises `BudgetExceeded`."""
        while True:
            self._budget.require_turn()
            with phase("render"):
                place = locate()
                limit = self._budget.completion_limit(place.conversation, len(place.context), max_tokens)
                if limit is not None:
                    asked = self._begin_turn(place)
                    return asked, self._request(asked, limit, seed)
            self._turns.add(task)
            try:
                await self._budget.release()
            finally:
                self._turns.discard(task)
            await self._own_task()  # it may have been told to end meanwhile

    def _begin_turn(self, place: Place) -> AskedTurn:
        """Spend a turn. Messages are copied: what the agent does to its own changes nothing."""
        conversation = place.conversation
        for name, amount in place.counts.items():
            self._count(name, amount)
        if not conversation.turns:
            index = conversation.index
            self._conversations = [*(one for one in self._conversations if one.index != index), conversation]
            self._rollout.branches[index : index + 1] = [conversation.branch]
        self._rollout.turns += 1
        said = [message.copy() for message in place.messages[len(conversation.messages) :]]
        return AskedTurn(conversation, place.context, said)

    async def _sample(
        self,
        asked: AskedTurn,
        request: GenerationRequest,
        task: asyncio.Task[object],
        listener: StopStrings | None,
        hears: OnChunk | None,
    ) -> Completion:
        clock = task.get_loop()
        turn, reserved = self._rollout.turns, request.sampling.max_tokens + len(asked.context)
        asked.conversation.is_waiting = True
        started_s = clock.time()
        self._turns.add(task)
        try:
            with phase("generate", about={"turn": turn}), self._budget.reserved(reserved):
                completion = await self._completed(request, listener, hears)
        finally:
            asked.conversation.is_waiting = False
            self._turns.discard(task)
        self._count("generate_s", clock.time() - started_s)
        if completion.finish_reason in _LOST:
            raise RolloutError(
                f"turn {turn} of {self._rollout.rollout_id}: generation ended as {completion.finish_reason}"
            )
        return completion

    async def _completed(
        self, request: GenerationRequest, listener: StopStrings | None, hears: OnChunk | None
    ) -> Completion:
        """What is sampled, up to the first of the strings that `listener` looks for.

        An engine hands out the experts of a request that ended, and not of one that is aborted: where they are recorded
        it is sampled to its end, and then cut.
        """
        if listener is None:
            return await self._generate(request, hears)
        if self._records_experts:
            completion = await self._generate(request, hears)
            kept = listener.cut(completion)
            end = len(request.prompt_token_ids) + kept.num_tokens
            return replace(kept, routed_experts=chunks_before(end, completion.routed_experts))
        try:
            return listener.cut(await self._generate(request, listener if hears is None else listener.after(hears)))
        except StopStringFound:
            return listener.completion

    def _request(self, asked: AskedTurn, limit: int, seed: int | None) -> GenerationRequest:
        rollout, turn, conversation = self._rollout, self._rollout.turns, asked.conversation
        session_id = session_of(rollout.rollout_id, conversation.index)
        return GenerationRequest(
            request_id=RequestId(f"{session_id}/{turn}"),
            session_id=session_id,
            group_id=rollout.group_id,
            prompt_token_ids=asked.prompt_token_ids,
            sampling=turn_sampling(
                rollout, limit, self._renderer.stop_token_ids, temperature=conversation.branch.temperature, seed=seed
            ),
            owner=rollout.rollout_id,
        )

    def _record(
        self,
        asked: AskedTurn,
        prompt: Int32Array,
        completion: Completion,
        listener: StopStrings | None,
        *,
        reads_calls: bool = True,
    ) -> Reply:
        """Read the reply, then put it on its branch: one that cannot be read leaves nothing there."""
        conversation, branch = asked.conversation, asked.conversation.branch
        parsed = self._renderer.parse(
            completion, prompt_token_ids=prompt, tools=conversation.tools, reads_calls=reads_calls
        )
        drifted = self._renderer.drifts(completion)
        message = parsed.message()
        if listener is not None:
            message["content"] = listener.before(message["content"])
            self._count("cut_tokens", listener.cut_tokens)
        if not conversation.turns:
            conversation.sampled_texts = sampled_texts(self._conversations, asked.messages)
        if conversation.first_reply is None:
            place = first_reply_place(self._conversations, asked.messages)
            conversation.first_reply = FirstReply(place, conversation.index, len(prompt))
        branch.extend_context(asked.context, is_tool_output=asked.brings_tool_output)
        prompt = branch.token_ids
        branch.extend_completion(completion)
        conversation.messages += [*asked.messages, message.copy()]
        conversation.turns.append(Turn(len(conversation.messages), len(prompt), branch.num_tokens, drifted))
        if parsed.reasoning is not None and not reads_calls:
            written = self._renderer.reply_text(completion)
            place = len(conversation.messages) - 1
            conversation.sampled_texts[place] = written if listener is None else listener.before(written)
        self._rollout.messages, self._rollout.first_reply = list(conversation.messages), conversation.first_reply
        self._rollout.sampled_texts = conversation.sampled_texts.copy()
        self._rollout.truncated |= completion.finish_reason is _LENGTH
        self._count("drifted_turns", float(drifted))
        self._count("tool_calls", len(parsed.tool_calls))
        self._count("malformed_tool_calls", parsed.malformed_tool_calls)
        return Reply(
            message=message,
            finish_reason=completion.finish_reason,
            completion=completion,
            tool_calls=parsed.tool_calls,
            malformed_tool_calls=parsed.malformed_tool_calls,
            branch=conversation.index,
            start_token=len(prompt),
            stop_string=None if listener is None else listener.found,
            prompt_token_ids=prompt,
        )

    def _count(self, name: str, amount: float) -> None:
        self._rollout.metrics[name] = self._rollout.metrics.get(name, 0.0) + amount

    def _with_system_prompt(self, messages: list[Message]) -> list[Message]:
        if self._system_prompt is None:
            return messages
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        return [{"role": "system", "content": self._system_prompt}, *rest]


def _forked(match: Match, place: Place) -> Place:
    """The place of a new branch, as one that begins with the tokens of another: context here, they bear loss there."""
    conversation, shared = place.conversation, match.conversation
    assert shared.first_reply is not None  # it has a turn
    conversation.first_reply = msgspec.structs.replace(shared.first_reply, branch=conversation.index)
    context = np.concatenate([shared.branch.token_ids[: match.turn.end_token], place.context])
    return replace(place, context=context)
