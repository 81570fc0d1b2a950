"""`Generate` whose requests can be set aside by group: their slots are free meanwhile, their tokens are kept.

hold(groups)    running requests ─ interrupt ─► ABORTED, with their tokens ─► wait here; new ones wait as well
release(group)  each goes on as prompt and prefix, the rest of its budget, wherever there is room
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace

from typing_extensions import override

from tailrace.records import Completion, FinishReason, Generate, GenerationRequest, OnChunk

Interrupt = Callable[[Iterable[str]], Awaitable[int]]
"""Hands requests back to their callers as `ABORTED` completions: see `Generator.interrupt`."""


class HoldingGenerate(Generate):
    """Over a `Generate` that can be interrupted: awaiting a held request takes longer, nothing else."""

    def __init__(self, generate: Generate, interrupt: Interrupt) -> None:
        self._generate, self._interrupt = generate, interrupt
        self._running: defaultdict[str, set[str]] = defaultdict(set)  # ids of requests in service, by group
        self._held: dict[str, asyncio.Event] = {}
        self._interrupted: set[str] = set()  # by `hold`: they go on, even if released by now

    @override
    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        while True:
            while (held := self._held.get(request.group_id)) is not None:
                await held.wait()
            running = self._running[request.group_id]
            running.add(request.request_id)
            try:
                completion = await self._generate(request, on_chunk)
                was_interrupted = request.request_id in self._interrupted
            finally:
                self._interrupted.discard(request.request_id)
                running.discard(request.request_id)
                if not running:
                    self._running.pop(request.group_id, None)
            if completion.finish_reason is not FinishReason.ABORTED or not was_interrupted:
                return completion
            request = replace(request, prefix=completion)

    async def hold(self, group_ids: Collection[str]) -> None:
        """Take the groups' requests off their engines and start none; returns when none of them runs."""
        for group_id in group_ids:
            self._held.setdefault(group_id, asyncio.Event())
        if running := {request_id for group_id in group_ids for request_id in self._running.get(group_id, ())}:
            self._interrupted |= running
            await self._interrupt(running)

    def release(self, group_id: str) -> None:
        """Go on with the group's requests."""
        if (held := self._held.pop(group_id, None)) is not None:
            held.set()
