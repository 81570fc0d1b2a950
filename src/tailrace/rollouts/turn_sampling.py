"""How one turn of a rollout is sampled."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np

from tailrace.records import Rollout, SamplingParams


def turn_sampling(
    rollout: Rollout, limit: int, stop_token_ids: tuple[int, ...], *, temperature: float | None, seed: int | None
) -> SamplingParams:
    """The rollout's sampling, of `limit` tokens at most, with a seed of the turn's own: turns share no random stream.

    `temperature` and `seed` are what the turn asks for itself; rollouts differ under one seed all the same, by their
    own seeds where they have some (in evaluations, which are drawn alike each time), else by their ids.
    """
    sampling, turn = rollout.sampling, rollout.turns
    entropy = None
    if seed is not None:
        own = zlib.crc32(rollout.rollout_id.encode()) if sampling.seed is None else sampling.seed
        entropy = [abs(seed), turn, own]
    elif sampling.seed is not None:
        entropy = [sampling.seed, turn]
    return msgspec.structs.replace(
        sampling,
        temperature=sampling.temperature if temperature is None else temperature,
        max_tokens=limit,
        stop_token_ids=stop_token_ids,
        seed=None if entropy is None else int(np.random.SeedSequence(entropy).generate_state(1)[0]),
    )
