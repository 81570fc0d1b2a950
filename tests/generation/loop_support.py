"""The engine's loop without its thread: iterations one by one, between which the event loop has its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

from tailrace.generation.decisions import Decision, Wait, WeightPolicy
from tailrace.generation.engine_thread.inbox import Inbox
from tailrace.generation.engine_thread.loop import EngineLoop
from tailrace.generation.engines.protocol import Engine
from tailrace.records import Completion
from tests.generation.engine_support import request

POLICY = WeightPolicy()
TRIPS = 6
"""Turns of the event loop between two iterations: enough for an answer to become the next question."""


async def let_others_run() -> None:
    for _ in range(TRIPS):
        await asyncio.sleep(0)


class World:
    """An engine's loop and those who ask it, one iteration at a time."""

    def __init__(self, engine: Engine, policy: WeightPolicy = POLICY):
        self.inbox, self.policy = Inbox(), policy
        self.engine, self.loop = engine, EngineLoop(engine, self.inbox, policy)
        self.tasks: list[asyncio.Task[Completion]] = []

    def ask(
        self, name: str, length: int = 3, *, prompt: Iterable[int] = (1, 2), **options: object
    ) -> asyncio.Task[Completion]:
        return self.start(self.inbox.generate(request(name, prompt, max_tokens=length, **options)))

    def start(self, work: Coroutine[object, object, Completion]) -> asyncio.Task[Completion]:
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    async def iterate(self) -> Decision:
        await let_others_run()
        decision = self.inbox.decide(self.loop.state, self.policy)
        if not isinstance(decision, Wait):
            self.loop.act(decision)
        await let_others_run()
        return decision

    async def finish(self) -> list[Completion]:
        while not all(task.done() for task in self.tasks):
            await self.iterate()
        return [task.result() for task in self.tasks]
