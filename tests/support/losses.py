"""Losses of users' own, as settings name them."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.training.losses import LossTokens, PointwiseLoss
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.settings.losses import ClippedRatioSettings


def overflowing(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """One that no gradient survives."""
    return logprobs * torch.inf, torch.ones_like(logprobs, dtype=torch.bool)


def of_weighing(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The default one, for the columns that the environment `weighing` sets; raises where they are not all there."""
    places, (numbers, counted) = tokens.columns["place"], tokens.columns["counted"].T
    rises = [bool((sample.diff() == 1).all()) for sample in places.split(tokens.sample_lengths.tolist())]
    assert all(rises)
    assert bool((places % 1 == 0.5).all())
    assert numbers.dtype is torch.int32
    assert bool(((numbers % 2 == 1) == (counted == 1)).all())
    assert 0 < int(counted.sum()) < len(counted)
    return ClippedRatio(ClippedRatioSettings())(logprobs, entropy, tokens)


def failing_on_rank_1(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The default one, which cannot judge the rows of one rank."""
    if torch.distributed.get_rank() == 1:
        raise ValueError("these rows cannot be judged")
    return ClippedRatio(ClippedRatioSettings())(logprobs, entropy, tokens)


def steep(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Finite, and its gradient is infinite for rows with an advantage above 50."""
    is_steep = bool((tokens.advantages > 50).any())
    losses = (logprobs - logprobs.detach()).sqrt() if is_steep else tokens.advantages * logprobs
    return losses, torch.ones_like(logprobs, dtype=torch.bool)


def enormous(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Finite, and so is every gradient, but not the norm of all."""
    return logprobs * 1e30, torch.ones_like(logprobs, dtype=torch.bool)


MARK = "TAILRACE_TEST_MARK"
"""Variable that names a file: what follows happens where it does not exist, and makes it."""

_calls = itertools.count()


def leaving(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The process leaves with status 0 in the middle of some step."""
    if next(_calls) >= 10 and _is_first():
        os._exit(0)
    return ClippedRatio(ClippedRatioSettings())(logprobs, entropy, tokens)


def dying(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The process is killed in the middle of some step."""
    if next(_calls) >= 4 and _is_first():
        os.kill(os.getpid(), signal.SIGKILL)
    return ClippedRatio(ClippedRatioSettings())(logprobs, entropy, tokens)


def dying_in_a_save(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The process is killed while it writes a checkpoint, of which some lies there."""
    from tailrace.training.checkpoints.files import StagedCheckpoint

    def write_and_die(staged: StagedCheckpoint) -> NoReturn:
        staged._write_rest(staged._temporary)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("is dead")

    if not next(_calls) and _is_first():
        StagedCheckpoint.write = write_and_die  # type: ignore[method-assign]
    return ClippedRatio(ClippedRatioSettings())(logprobs, entropy, tokens)


def fickle(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Not finite at its second call; the process is killed at the eighth. The next one is not finite at its third."""
    call, is_first = next(_calls), _is_first()
    if is_first and call == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    losses, kept = ClippedRatio(ClippedRatioSettings())(logprobs, entropy, tokens)
    return losses * (math.nan if call == 2 - is_first else 1.0), kept


@functools.cache
def _is_first() -> bool:
    mark = Path(os.environ[MARK])
    is_first = not mark.exists()
    mark.touch()
    return is_first


class ByToken(PointwiseLoss):
    """Of each token by itself."""

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        return -tokens.advantages * logprobs, -tokens.advantages, torch.ones_like(logprobs, dtype=torch.bool)
