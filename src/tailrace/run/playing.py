"""What commands that play rollouts without training have in common: `tailrace eval` and `tailrace try`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from tailrace.config import RunSettings, with_scaled_deadlines, without_training
from tailrace.lifecycle.event_loop import first_done
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter
from tailrace.run.orchestrator import root_cause
from tailrace.run.outside import require_inside
from tailrace.run.parts import make_renderer, open_rollouter, with_own_judges, within_own_context
from tailrace.run.started_roles import Watch, open_generate

ResultT = TypeVar("ResultT")
ReportProgress: TypeAlias = Callable[[str], None]
_REPORT_EVERY_S = 10.0


@dataclass(slots=True)
class Progress:
    """Of the rollouts of one environment."""

    environment: str
    total: int
    ended: int = 0

    def one_ended(self) -> None:
        """Another finished or was lost."""
        self.ended += 1


@dataclass(frozen=True, slots=True)
class Playing:
    """What rollouts are played with, until its block ends."""

    settings: RunSettings
    """As a run would have them: within the model's own context, deadlines scaled; with the generators that play."""
    renderer: ChatRenderer
    rollouter: Rollouter
    report_progress: ReportProgress | None
    """Called with a line for people."""
    _failed: Watch

    async def within(self, work: Coroutine[Any, Any, ResultT], progress: Progress) -> ResultT:
        """What `work` returns, unless all generators fail before: raises that. `progress` is reported every 10 s."""
        return await first_done(self._failed(), self._report(progress), work)

    async def _report(self, progress: Progress) -> NoReturn:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            if self.report_progress is not None:
                ended = f"{progress.ended} of {progress.total} rollouts have ended"
                self.report_progress(f"{progress.environment}: {ended}, {clock() - began_s:.0f} s")


@asynccontextmanager
async def playing(
    settings: RunSettings,
    environments: Mapping[str, LoadedEnvironment],
    command: str,
    report_progress: ReportProgress | None,
) -> AsyncIterator[Playing]:
    """Generators and a started rollouter over these environments; what its block raises in groups is raised once.

    Raises `ModelError` and `SettingsError` for what a run would be refused for, what `Rollouter.start` raises, and what
    all generators failed with.
    """
    require_inside(environments, f"tailrace {command}")
    with tempfile.TemporaryDirectory(prefix=f"tailrace-{command}-") as temporary:
        folder = Path(temporary)
        renderer = await asyncio.to_thread(make_renderer, settings, folder)
        settings = with_scaled_deadlines(within_own_context(settings, renderer))
        untrained = without_training(settings)
        settings = settings.model_copy(update={"generator": untrained.generator})
        async with (
            open_generate(with_own_judges(untrained, environments), folder) as (generate, failed),
            open_rollouter(settings, environments, renderer=renderer, generate=generate) as rollouter,
        ):
            try:  # all rollouts meet the failure of their generators
                await rollouter.start()
                yield Playing(settings, renderer, rollouter, report_progress, failed)
            except ExceptionGroup as group:
                raise root_cause(group) from group
