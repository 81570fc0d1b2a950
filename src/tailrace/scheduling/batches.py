"""From ready groups to one batch: the oldest first, judged for staleness, laid out in slices.

Pure but for the accounts: whoever calls awaits between two slices, since a batch of thousands of rollouts would hold
the event loop for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from tailrace.batching import FormedBatch, Packing, SampledGroup, form_batch_in_slices, sample_group
from tailrace.records import Outcome
from tailrace.scheduling.accounts import Accounts
from tailrace.scheduling.ready import ReadyGroup, ReadyQueue
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.tracing.phases import phase

RESTARTED = "restarted"

SAMPLED_AT_ONCE = 32
"""Rollouts in one slice."""


class BatchFormer:
    """Takes a batch's worth out of the ready queue."""

    def __init__(
        self,
        ready: ReadyQueue,
        accounts: Accounts,
        settings: SchedulingSettings,
        *,
        max_staleness: int,
        on_taken: Callable[[ReadyGroup], None],
        on_trained: Callable[[ReadyGroup], None],
        on_restart: Callable[[ReadyGroup], None],
        on_barren: Callable[[ReadyGroup], None],
    ) -> None:
        """Every group taken is told to `on_taken`, and what became of it to one of the other three."""
        self._ready, self._accounts, self._settings = ready, accounts, settings
        self._max_staleness = max_staleness
        self._on_taken, self._on_trained, self._on_restart, self._on_barren = (
            on_taken,
            on_trained,
            on_restart,
            on_barren,
        )

    def form(self, *, step: int, judged_version: int) -> Generator[None, None, FormedBatch | None]:
        """The batch of `step`, for a trainer of at most `judged_version`; None where nothing in it would bear loss."""
        sampled: list[SampledGroup] = []
        size = since_yield = 0
        while self._ready and size < self._settings.batch_size:
            ready = self._ready.pop()
            taken = self._sample(ready, judged_version)
            if taken is not None and taken.samples:
                sampled.append(taken)
                size += ready.size
            since_yield += len(ready.group.rollouts)
            if since_yield >= SAMPLED_AT_ONCE:
                since_yield = 0
                yield
        if not sampled:
            return None
        packing = Packing(self._settings.row_tokens)
        return (yield from form_batch_in_slices(sampled, step=step, judged_version=judged_version, packing=packing))

    def _sample(self, ready: ReadyGroup, judged_version: int) -> SampledGroup | None:
        """One group's samples; None where it is started again instead."""
        on_stale = self._settings.on_stale
        self._on_taken(ready)
        with phase("sample"):
            taken = sample_group(
                ready.group,
                judged_version=judged_version,
                max_staleness=self._max_staleness,
                drop_stale=on_stale == "drop",
            )
        if on_stale == "restart" and taken.masked_tokens and ready.opened.restarts < self._settings.max_restarts:
            self._accounts.end(ready.group.rollouts, Outcome.filtered(RESTARTED))
            self._on_restart(ready)
            return None
        for rollout, reason in taken.filtered:
            self._accounts.end([rollout], Outcome.filtered(reason))
        (self._on_trained if taken.samples else self._on_barren)(ready)
        return taken
