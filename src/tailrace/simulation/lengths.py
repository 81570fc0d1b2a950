"""How long completions are: drawn by name, so that a completion that is interrupted keeps its length."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

from tailrace.errors import DataError
from tailrace.simulation.draws import standard_normal, uniform
from tailrace.simulation.settings import EmpiricalLengths, LengthSettings, LognormalLengths, MixtureLengths, MixturePart

_NORMAL = NormalDist()
_REMEMBERED = 8192
"""Lengths cached, since each is soon drawn again, with the same result."""


class LengthSource:
    """Lengths in tokens, at least 1. The rollouts of one task share a part of what makes them long.

    >>> source = LengthSource(LognormalLengths(mean_log=6.0, sigma=1.2, task_sigma=0.7, cap=16_384), seed=0)
    >>> source.draw("task", "task#1.0.0/0/1") == source.draw("task", "task#1.0.0/0/1")
    True
    """

    def __init__(self, settings: LengthSettings, *, seed: int) -> None:
        self._seed = seed
        self._settings = settings
        self._observed = _read(settings.file) if isinstance(settings, EmpiricalLengths) else []
        self._cached_draw = lru_cache(_REMEMBERED)(self._draw)

    def draw(self, task: str, completion: str) -> int:
        """The length of a completion of a task, by their names."""
        return self._cached_draw(task, completion)

    def _draw(self, task: str, completion: str) -> int:
        match self._settings:
            case LognormalLengths():
                return self._lognormal(self._settings, task, completion)
            case MixtureLengths():
                return self._lognormal(self._choose(self._settings, completion), task, completion)
            case EmpiricalLengths():
                return self._observed[int(uniform(self._seed, "length", completion) * len(self._observed))]

    @property
    def mean(self) -> float:
        """Expected tokens of one completion."""
        match self._settings:
            case LognormalLengths():
                return _mean(self._settings)
            case MixtureLengths():
                return math.fsum(share * _mean(part.lengths) for share, part in _shares(self._settings))
            case EmpiricalLengths():
                return math.fsum(self._observed) / len(self._observed)

    def _choose(self, mixture: MixtureLengths, completion: str) -> LognormalLengths:
        left = uniform(self._seed, "part", completion)
        for share, part in _shares(mixture):
            left -= share
            if left < 0:
                return part.lengths
        return mixture.parts[-1].lengths

    def _lognormal(self, lengths: LognormalLengths, task: str, completion: str) -> int:
        log = lengths.mean_log
        if lengths.task_sigma:
            log += lengths.task_sigma * standard_normal(self._seed, "task", task)
        log += lengths.own_sigma * standard_normal(self._seed, "length", completion)
        return max(1, min(lengths.cap, round(math.exp(log))))


def _shares(mixture: MixtureLengths) -> list[tuple[float, MixturePart]]:
    total = math.fsum(part.weight for part in mixture.parts)
    return [(part.weight / total, part) for part in mixture.parts]


def _mean(lengths: LognormalLengths) -> float:
    """Of a lognormal variable cut off at `cap`: E[X; X < c] + c P(X >= c), rounding left out."""
    cap, mean_log, sigma = lengths.cap, lengths.mean_log, lengths.sigma
    if sigma == 0:
        return min(float(cap), math.exp(mean_log))
    at_cap = (math.log(cap) - mean_log) / sigma
    below = math.exp(mean_log + sigma**2 / 2) * _NORMAL.cdf(at_cap - sigma)
    return below + cap * (1 - _NORMAL.cdf(at_cap))


def _read(file: Path) -> list[int]:
    """One length a line. Raises `DataError`."""
    try:
        lengths = [int(line) for line in file.read_text(encoding="utf-8").split()]
    except OSError as error:
        raise DataError(f"cannot read the lengths in {file}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{file} must hold one length in tokens a line, whole numbers: {error}") from error
    if not lengths or min(lengths) < 1:
        raise DataError(f"{file} must hold at least one length, and only lengths of 1 or above")
    return lengths
