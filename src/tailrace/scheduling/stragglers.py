"""`on_straggler`: what over-sampling does at the edge of a step to groups that still run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from tailrace.errors import SettingsError
from tailrace.scheduling.outstanding import OpenGroup, Outstanding
from tailrace.scheduling.settings import OnStraggler, SchedulingSettings
from tailrace.scheduling.staleness import Stop

REQUEUED = "requeued"
STRAGGLER = "straggler"

_STOPS: dict[OnStraggler, Stop] = {
    "requeue": Stop(REQUEUED, restarts_task=True),
    "drop": Stop(STRAGGLER, restarts_task=False),
}
"""Of the choices that stop a group."""

HELD_AT_ONCE = 64
"""Groups that are set aside in one turn of the event loop, by one look at what runs."""


class HoldsGroups(Protocol):
    """Sets the requests of whole groups aside with their tokens: `generation.holding.HoldingGenerate`."""

    async def hold(self, group_ids: Collection[str]) -> None:
        """Free the groups' slots and start none of their requests; returns once none of them runs."""

    def release(self, group_id: str) -> None:
        """Let its requests go on."""


class Stragglers:
    """Stops groups at the edge of a step, or sets them aside together and resumes them together.

    Raises `SettingsError` where they are to be set aside and there is no `holder`.
    """

    def __init__(self, outstanding: Outstanding, holder: HoldsGroups | None, settings: SchedulingSettings) -> None:
        self.are_held = settings.over_sampling > 1 and settings.on_straggler == "resume_next_step"
        """Whether each step waits for the weights of the one before, and what runs at its edge waits with it."""
        if self.are_held and holder is None:
            raise SettingsError("scheduling.on_straggler = 'resume_next_step' needs generators that set requests aside")
        self._outstanding, self._holder = outstanding, holder
        self._stop = _STOPS.get(settings.on_straggler) if settings.over_sampling > 1 else None
        self._groups: list[OpenGroup] = []

    @property
    def rollouts(self) -> int:
        """Rollouts that are set aside."""
        return sum(group.unfinished for group in self._groups)

    async def pass_edge(self) -> None:
        """A batch was sent. Waits until no group that is set aside holds a slot of the engines."""
        if self._stop is not None:
            for group in self._outstanding.groups:
                group.stop_running(self._stop)
        elif self.are_held:
            stopped = [group for group in self._outstanding.groups if group.is_running and not group.is_held]
            for group in stopped:
                self._outstanding.hold(group, True)
            self._groups += stopped
            await self._hold(stopped)

    def resume(self) -> None:
        """Every group that was set aside goes on."""
        for group in self._groups:
            self._outstanding.hold(group, False)
            assert self._holder is not None
            self._holder.release(group.group_id)
        self._groups.clear()

    async def _hold(self, groups: Sequence[OpenGroup]) -> None:
        async with asyncio.TaskGroup() as holding:
            for start in range(0, len(groups), HELD_AT_ONCE):
                holding.create_task(self._hold_some(groups[start : start + HELD_AT_ONCE]))
                await asyncio.sleep(0)

    async def _hold_some(self, groups: Sequence[OpenGroup]) -> None:
        """Those that were not resumed meanwhile."""
        assert self._holder is not None
        await self._holder.hold([group.group_id for group in groups if group.is_held])
