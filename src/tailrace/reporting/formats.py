"""Numbers as people read them; shared by the live view, the summary and the report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

NOTHING = "–"
"""Shown where there is no value yet."""

_BLOCKS = "▁▂▃▄▅▆▇█"


def clock(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> clock(72), clock(3_725)
    ('1:12', '1:02:05')
    """
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds(value: float) -> str:
    """A short duration with its unit.

    >>> seconds(0.00042), seconds(0.034), seconds(1.26), seconds(75), seconds(0)
    ('0.4 ms', '34 ms', '1.3 s', '75 s', '0 ms')
    """
    if value < 0.00005:
        return "0 ms"
    if value < 0.01:
        return f"{value * 1000:.1f} ms"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 60 else f"{value:,.0f} s"


def compact(value: float) -> str:
    """A count, exact while it is small.

    >>> compact(950), compact(4_210), compact(48_200), compact(3_400_000)
    ('950', '4,210', '48.2 k', '3.4 M')
    """
    if not math.isfinite(value):
        return NOTHING
    for limit, scale, unit in ((10_000, 1, ""), (1_000_000, 1e3, " k"), (1_000_000_000, 1e6, " M")):
        if abs(value) < limit:
            return f"{value:,.0f}" if scale == 1 else f"{value / scale:.1f}{unit}"
    return f"{value / 1e9:.1f} G"


def num_bytes(value: float) -> str:
    """A size in memory.

    >>> num_bytes(512), num_bytes(1_288_490_189)
    ('512 B', '1.2 GiB')
    """
    for unit, digits in (("B", 0), ("KiB", 0), ("MiB", 0)):
        if value < 1024:
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


def share(value: float) -> str:
    """A share of 0 to 1.

    >>> share(0.1234), share(0), share(0.0004)
    ('12.3 %', '0 %', '< 0.1 %')
    """
    if 0 < value < 0.001:
        return "< 0.1 %"
    return f"{value:.1%}".replace(".0%", "%").replace("%", " %")


def plural(count: int, noun: str) -> str:
    """A counted noun.

    >>> plural(1, "batch", ), plural(2, "batch"), plural(3, "group")
    ('1 batch', '2 batches', '3 groups')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{ending}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of blocks, lowest to highest, at most `width` wide: neighbours are averaged where there are more values.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    points = _averaged(finite, width)
    low, spread = min(points), max(points) - min(points)
    if spread < 1e-9:
        return _BLOCKS[2] * len(points)
    return "".join(_BLOCKS[min(7, int((point - low) / spread * 8))] for point in points)


def block_chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """The same over several rows, from the top, and as wide as asked: a curve.

    >>> block_chart([0, 1, 2, 3], 4, 2), block_chart([0, 1], 6, 1)
    (['  ▃█', '▁▆██'], ['▁▁▁███'])
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return [""] * height
    points = _averaged(finite, width)
    points = [points[column * len(points) // width] for column in range(width)]
    low, spread = min(points), max(points) - min(points)
    eighths = [1 + int((point - low) / spread * (8 * height - 1)) if spread > 1e-12 else 4 for point in points]
    bases = range(8 * (height - 1), -1, -8)
    return ["".join((" " + _BLOCKS)[min(8, max(0, count - base))] for count in eighths) for base in bases]


def _averaged(values: Sequence[float], width: int) -> Sequence[float]:
    if len(values) <= width:
        return values
    edges = [index * len(values) // width for index in range(width + 1)]
    return [math.fsum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
