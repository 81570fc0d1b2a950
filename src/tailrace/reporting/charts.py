"""Charts of a report: matplotlib draws, the page's style sheet colours (light and dark).

Every colour in an SVG is a placeholder that is replaced by a CSS variable, so that one drawing serves both schemes.
Text stays text. matplotlib is imported when the first chart is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.reporting.formats import compact
from tailrace.reporting.run_folder import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class _Palette:
    """Colours of one rendering."""

    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


_PAGE = _Palette("#010101", "#010102", "#010103", ("#010111", "#010112", "#010113", "#010114", "#010115"))
"""Placeholders for the style sheet's variables."""
_PRINT = _Palette("#1c2a33", "#64748b", "#e3e9ee", ("#0e8a87", "#5a7fb8"))
"""For the PNG, which has no style sheet."""
_CSS_VARIABLES = {
    _PAGE.ink: "var(--ink)",
    _PAGE.muted: "var(--muted)",
    _PAGE.grid: "var(--grid)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(_PAGE.series, start=1)},
}

_STROKES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
"""Strokes of lines, and marks of those of a single point: the next one where each colour was had once more."""

_REACH = 4
"""Steps on either side that the smoothed reward averages over."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    label: str
    series: Series


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """What a line's colour and stroke mean, and its newest value."""

    label: str
    css_class: str
    latest: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure of the report."""

    title: str
    unit: str
    svg: str
    """Markup without scripts or references; its only text comes from numbers."""
    legend: Sequence[LegendEntry]


def line_chart(
    title: str, unit: str, lines: Sequence[Line], *, show: Callable[[float], str] = compact, logarithmic: bool = False
) -> Chart | None:
    """Lines over steps; None where no line has a point. `show` writes values of the y axis and the legend."""
    drawn = [line for line in lines if line.series.values]
    if not drawn:
        return None
    with _style(_PAGE):
        figure, axes = _figure(4.9, 2.1)
        for place, line in enumerate(drawn):
            stroke, point = _STROKES[_stroke_of(place)]
            axes.plot(
                line.series.steps,
                line.series.values,
                color=_PAGE.series[place % len(_PAGE.series)],
                linestyle=stroke,
                linewidth=1.6,
                marker=point if len(line.series.values) == 1 else "",
                markersize=3,
            )
        has_positive = any(value > 0 for line in drawn for value in line.series.values)
        _finish(axes, _PAGE, show, logarithmic=logarithmic and has_positive)
        svg = _svg(figure, title)
    legend = [LegendEntry(line.label, _css(place), show(line.series.values[-1])) for place, line in enumerate(drawn)]
    return Chart(title, unit, svg, legend)


def _stroke_of(place: int) -> int:
    return place // len(_PAGE.series) % len(_STROKES)


def _css(place: int) -> str:
    return f"series-{1 + place % len(_PAGE.series)} stroke-{_stroke_of(place)}"


def reward_chart(reward: Series, spread: Series) -> Chart | None:
    """The reward per step, its smoothed course and its spread; None without a point."""
    if not reward.values:
        return None
    with _style(_PAGE):
        figure, axes = _figure(10.2, 3.1)
        _draw_reward(axes, _PAGE, reward, spread)
        svg = _svg(figure, "reward")
    legend = [LegendEntry("training", "series-1", f"{reward.values[-1]:.3f}")]
    return Chart("Reward", "dots: mean per step; line: smoothed; band: standard deviation", svg, legend)


def reward_png(reward: Series, spread: Series, title: str) -> bytes | None:
    """The reward curve as a picture; None without a point."""
    if not reward.values:
        return None
    with _style(_PRINT):
        figure, axes = _figure(8.0, 4.0)
        _draw_reward(axes, _PRINT, reward, spread)
        axes.set_title(title, loc="left", color=_PRINT.ink, fontsize=11, pad=12, parse_math=False)
        axes.set_xlabel("step", color=_PRINT.muted)
        axes.set_ylabel("mean reward", color=_PRINT.muted)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return buffer.getvalue()


def _draw_reward(axes: Axes, palette: _Palette, reward: Series, spread: Series) -> None:
    smoothed = _smoothed(reward.values)
    by_step = dict(zip(spread.steps, spread.values, strict=True))
    low = [value - by_step.get(step, 0.0) for step, value in zip(reward.steps, smoothed, strict=True)]
    high = [value + by_step.get(step, 0.0) for step, value in zip(reward.steps, smoothed, strict=True)]
    axes.fill_between(reward.steps, low, high, color=palette.series[0], alpha=0.12, linewidth=0)
    axes.plot(reward.steps, reward.values, ".", color=palette.series[0], alpha=0.45, markersize=4)
    axes.plot(reward.steps, smoothed, color=palette.series[0], linewidth=2.2)
    _finish(axes, palette, lambda value: f"{value:g}")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred triangular average: it smooths without lagging behind; near the ends the window shrinks."""
    smooth = []
    for centre in range(len(values)):
        reach = min(_REACH, centre, len(values) - 1 - centre)
        window = values[centre - reach : centre + reach + 1]
        weights = [reach + 1 - abs(offset) for offset in range(-reach, reach + 1)]
        smooth.append(sum(weight * value for weight, value in zip(weights, window, strict=True)) / sum(weights))
    return smooth


def _style(palette: _Palette) -> AbstractContextManager[None]:
    import matplotlib as mpl

    return mpl.rc_context({
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 8,
        "axes.edgecolor": palette.grid,
        "axes.linewidth": 0.8,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "text.parse_math": False,
    })  # fmt: skip


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(axes: Axes, palette: _Palette, show: Callable[[float], str], *, logarithmic: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        low, high = axes.get_ylim()
        if low > 0 and low < 0.5 * high:
            axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5)
    axes.margins(x=0.015)


def _svg(figure: Figure, key: str) -> str:
    """The drawing as markup for the middle of a page: no prologue, no metadata, ids of its own, colours by variable."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
    prefix = re.sub(r"\W", "", key.lower())
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img" aria-hidden="true">', svg, count=1)
    for placeholder, variable in _CSS_VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    return svg.strip()
