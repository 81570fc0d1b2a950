"""What a person sees while a run goes on: the live view on a terminal, quiet log lines anywhere else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text
from typing_extensions import override

from tailrace.reporting.formats import clock, compact, plural
from tailrace.reporting.live_rendering import run_screen
from tailrace.reporting.logs import RecentLines
from tailrace.reporting.run_view import Pace, RunView

_logger = logging.getLogger(__name__)

_REFRESHES_PER_S = 4.0
_PATIENCE_S = 30.0
"""Without progress for this long, the quiet mode says what the run waits for."""


def wants_live_view(live: str) -> bool:
    """Whether to take the terminal: `on`, `off`, or `auto` (standard output is a terminal that can draw the view)."""
    if live != "auto":
        return live == "on"
    console = Console()
    return sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal and "utf" in console.encoding


class _Screen(Console):
    """One that draws nothing more once its reader has left: rich's own ends the process."""

    @override
    def on_broken_pipe(self) -> None:
        self.quiet = True


class LiveView:
    """Shows `view()` until closed: `async with LiveView(view, terminal=...): ...`.

    Snapshots are taken on the event loop, four times a second, and drawn in a thread of their own. Nothing that goes
    wrong there reaches the run.
    """

    def __init__(
        self,
        view: Callable[[], RunView],
        *,
        terminal: bool,
        recent: RecentLines | None = None,
        log_every_s: float = 2.0,
        no_progress_s: float = 60.0,
        console: Console | None = None,
    ) -> None:
        self._take = view
        self._recent = recent
        self._view = view()
        self._pace = Pace()
        self._lines = QuietLines(log_every_s)
        self._watchdog = Watchdog(no_progress_s)
        self._console = console or _Screen()
        live = Live(console=self._console, get_renderable=self._render, refresh_per_second=_REFRESHES_PER_S)
        live.vertical_overflow = "crop"
        self._live = live if terminal else None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LiveView:
        if self._live is not None:
            try:
                self._live.start()
            except OSError as lost:
                _logger.info("there is no live view: %s", lost)
                self._live = None
        self._task = asyncio.create_task(self._refresh(), name="live-view")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            self._snapshot(last=True)
        finally:
            self.release_terminal()

    def follow(self, view: Callable[[], RunView]) -> None:
        """From now on show what this gives."""
        self._take = view

    def release_terminal(self) -> None:
        """Stop drawing and give the cursor back. May be called twice."""
        if self._live is None:
            return
        try:
            self._live.stop()
        except OSError as lost:
            _logger.info("the terminal went away: %s", lost)

    def abandon_terminal(self) -> None:
        """Give the cursor back where the process ends at once, from a signal's handler: past all locks.

        The thread that draws may hold its own and wait for one that the interrupted code holds.
        """
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, a stream that is closed
                os.write(self._console.file.fileno(), b"\n\x1b[?25h")

    async def _refresh(self) -> None:
        pause_s = 1 / _REFRESHES_PER_S
        while True:
            await asyncio.sleep(pause_s)
            self._snapshot(pause_s)

    def _snapshot(self, pause_s: float = 0.0, *, last: bool = False) -> None:
        view = self._view = self._take()
        self._pace.observe(view.step, view.elapsed_s)
        if (stuck := self._watchdog.next(view, pause_s)) is not None:
            _logger.warning("%s", stuck)
        if self._live is None:
            line = self._lines.next(view, self._pace.remaining_s(view.max_steps, view.elapsed_s), last=last)
            if line is not None:
                _logger.info("%s", line)

    def _render(self) -> RenderableType:
        try:
            view, (width, height) = self._view, self._console.size
            recent = () if self._recent is None else self._recent.lines
            remaining_s = self._pace.remaining_s(view.max_steps, view.elapsed_s)
            return run_screen(view, width, height, remaining_s=remaining_s, log_lines=recent)
        except (ArithmeticError, TypeError, ValueError) as error:
            return Text(f"the live view cannot show this: {error}", style="dim")


class QuietLines:
    """Decides when the quiet mode speaks: once a step, at most every `every_s`, and when nothing moves for long."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._step = 0
        self._spoken_s = float("-inf")

    def next(self, view: RunView, remaining_s: float | None, *, last: bool = False) -> str | None:
        """The line to log for this snapshot, or None. `last`: the final one, which is never held back."""
        since_s = view.elapsed_s - self._spoken_s
        moved = view.step != self._step
        if moved and (last or since_s >= self._every_s):
            self._step, self._spoken_s = view.step, view.elapsed_s
            return progress_line(view, remaining_s)
        if not moved and not last and view.waiting_for and since_s >= _PATIENCE_S:
            self._spoken_s = view.elapsed_s
            begun = f"step {view.step:,}" if view.has_begun else "starting"
            return f"{begun} · {clock(view.elapsed_s)} · waiting: {view.waiting_for}"
        return None


class Stillness:
    """For how long nothing has moved, in looks at the run.

    While this process stands still itself, suspended or held by somebody's code, nobody looks, and that is not counted:
    what moved meanwhile is read after.
    """

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._still_s = 0.0

    def look(self, view: RunView, pause_s: float) -> float:
        """Seconds, up to this snapshot, which is taken `pause_s` after the one before; the first counts as moved."""
        seen = (
            *(view.stage, view.step, view.policy_version, view.rollouts_trained, view.rollouts_filtered),
            *(view.in_flight, view.running_rollouts, view.ready_groups, view.queued_batches),
            *(sum(view.failures.values()), view.evaluating_step, view.evaluated_rollouts, view.moves),
        )
        before, self._seen = self._seen, seen
        self._still_s = 0.0 if seen != before else self._still_s + pause_s
        return self._still_s


def describe_stillness(view: RunView, still_s: float) -> str:
    """For people: which stage the run waits for."""
    waits = f"; the run waits for {view.waiting_for}" if view.waiting_for else ""
    return f"nothing has moved for {clock(still_s)}{waits}"


class Watchdog:
    """Says, every `limit_s` without an event, which stage the run waits for.

    >>> watchdog = Watchdog(1.0)
    >>> [watchdog.next(RunView(name="demo", waiting_for="8 rollouts to finish"), 0.5) for _ in range(3)]
    [None, None, 'nothing has moved for 0:01; the run waits for 8 rollouts to finish']
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._stillness = limit_s, Stillness()
        self._warned_s = 0.0
        """How long nothing had moved at the last warning."""

    def next(self, view: RunView, pause_s: float) -> str | None:
        """The warning for this snapshot, which is taken `pause_s` after the one before, or None."""
        still_s = self._stillness.look(view, pause_s)
        self._warned_s = min(self._warned_s, still_s)
        if still_s - self._warned_s < self._limit_s:
            return None
        self._warned_s = still_s
        return describe_stillness(view, still_s)


def progress_line(view: RunView, remaining_s: float | None = None) -> str:
    """One step in one line.

    >>> from tailrace.reporting.curves import Curve
    >>> rewards = Curve.of([0.2, 0.3])
    >>> view = RunView(name="demo", step=3, max_steps=60, rewards=rewards, reward_std=0.1, staleness_mean=0.8)
    >>> progress_line(view, 65.0)
    'step 3 of 60 · reward 0.300 ± 0.100 · staleness 0.8 mean, 0 max · 1:05 left'
    """
    parts = [f"step {view.step:,}" + (f" of {view.max_steps:,}" if view.max_steps else "")]
    if view.skipped_steps:
        parts.append(f"{plural(view.skipped_steps, 'step')} skipped")
    if view.rewards.newest is not None:
        spread = "" if view.reward_std is None else f" ± {view.reward_std:.3f}"
        parts.append(f"reward {view.rewards.newest:.3f}{spread}")
    parts += [f"held-out {environment} {reward:.3f}" for environment, reward in view.held_out.items()]
    if view.generation_tokens_per_s.newest is not None:
        parts.append(f"generated {compact(view.generation_tokens_per_s.newest)} tokens/s")
    if view.training_tokens_per_s.newest is not None:
        parts.append(f"trained {compact(view.training_tokens_per_s.newest)} tokens/s")
    parts.append(f"staleness {view.staleness_mean:.1f} mean, {view.staleness_max} max")
    if failed := sum(view.failures.values()):
        parts.append(f"{failed:,} failed")
    if remaining_s is not None:
        parts.append(f"{clock(remaining_s)} left")
    return " · ".join(parts)
