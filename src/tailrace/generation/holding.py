"""`Generate` whose requests can be set aside by group: their slots are free meanwhile, their tokens are kept.

hold(group)     running requests ─ interrupt ─► ABORTED, with their tokens ─► wait here; new ones wait as well
release(group)  each goes on as prompt and prefix, the rest of its budget, wherever there is room
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

from tailrace.generation.engine_thread.inbox import CutListener
from tailrace.records import Completion, FinishReason, Generate, Int32Array, SamplingParams

Interrupt = Callable[[Iterable[str]], Awaitable[int]]
"""Hands requests back to their callers as `ABORTED` completions: see `Generator.interrupt`."""


class HoldingGenerate:
    """Implements `Generate` over one that can be interrupted. Whoever awaits a held request only waits longer."""

    def __init__(self, generate: Generate, interrupt: Interrupt, on_cut: CutListener | None = None) -> None:
        """`on_cut` is told of requests that are cancelled while they are set aside."""
        self._generate, self._interrupt, self._on_cut = generate, interrupt, on_cut
        self._asked: defaultdict[str, set[str]] = defaultdict(set)  # requests that are being served, by group
        self._held: dict[str, asyncio.Event] = {}
        self._taken_off: set[str] = set()  # requests interrupted here: they go on, even if released by now

    async def __call__(
        self,
        prompt_token_ids: Int32Array,
        *,
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        group_id: str,
        prefix: Completion | None = None,
    ) -> Completion:
        """See `Generate`."""
        while True:
            if (held := self._held.get(group_id)) is not None:
                try:
                    await held.wait()
                except asyncio.CancelledError:
                    if self._on_cut is not None and prefix is not None:
                        self._on_cut(request_id, prefix.num_tokens)
                    raise
                continue
            asked = self._asked[group_id]
            asked.add(request_id)
            try:
                completion = await self._generate(
                    prompt_token_ids,
                    sampling=sampling,
                    request_id=request_id,
                    session_id=session_id,
                    group_id=group_id,
                    prefix=prefix,
                )
            finally:
                was_taken_off = request_id in self._taken_off
                self._taken_off.discard(request_id)
                asked.discard(request_id)
                if not asked:
                    self._asked.pop(group_id, None)
            if completion.finish_reason is not FinishReason.ABORTED or not was_taken_off:
                return completion
            prefix = completion

    async def hold(self, group_id: str) -> None:
        """Take the group's requests off their engines and start none; returns when none of them runs."""
        self._held.setdefault(group_id, asyncio.Event())
        if asked := set(self._asked.get(group_id, ())):
            self._taken_off |= asked
            await self._interrupt(asked)

    def release(self, group_id: str) -> None:
        """Go on with the group's requests."""
        if (held := self._held.pop(group_id, None)) is not None:
            held.set()
