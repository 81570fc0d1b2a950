"""What a request asks of a policy: a chat's next message, or what follows some tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import BudgetExceeded
from tailrace.gateway.dialects.forced_calls import with_forced_calls
from tailrace.gateway.dialects.protocol import UNSUPPORTED_VALUE, Answer, ChatRequest, RequestInvalid
from tailrace.gateway.dialects.token_generation import TokenRequest
from tailrace.gateway.tool_call_ids import with_call_ids, without_call_ids
from tailrace.gateway.turns import NOTHING, Ask, Turn
from tailrace.records import Reply
from tailrace.records.sampling import LEAST_TEMPERATURE
from tailrace.rollouts import RolloutPolicy
from tailrace.rollouts.settings import top_k_setting

if TYPE_CHECKING:
    from tailrace.gateway.sessions import Session


def chat(session: Session, request: ChatRequest) -> Ask:
    """One turn of a conversation. Raises `RequestInvalid` where it cannot be sampled as it asks."""
    policy, own = session.policy_for(request), _own_sampling(session, request)
    asked = session.conversations.whole(request)
    messages = without_call_ids(asked)
    firsts = session.system_messages
    if firsts is not None:
        messages = firsts.restored(messages, request.tools)

    async def ask(turn: Turn) -> Answer:
        try:
            reply = await policy.chat(
                messages,
                tools=request.tools,
                max_tokens=request.max_tokens,
                temperature=request.temperature if own else None,
                stop=request.stop,
                seed=request.seed if own else None,
                on_text=turn.hear if request.streams else None,
            )
        except BudgetExceeded:  # whoever follows the empty answer is told why
            session.conversations.keep(turn.answer_id, request, asked, NOTHING.message)
            raise
        if firsts is not None:
            firsts.keep(messages, request.tools, reply.message)
        answered = with_call_ids(with_forced_calls(reply, request.form), turn.answer_id)
        session.conversations.keep(turn.answer_id, request, asked, answered.message)
        return _answer(turn, policy, answered, request)

    return ask


def continue_tokens(session: Session, request: TokenRequest) -> Ask:
    """One turn by tokens. Raises `RequestInvalid` where it cannot be sampled as it asks."""
    policy, own = session.policy_for(request), _own_sampling(session, request)

    async def ask(turn: Turn) -> Answer:
        reply = await policy.continue_tokens(
            request.token_ids,
            max_tokens=request.max_tokens,
            temperature=request.temperature if own else None,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            seed=request.seed if own else None,
            on_chunk=turn.hear if request.streams else None,
        )
        return _answer(turn, policy, reply, request)

    return ask


def _answer(turn: Turn, policy: RolloutPolicy, reply: Reply, request: ChatRequest | TokenRequest) -> Answer:
    wants_texts = isinstance(request, ChatRequest) and request.wants_logprobs
    wants_ids = isinstance(request, ChatRequest) and request.wants_token_ids
    return Answer(
        reply=reply,
        answer_id=turn.answer_id,
        created_s=turn.created_s,
        prompt_tokens=reply.start_token,
        token_texts=tuple(policy.token_texts(reply.completion.token_ids)) if wants_texts else (),
        prompt_token_ids=tuple(policy.prompt_token_ids(reply).tolist()) if wants_ids else (),
    )


def _own_sampling(session: Session, request: ChatRequest | TokenRequest) -> bool:
    """Whether the request's sampling holds. Raises `RequestInvalid` where it would, and cannot."""
    if session.keeps_sampling:
        return False
    run = session.sampling
    if run is not None:
        _require_same("top_p", request.top_p, run.top_p)
        if request.top_k != run.top_k:
            _require_same("top_k", request.top_k, top_k_setting(run))
    if request.temperature is not None and not request.temperature >= LEAST_TEMPERATURE:
        raise RequestInvalid(
            f"temperature = {request.temperature:g} is not supported: what is trained on is sampled at a temperature "
            f"of {LEAST_TEMPERATURE:g} or above; leave it out, or set gateway.sampling = 'run'",
            parameter="temperature",
            code=UNSUPPORTED_VALUE,
        )
    return True


def _require_same(name: str, asked: float | None, own: float) -> None:
    if asked is not None and asked != own:
        raise RequestInvalid(
            f"{name} = {asked:g} is not supported: all tokens of a rollout are sampled with the run's own, {own:g}; "
            "leave it out, or set gateway.sampling = 'run'",
            parameter=name,
            code=UNSUPPORTED_VALUE,
        )
