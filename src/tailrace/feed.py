"""A trainer of your own, fed by a run: pull samples, take a step of any size, publish weights, say when it is over.

    with Feed("runs/mine") as feed:                 # or Feed(FeedPlace("rediss://user@host:6379", run="mine"))
        step = 0
        while samples := feed.pull(64):             # [] once the run asks for the end
            step += 1
            ...                                     # your loss, over denominators(samples).loss_tokens; your optimizer
            model.save_pretrained(folder, save_original_format=False)
            feed.step_done(step, samples, weights=folder)

Leaving the block writes the terminal record, which alone ends the run: finished, or failed with what was raised. What
each duty is, and what happens where one is neglected: docs/streams.md. `examples/external_trainer.py` does it with TRL.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from tailrace.errors import ConsumerRefused, CorruptData, NotAnswering, TransportError
from tailrace.records import (
    CheckpointSaved,
    RunStatus,
    SampleId,
    SamplesDropped,
    SamplesWanted,
    StepDone,
    StopRequested,
    StreamedSample,
    TrainingBegan,
    TrainingOver,
)
from tailrace.transport.redis.connection import with_password
from tailrace.transport.redis.feed_place import FeedPlace
from tailrace.transport.redis.sample_receiver import RedisSampleReceiver
from tailrace.transport.weights.outside import OutsideWeights, WeightAnnouncer

_logger = logging.getLogger(__name__)

_LOOK_S = 0.2
"""Between two looks for a run that is not there yet."""
_TRY_S = 2.0
"""For which one is waited for at one place: its folder may name another one by then."""

__all__ = ["Denominators", "Feed", "FeedPlace", "StreamedSample", "denominators"]


class Feed:
    """One rank's end of a run's samples. Calls come from one thread, and wait through outages of what carries them."""

    stop: StopRequested | None = None
    """Why the run asks for the end, once it does."""

    def __init__(
        self,
        where: str | os.PathLike[str] | FeedPlace,
        *,
        rank: int = 0,
        step: int = 0,
        version: int = 0,
        weights: OutsideWeights | None = None,
        patience_s: float = 300.0,
    ) -> None:
        """Join the run, waiting for `patience_s` at most until it is there.

        Args:
            where: The run's folder, or the Redis that carries its samples; a password that its URL leaves out is in the
                environment (`TAILRACE_REDIS_PASSWORD`).
            rank: Of the trainer's processes. Rank 0 tells of steps, weights and the end, for all of them.
            step: The last step that the trainer took, and `version` the weights that it holds: those of the checkpoint
                that it goes on from.
            weights: Those, as for `step_done`: for a run that was started again, whose generators begin with the
                weights of version 0, and for one with `generator.connect`, whose generators begin with none.

        Raises what `RedisSampleReceiver` does, and `DataError` for a folder that does not tell of a feed.
        """
        self._name, self._leads = f"rank-{rank}", rank == 0
        place, self._end = _joined(where, self._name, patience_s)
        self._weights = WeightAnnouncer(place.transfers, place.transfer_call_s)
        try:
            if self._leads:
                self._end.report(TrainingBegan(consumer=self._name, step=step, version=version))
                self._tell_weights(version, weights)
        except BaseException:
            self._leave()
            raise

    @property
    def num_ignored(self) -> int:
        """Entries of another run, or of another start of this one, that were passed over."""
        return self._end.num_ignored

    def pull(self, count: int) -> list[StreamedSample]:
        """Wait for so many samples, the oldest first; [] once the run asks for the end: then train on nothing more."""
        samples: list[StreamedSample] = []
        self._end.report(SamplesWanted(consumer=self._name, samples=count))
        while len(samples) < count:
            pulled = self._end.pull(count - len(samples))
            if isinstance(pulled, StopRequested):
                self.stop = pulled
                return []
            samples += pulled
        return samples

    def drop(self, samples: Sequence[StreamedSample], reason: str) -> None:
        """This rank will not train on these; `reason` is letters, digits and `_`, and is counted."""
        self._end.report(SamplesDropped(consumer=self._name, sample_ids=_ids(samples), reason=reason))

    def step_done(
        self,
        step: int,
        samples: Sequence[StreamedSample | SampleId],
        *,
        version: int | None = None,
        weights: OutsideWeights | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """The trainer took this step on these samples, of all ranks.

        It made the weights of `version` (the step's number, unless it says otherwise). They lie whole in a folder, in
        Hugging Face layout, and stay as they are; or they are tensors by the names that they have there, which vLLM's
        GPUs are sent from this process's. Without any the generators keep those that they have.
        """
        version, ids = step if version is None else version, _ids(samples)
        self._tell_weights(version, weights)
        done = StepDone(consumer=self._name, step=step, version=version, sample_ids=ids, metrics=dict(metrics or {}))
        self._end.report(done)

    def _tell_weights(self, version: int, weights: OutsideWeights | None) -> None:
        if weights is not None:
            self._end.report(self._weights.tell(self._name, version, weights))

    def checkpoint_saved(self, step: int, path: str | os.PathLike[str] = "") -> None:
        """A durable checkpoint contains this step: the trainer will never go back to an earlier one."""
        self._end.report(CheckpointSaved(consumer=self._name, step=step, path=str(path)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the terminal record; a rank that does not lead only leaves."""
        status, reason = _ending(error, self.stop)
        try:
            if self._leads:
                self._end.report(TrainingOver(consumer=self._name, status=status, reason=reason))
        except TransportError:  # which may be what was raised
            if error is None:
                raise
        finally:
            self._leave()

    def _leave(self) -> None:
        self._end.leave()
        self._weights.close()


def _joined(
    where: str | os.PathLike[str] | FeedPlace, name: str, patience_s: float
) -> tuple[FeedPlace, RedisSampleReceiver]:
    """Where the run is, and this rank's end there.

    What a run left that was killed tells of where it was until the next one is there, which may be elsewhere: so both
    are looked for anew.
    """
    deadline_s, has_said = time.monotonic() + patience_s, False
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        place = where if isinstance(where, FeedPlace) else FeedPlace.announcement_file(where, left_s)
        try:
            url = with_password(place.url)
            try_s = min(left_s, _TRY_S)
            return place, RedisSampleReceiver(url, place.run, name, prefix=place.prefix, patience_s=try_s)
        except (NotAnswering, TransportError) as error:
            if isinstance(error, CorruptData | ConsumerRefused) or time.monotonic() >= deadline_s:
                raise
            if not has_said:
                _logger.warning("waiting for the run for up to %g s: %s", patience_s, error)
            has_said = True
        time.sleep(_LOOK_S)


class Denominators(NamedTuple):
    """What a step's loss is divided by, over all ranks.

    Ranks sum their gradients then; where they average them (DDP), multiply the loss by the number of ranks.
    """

    loss_tokens: int
    """For a mean over tokens."""
    samples: int
    """For a mean over samples."""


def denominators(
    samples: Sequence[StreamedSample], sum_over_ranks: Callable[[list[int]], Sequence[int]] = list
) -> Denominators:
    """Of one step. `sum_over_ranks` adds each number to those of the other ranks: an all-reduce.

    A rank's own counts would weigh a token by how few others its rank happens to have.
    """
    counts = sum_over_ranks([sum(sample.num_loss_tokens for sample in samples), len(samples)])
    return Denominators(*map(int, counts))


def _ids(samples: Sequence[StreamedSample | SampleId]) -> tuple[SampleId, ...]:
    return tuple(one.sample_id if isinstance(one, StreamedSample) else one for one in samples)


def _ending(error: BaseException | None, stop: StopRequested | None) -> tuple[RunStatus, str]:
    if isinstance(error, KeyboardInterrupt):
        return RunStatus.CANCELLED, "interrupted"
    if error is not None:
        return RunStatus.FAILED, f"{type(error).__name__}: {error}"
    return (stop.status, stop.reason) if stop else (RunStatus.FINISHED, "the trainer has taken all its steps")
