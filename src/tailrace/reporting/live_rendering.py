"""A `RunView` as text for a terminal: quiet labels, one accent, bars that can be compared at a glance."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tailrace.records import Rollout
from tailrace.reporting.advice import Advice
from tailrace.reporting.conversations import conversation_lines
from tailrace.reporting.curves import Curve
from tailrace.reporting.formats import (
    NOTHING,
    block_chart,
    clock,
    compact,
    num_bytes,
    plural,
    seconds,
    share,
    sparkline,
)
from tailrace.reporting.run_view import RunView

_ACCENT = "#2aa198"
_SECOND = "#6c9fd4"
_GOOD, _WARN, _BAD = "green", "yellow", "red"
_LABEL = "bright_black"
_TRACK = "grey23"
_TWO_COLUMNS = 112
_SPARK_WIDTH = 24
_LABELS = 9
_ROOMY = 70
"""Columns from which one side of the view has room for long figures."""
_LEAST_BAR = 10
_COURSES = {"KL": "training/kl", "entropy": "training/entropy", "gradient": "training/grad_norm"}
_LEAST_CURVE_ROWS, _MOST_CURVE_ROWS = 6, 10
_LEAST_CURVE = 34
"""Columns that a curve needs."""
_LEAST_CONVERSATION = 5
"""Rows that are worth one."""
_BAR_WIDTH = 16
_MOST_ADVICE = 3


def run_screen(
    view: RunView, width: int, height: int, *, remaining_s: float | None = None, log_lines: Sequence[str] = ()
) -> RenderableType:
    """The whole live view, laid out for a terminal: side by side where it is wide, more of the run where it is tall.

    First the figures, then the newest log lines, curves, and a conversation, as far as there are rows.
    """
    wide = width >= _TWO_COLUMNS
    column = (width - 8) // 2 if wide else width - 4
    learning, flow = _learning(view, column), _flow(view, column)
    progress, stage = _progress(view, remaining_s, width)
    parts: list[RenderableType] = [
        Text(),
        _header(view),
        progress,
        *stage,
        Text(),
        Padding(_beside(learning, flow) if wide else Group(learning, flow), (0, 2)),
    ]
    rows = len(stage) + (max(learning.row_count, flow.row_count) if wide else learning.row_count + flow.row_count)
    advice = [_advice(one, width) for one in view.advice[: max(0, min(_MOST_ADVICE, height - 6 - rows))]]
    if advice:
        parts += [Text(), *advice]
        rows += len(advice) + 1
    spare = height - 5 - rows  # one row is the cursor's
    shown = log_lines[max(0, len(log_lines) - max(0, spare - 1)) :]
    spare -= len(shown) + 1 if shown else 0
    curve_rows = min(_MOST_CURVE_ROWS, max(_LEAST_CURVE_ROWS, spare // 3))
    if spare >= curve_rows + 2 and view.rewards.newest is not None:
        parts += [Text(), _curves(view, width, curve_rows)]
        spare -= curve_rows + 2
    if spare >= _LEAST_CONVERSATION and view.sample is not None:
        parts += [Text(), _conversation(view.sample, width, spare - 1)]
    if shown:
        parts.append(Padding(Rule(style=_TRACK), (0, 2)))
        parts.extend(_log_line(line, width) for line in shown)
    return Group(*parts)


def _header(view: RunView) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    left = Text.assemble(("≋ ", _ACCENT), ("tailrace", f"bold {_ACCENT}"), ("  ", ""), (view.name, "bold"))
    about = " · ".join(part for part in (view.model, ", ".join(view.environments)) if part)
    grid.add_row(left, Text(about, style=_LABEL, overflow="ellipsis"))
    return Padding(grid, (0, 2))


def _progress(view: RunView, remaining_s: float | None, width: int) -> tuple[Text, list[Text]]:
    """How far the run is, and the lines below it: where it stands, if there is no room for that beside the bar."""
    of = f" of {view.max_steps:,}" if view.max_steps else ""
    left = f" · {clock(remaining_s)} left" if remaining_s is not None else ""
    step = (f"step {view.step:,}", of) if view.has_begun else ("starting", "")
    words = Text.assemble(
        (step[0], "bold"), (step[1], _LABEL), (f" · {clock(view.elapsed_s)}", _LABEL), (left, _ACCENT)
    )
    stage = view.waiting_for or ("" if view.stage in ("training", "starting") else view.stage)
    style, below = _WARN if view.waiting_for else "italic", []
    if stage and words.cell_len + 3 + cell_len(stage) + 6 + _LEAST_BAR > width:
        below = [Text(f"  {line}", style=style) for line in textwrap.wrap(stage, max(_LEAST_BAR, width - 4))]
    elif stage:
        words.append(f" · {stage}", style=style)
    full = view.max_steps or max(view.step, 1)
    bar = _bar(view.step / full, max(_LEAST_BAR, width - words.cell_len - 6), _ACCENT)
    return Text.assemble("  ", bar, "  ", words, no_wrap=True, overflow="ellipsis"), below


def _advice(one: Advice, width: int) -> Text:
    """What is wrong, and as much of what to change as the line has room for."""
    style = _BAD if one.severity == "alarm" else _WARN
    line = Text.assemble(("  ! ", f"bold {style}"), (one.seen, style), (f" → {one.change}", _LABEL))
    line.truncate(width - 1, overflow="ellipsis")
    return line


def _learning(view: RunView, width: int) -> Table:
    grid, (_, rest) = _grid(width), _widths(width)
    grid.add_row("reward", _reward(view), _spark(view.rewards, rest, _ACCENT))
    grid.add_row("", *_reward_detail(view))
    if view.held_out or view.evaluating_step is not None:
        grid.add_row("held out", *_held_out(view))
    grid.add_row("policy", Text.assemble(("version ", _LABEL), f"{view.policy_version:,}"), _newest(view, "entropy"))
    grid.add_row("update", *_update(view, rest))
    grid.add_row("staleness", *_staleness(view))
    grid.add_row("generate", _rate(view.generation_tokens_per_s), _spark(view.generation_tokens_per_s, rest, _SECOND))
    grid.add_row("train", _rate(view.training_tokens_per_s), _spark(view.training_tokens_per_s, rest, _SECOND))
    grid.add_row("rollout", *_rollout(view))
    return grid


def _flow(view: RunView, width: int) -> Table:
    grid, (_, rest) = _grid(width), _widths(width)
    grid.add_row("in flight", *_gauge(view.in_flight, view.in_flight_limit, "rollout", rest))
    grid.add_row("ready", *_gauge(view.ready_groups, view.groups_per_batch, "group", rest))
    memory = f"{num_bytes(view.rss_bytes)} of memory" if view.rss_bytes else ""
    grid.add_row("queued", _number(view.queued_batches, "batch", "es"), Text(memory, style=_LABEL))
    grid.add_row("running", _number(view.running_rollouts, "rollout", "s"), _replicas(view))
    grid.add_row("phases", *_phases(view))
    grid.add_row("loop lag", *_lag(view))
    grid.add_row("rollouts", *_outcomes(view))
    return grid


def _replicas(view: RunView) -> Text:
    """How many generators serve, where there may be more than one, and how many there may be."""
    if view.replicas_max == 1:
        return Text()
    bounds = f" of {view.replicas_max}"
    if view.replicas_min < view.replicas_max:
        bounds = f", of {view.replicas_min} to {view.replicas_max}"
    lost = f", {view.replica_losses} lost" if view.replica_losses else ""
    style = _WARN if view.replicas < view.replicas_min else ""
    return Text.assemble(("on ", _LABEL), (f"{view.replicas}", style), (f"{bounds} generators{lost}", _LABEL))


def _grid(width: int) -> Table:
    grid, (figures, rest) = Table.grid(padding=(0, 2)), _widths(width)
    grid.add_column(style=_LABEL, width=_LABELS, no_wrap=True)
    grid.add_column(width=figures, no_wrap=True)
    grid.add_column(width=rest, no_wrap=True, overflow="ellipsis")
    return grid


def _widths(width: int) -> tuple[int, int]:
    """Columns for figures (`120 of 320 rollouts`, where there is room `1,024 of 10.2 k rollouts`), and for the rest."""
    figures = 24 if width >= _ROOMY else 19
    return figures, max(8, width - _LABELS - figures - 4)


def _beside(left: RenderableType, right: RenderableType) -> RenderableType:
    grid = Table.grid(padding=(0, 4))
    grid.add_row(left, right)
    return grid


def _number(value: int, noun: str, ending: str = "") -> Text:
    return Text.assemble(compact(value), (f" {noun}{'' if value == 1 else ending}", _LABEL))


def _reward(view: RunView) -> Text:
    if view.rewards.newest is None:
        return Text(NOTHING, style=_LABEL)
    spread = "" if view.reward_std is None else f" ± {view.reward_std:.3f}"
    return Text.assemble((f"{view.rewards.newest:.3f}", f"bold {_ACCENT}"), (spread, _LABEL))


def _reward_detail(view: RunView) -> tuple[Text, Text]:
    first = "" if view.rewards.first is None else f"first {view.rewards.first:.3f}"
    even = "" if view.zero_spread_share is None else f"{share(view.zero_spread_share)} of groups without spread"
    return Text(first, style=_LABEL), Text(even, style=_LABEL)


def _held_out(view: RunView) -> tuple[Text, Text]:
    step = view.evaluating_step
    going_on = "" if step is None else f"step {step:,}: {plural(view.evaluated_rollouts, 'rollout')} done"
    if len(view.held_out) == 1:
        (reward,) = view.held_out.values()
        return Text(f"{reward:.3f}", style=_ACCENT), Text(going_on, style=_LABEL)
    rewards = Text()
    for environment, reward in view.held_out.items():
        rewards.append(f"{reward:.3f}", style=_ACCENT).append(f" {environment}  ", style=_LABEL)
    return Text(going_on.partition(":")[0], style=_LABEL), rewards


def _update(view: RunView, width: int) -> tuple[Text, Text]:
    """The newest step's learning rate, and how far it moved the policy: whole figures, as many as there is room for."""
    if view.learning_rate is None:
        return Text(NOTHING, style=_LABEL), Text()
    figures = [found for label in ("KL", "gradient") if (found := _newest(view, label))]
    moved = Text("  ").join(figures)
    if moved.cell_len > width:
        moved = figures[0]
    return Text.assemble(("rate ", _LABEL), f"{view.learning_rate:.3g}"), moved


def _newest(view: RunView, label: str) -> Text:
    """Of one of `_COURSES`; empty while there is nothing of it."""
    curve = view.curves.get(_COURSES[label])
    if curve is None or curve.newest is None:
        return Text()
    return Text.assemble((f"{label} ", _LABEL), f"{curve.newest:.2g}")


def _curves(view: RunView, width: int, rows: int) -> RenderableType:
    """As many as there is room for, each under its name, its newest value and its range."""
    courses = {"reward": view.rewards} | {label: view.curves.get(name, Curve()) for label, name in _COURSES.items()}
    count = max(1, min(len(courses), (width - 4) // _LEAST_CURVE))
    column = (width - 4 - 4 * (count - 1)) // count
    grid = Table.grid(padding=(0, 4, 0, 0), pad_edge=False)
    cells = []
    for label, curve in [*courses.items()][:count]:
        grid.add_column(width=column, no_wrap=True, overflow="crop")
        cells.append(_curve(label, curve, column, rows, _ACCENT if label == "reward" else _SECOND))
    grid.add_row(*cells)
    return Padding(grid, (0, 2))


def _curve(label: str, curve: Curve, width: int, rows: int, style: str) -> Text:
    span = f"  {curve.lowest:.3g} to {curve.highest:.3g}" if curve.points else f"  {NOTHING}"
    newest = "" if curve.newest is None else f" {curve.newest:.3g}"
    lines = block_chart(curve.points, width, rows)
    return Text.assemble((label, _LABEL), (newest, "bold"), (span, _LABEL), "\n", ("\n".join(lines), style))


def _conversation(rollout: Rollout, width: int, rows: int) -> RenderableType:
    """A rollout of the newest step, message by message, cut to `rows`."""
    wrapped = (textwrap.wrap(line, width - 4, subsequent_indent=" " * 13) for line in conversation_lines(rollout))
    lines = [*itertools.islice(itertools.chain.from_iterable(wrapped), rows + 1)]
    if len(lines) > rows:
        lines[rows - 1 :] = ["  …"]
    return Padding(Text("\n".join(lines), style=_LABEL, no_wrap=True, overflow="crop"), (0, 2))


def _staleness(view: RunView) -> tuple[Text, Text]:
    at_limit = view.max_staleness is not None and view.staleness_max >= view.max_staleness > 0
    words = Text.assemble(
        f"{view.staleness_mean:.1f}", (" mean · ", _LABEL), (f"{view.staleness_max}", _WARN if at_limit else ""),
        (" max", _LABEL),
    )  # fmt: skip
    return words, Text("" if view.max_staleness is None else f"at most {view.max_staleness}", style=_LABEL)


def _rate(curve: Curve) -> Text:
    if curve.newest is None or not math.isfinite(curve.newest):
        return Text(NOTHING, style=_LABEL)
    return Text.assemble(compact(curve.newest), (" tokens/s", _LABEL))


def _rollout(view: RunView) -> tuple[Text, Text]:
    if view.completion_tokens is None:
        return Text(NOTHING, style=_LABEL), Text()
    words = Text.assemble(compact(view.completion_tokens), (" tokens", _LABEL))
    return words, Text("" if view.turns is None else f"{view.turns:.1f} turns", style=_LABEL)


def _gauge(value: int, limit: int | None, noun: str, width: int) -> tuple[Text, Text]:
    of = "" if limit is None else f" of {compact(limit)}"
    words = Text.assemble(compact(value), (f"{of} {noun}s", _LABEL))
    return words, _bar(value / limit, min(_BAR_WIDTH, width), _SECOND) if limit else Text()


def _phases(view: RunView) -> tuple[Text, Text]:
    longest = sorted(view.phases_s.items(), key=lambda phase: -phase[1])[:4]
    if not longest:
        return Text(NOTHING, style=_LABEL), Text()
    words = Text.assemble(longest[0][0], (f" {seconds(longest[0][1])}", _LABEL))
    rest = Text()
    for name, duration_s in longest[1:]:
        rest.append(f"{name} ").append(f"{seconds(duration_s)}  ", style=_LABEL)
    return words, rest


def _lag(view: RunView) -> tuple[Text, Text]:
    lag = view.lag
    style = _GOOD if lag.max_s < 0.1 else _WARN if lag.max_s < 1.0 else _BAD
    words = Text.assemble((seconds(lag.max_s), style), (" max", _LABEL))
    rest = Text(f"p50 {seconds(lag.p50_s)} · p99 {seconds(lag.p99_s)}", style=_LABEL)
    if lag.stalls:
        rest.append(f" · {plural(lag.stalls, 'stall')}", style=_BAD)
    return words, rest


def _outcomes(view: RunView) -> tuple[Text, Text]:
    rest = Text(f"{compact(view.rollouts_filtered)} filtered", style=_LABEL)
    for reason, count in sorted(view.failures.items(), key=lambda failure: -failure[1]):
        rest.append(" · ", style=_LABEL).append(f"{count:,} {reason}", style=_BAD)
    return _number(view.rollouts_trained, "trained"), rest


def _spark(curve: Curve, width: int, style: str) -> Text:
    return Text(sparkline(curve.points, min(_SPARK_WIDTH, width)), style=style)


def _bar(filled: float, width: int, style: str) -> Text:
    """A thin bar; half steps come from the half line."""
    halves = round(min(max(filled, 0.0), 1.0) * width * 2)
    full, half = divmod(halves, 2)
    return Text.assemble(("━" * full, style), ("╸" * half, style), ("━" * (width - full - half), _TRACK))


def _log_line(line: str, width: int) -> Text:
    return Text(f"  {line}"[: width - 1], style=_LABEL, no_wrap=True, overflow="ellipsis")
