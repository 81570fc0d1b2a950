"""What a phase took: sums, and how long at a time it held the event loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_UNNOTICED_NS = 1 << 14
LONG_NS = 200_000
"""Stretches of this many nanoseconds on average are worth asking the system for their CPU time."""
_LONGEST_COUNTED_NS = 4 * LONG_NS
"""What a longer one counts for in that average."""


@dataclass(frozen=True, slots=True)
class PhaseUsage:
    """What one phase took between two flushes."""

    count: int = 0
    """Times that it ended."""
    wall_s: float = 0.0
    """Summed over concurrent ones, less the phases inside."""
    cpu_s: float = 0.0
    held_s: float = 0.0
    """Of the event loop's time."""
    num_bytes: int = 0
    holds: dict[int, int] = field(default_factory=dict)
    """How often it held the event loop for how long at a time, by `duration_bucket`."""
    held_max_s: float = 0.0
    """The longest at a time."""

    def merged(self, other: PhaseUsage) -> PhaseUsage:
        """Of both: two threads', or two steps'."""
        return PhaseUsage(
            count=self.count + other.count,
            wall_s=self.wall_s + other.wall_s,
            cpu_s=self.cpu_s + other.cpu_s,
            held_s=self.held_s + other.held_s,
            num_bytes=self.num_bytes + other.num_bytes,
            holds=dict(Counter(self.holds) + Counter(other.holds)),
            held_max_s=max(self.held_max_s, other.held_max_s),
        )

    def lag_s(self, share: float) -> float:
        """The quantile of the times that it held the loop: what others were late by. Within 25 %; 0 for never."""
        wanted, seen = share * sum(self.holds.values()), 0
        for bucket in sorted(self.holds):
            seen += self.holds[bucket]
            if seen >= wanted:
                return min(bucket_end_ns(bucket) / 1e9, self.held_max_s)
        return 0.0

    def metrics(self, name: str) -> dict[str, float]:
        """By name, for the accumulator. What never happened is left out."""
        found = {"wall_s": self.wall_s, "cpu_s": self.cpu_s, "count": float(self.count)}
        if self.num_bytes:
            found["moved_bytes"] = float(self.num_bytes)
        if self.holds:
            found |= {"held_s": self.held_s, "lag_max_s": self.held_max_s}
            found |= {f"lag_p{percent}_s": self.lag_s(percent / 100) for percent in (50, 90, 99)}
        return {f"phase/{name}/{key}": value for key, value in found.items()}


def duration_bucket(duration_ns: int) -> int:
    """Four buckets to each doubling; one for all that no event loop would notice.

    >>> [bucket_end_ns(duration_bucket(duration_ns)) for duration_ns in (0, 100_000, 1_000_000)]
    [16384, 114688, 1048576]
    """
    if duration_ns < _UNNOTICED_NS:
        return 0
    octave = duration_ns.bit_length()
    return (octave << 2) + ((duration_ns >> (octave - 3)) & 3)


def bucket_end_ns(bucket: int) -> int:
    """The first duration that is too long for a bucket."""
    return (5 + (bucket & 3)) << ((bucket >> 2) - 3) if bucket else _UNNOTICED_NS


@dataclass(slots=True)
class PhaseTotals:
    """One phase in one thread, since its beginning. Written by that thread, read by the one that flushes."""

    held_ns: int = 0
    _count: int = 0
    _wall_ns: int = 0
    _cpu_ns: int = 0
    _num_bytes: int = 0
    _turn: int = -1
    _turn_ns: int = 0
    mean_ns: int = 0
    """How long it runs at a time, lately."""
    _holds: dict[int, int] = field(default_factory=dict)
    _longest_ns: int = 0
    _flushed: PhaseUsage = PhaseUsage()

    def add(self, ran_ns: int, cpu_ns: int, turn: int) -> None:
        """It ran for a while; in this turn of the event loop's, or in a thread of its own (-1)."""
        self._cpu_ns += cpu_ns
        # A stretch that another process interrupted is one among many: alone it makes no phase a long one.
        counted_ns = ran_ns if ran_ns < _LONGEST_COUNTED_NS else _LONGEST_COUNTED_NS  # `min` takes thrice as long
        self.mean_ns += (counted_ns - self.mean_ns) >> 3
        if turn < 0:
            return
        self.held_ns += ran_ns
        if turn == self._turn:
            self._turn_ns += ran_ns
            return
        if self._turn >= 0:
            self._end_turn()
        self._turn, self._turn_ns = turn, ran_ns

    def end(self, wall_ns: int, num_bytes: int) -> None:
        """One of its stretches has ended."""
        self._count += 1
        self._wall_ns += wall_ns
        self._num_bytes += num_bytes

    def flush(self) -> PhaseUsage | None:
        """Since the last flush; None where nothing happened."""
        if self._turn >= 0:
            self._end_turn()
        self._turn = -1
        before = self._flushed
        now = self._flushed = PhaseUsage(
            count=self._count,
            wall_s=self._wall_ns / 1e9,
            cpu_s=self._cpu_ns / 1e9,
            held_s=self.held_ns / 1e9,
            num_bytes=self._num_bytes,
            holds=dict(self._holds),
        )
        longest_ns, self._longest_ns = self._longest_ns, 0
        since = PhaseUsage(
            count=now.count - before.count,
            wall_s=now.wall_s - before.wall_s,
            cpu_s=now.cpu_s - before.cpu_s,
            held_s=now.held_s - before.held_s,
            num_bytes=now.num_bytes - before.num_bytes,
            holds=dict(Counter(now.holds) - Counter(before.holds)),
            held_max_s=longest_ns / 1e9,
        )
        return since if since.count or since.cpu_s or since.held_s else None

    def _end_turn(self) -> None:
        turn_ns = self._turn_ns
        bucket = 0 if turn_ns < _UNNOTICED_NS else duration_bucket(turn_ns)
        self._holds[bucket] = self._holds.get(bucket, 0) + 1
        if turn_ns > self._longest_ns:  # noqa: PLR1730 - `max` takes four times as long
            self._longest_ns = turn_ns
