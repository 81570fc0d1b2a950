"""How long a turn that nobody waits for is there for a retry, by the clock of a simulation."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.config.gateway import GatewaySettings
from tailrace.gateway.dialects.protocol import Answer
from tailrace.gateway.sessions import Session, Sessions
from tailrace.gateway.turns import NOTHING, Repeatable, Turn
from tailrace.records import GroupId, Rollout, RolloutId, SamplingParams, Task, TaskId
from tailrace.rollouts import ChatRenderer, RolloutPolicy
from tailrace.simulation import run_in_virtual_time
from tests.support.scripted_generate import ScriptedGenerate


def asked(attempt: int, key: str | None = None) -> Repeatable:
    return Repeatable(b"body", key, attempt)


def session_of(renderer: ChatRenderer) -> Session:
    rollout = Rollout(RolloutId("r7"), GroupId("g7"), Task(TaskId("names/train/7"), "names", 7, {}), SamplingParams())
    generate = ScriptedGenerate(renderer.tokenizer, ["Ada"])
    policy = RolloutPolicy(rollout, renderer=renderer, generate=generate, max_turns=1)
    return Sessions(GatewaySettings()).open(policy, "http://here")


async def at_once(turn: Turn) -> Answer:
    return Answer(reply=NOTHING, answer_id=turn.answer_id, created_s=turn.created_s, prompt_tokens=0)


async def never(turn: Turn) -> Answer:
    """A turn that is sampled for longer than anybody waits."""
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("attempt", "pause_s"), [(0, 0.5), (1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0), (999_999_999, 8.0)]
)
def test_a_turn_waits_for_a_retry_as_long_as_its_client_pauses_and_a_moment_more(
    renderer: ChatRenderer, attempt: int, pause_s: float
) -> None:
    async def main() -> tuple[bool, bool]:
        session = session_of(renderer)
        turn = session.turns.begin(session, never, asked(attempt))
        turn.join()
        turn.leave()
        await asyncio.sleep(pause_s + 2.4)
        is_joined = session.turns.retried(asked(attempt + 1)) is turn
        await asyncio.sleep(0.2)
        return is_joined, session.turns.retried(asked(attempt + 2)) is not None

    assert run_in_virtual_time(main()) == (True, False)


@pytest.mark.parametrize("key", [None, "k"])
def test_a_turn_that_is_left_again_waits_anew_and_by_the_attempt_that_left_it(
    renderer: ChatRenderer, key: str | None
) -> None:
    async def main() -> None:
        session = session_of(renderer)
        turn = session.turns.begin(session, never, asked(0, key))
        turn.join()
        turn.leave()
        await asyncio.sleep(2.9)
        for attempt in (1, 2, 3):
            assert session.turns.retried(asked(attempt, key)) is turn
            turn.join()
            await asyncio.sleep(0.05)
            turn.leave()
            await asyncio.sleep(2**attempt / 2)
        assert session.turns.retried(asked(4, key)) is turn
        session.close()
        await session.turns.ended()

    run_in_virtual_time(main())


def test_an_answer_that_no_client_got_is_kept_before_those_that_were_sent(renderer: ChatRenderer) -> None:
    async def main() -> tuple[bool, bool]:
        session = session_of(renderer)
        missed, sent = (session.turns.begin(session, at_once, asked(0, key)) for key in ("missed", "sent"))
        sent.was_sent()
        for number in range(9):
            turn = session.turns.begin(session, at_once, asked(0, str(number)))
            await asyncio.sleep(0)
            turn.was_sent()
        await asyncio.sleep(0)
        kept = [session.turns.retried(asked(1, key)) for key in ("missed", "sent")]
        return kept[0] is missed, kept[1] is sent

    assert run_in_virtual_time(main()) == (True, False)


def test_an_answer_that_is_still_waited_for_is_kept_before_those_that_were_missed(renderer: ChatRenderer) -> None:
    async def main() -> bool:
        session = session_of(renderer)
        for number in range(8):
            turn = session.turns.begin(session, at_once, asked(0, str(number)))
            turn.join()
            turn.leave()
            await turn.changed()
            await asyncio.sleep(0)
        turn = session.turns.begin(session, at_once, asked(0, "latest"))
        turn.join()
        await turn.changed()
        await asyncio.sleep(0)
        turn.leave()
        return session.turns.retried(asked(1, "latest")) is turn

    assert run_in_virtual_time(main())
