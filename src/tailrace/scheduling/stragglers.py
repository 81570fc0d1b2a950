"""Groups that stop at the edge of a step and go on in the next one (`on_straggler = resume_next_step`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tailrace.errors import SettingsError
from tailrace.scheduling.groups import HoldsGroups, OpenGroup
from tailrace.scheduling.settings import SchedulingSettings

HELD_AT_ONCE = 64
"""Groups that engines are asked for before the event loop may turn to others."""


class Stragglers:
    """Set aside together, resumed together. Raises `SettingsError` when they have to and nobody can hold them."""

    def __init__(self, holder: HoldsGroups | None, settings: SchedulingSettings) -> None:
        self.are_held = settings.over_sampling > 1 and settings.on_straggler == "resume_next_step"
        """Whether each step waits for the weights of the one before, and what runs at its edge waits with it."""
        if self.are_held and holder is None:
            raise SettingsError("scheduling.on_straggler = 'resume_next_step' needs generators that set requests aside")
        self._holder = holder
        self._groups: list[OpenGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rollouts(self) -> int:
        """That are set aside."""
        return sum(group.unfinished for group in self._groups)

    def set_aside(self, groups: Iterable[OpenGroup]) -> list[OpenGroup]:
        """Those of the groups in which agents run; from now on they take no slot of the engines."""
        stopped = [group for group in groups if group.is_playing and not group.is_held]
        for group in stopped:
            group.is_held = True
        self._groups += stopped
        return stopped

    async def hold(self, groups: Iterable[OpenGroup]) -> None:
        """Waits until the engines have let go of them."""
        assert self._holder is not None
        async with asyncio.TaskGroup() as holding:
            for number, group in enumerate(groups, 1):
                holding.create_task(self._holder.hold(group.group_id))
                if number % HELD_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def resume(self) -> int:
        """All of them go on; how many rollouts that are."""
        assert self._holder is not None
        rollouts = self.rollouts
        for group in self._groups:
            group.is_held = False
            self._holder.release(group.group_id)
        self._groups.clear()
        return rollouts
