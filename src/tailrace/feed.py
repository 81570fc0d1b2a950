"""A trainer of your own, fed by a run: pull samples, take a step of any size, publish weights, say when it is over.

    with Feed("runs/mine") as feed:                 # or Feed("rediss://user@host:6379", run="mine")
        step = 0
        while samples := feed.pull(64):             # [] once the run asks for the end
            step += 1
            ...                                     # your loss, over denominators(samples).loss_tokens; your optimizer
            model.save_pretrained(folder)
            feed.step_done(step, samples, folder=folder)

Leaving the block writes the terminal record, which alone ends the run: finished, or failed with what was raised. What
each duty is, and what happens where one is neglected: docs/streams.md. `examples/external_trainer.py` does it with TRL.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tailrace.errors import DataError, TransportError
from tailrace.guards import guarded, read_at_most
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
    WeightsWritten,
)
from tailrace.transport.redis.connection import with_password
from tailrace.transport.redis.sample_receiver import RedisSampleReceiver

__all__ = ["Denominators", "Feed", "StreamedSample", "denominators"]

FEED_FILE = "feed.json"
"""Where a run's folder says how its samples are reached."""
_LOOK_S = 0.2


class FeedPlace(msgspec.Struct, frozen=True):
    """How a run's samples are reached: what `feed.json` in its folder holds."""

    url: str
    run: str
    prefix: str

    @classmethod
    def told_in(cls, folder: Path, patience_s: float) -> FeedPlace:
        """Wait for the run to tell. Raises `DataError` where its folder does not, or tells something else."""
        path, deadline_s = folder / FEED_FILE, time.monotonic() + patience_s
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        with guarded(f"{path} does not tell how to reach the samples of a run", DataError):
            return msgspec.json.decode(read_at_most(path, 1 << 16), type=cls)


class Feed:
    """One rank's end of a run's samples. Calls come from one thread, and wait through outages of what carries them."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        run: str = "",
        prefix: str = "tailrace",
        name: str = "trainer",
        leads: bool = True,
        step: int = 0,
        version: int = 0,
        folder: str | os.PathLike[str] | None = None,
        patience_s: float = 300.0,
    ) -> None:
        """Join the run, waiting for it for `patience_s` at most.

        Args:
            where: The run's folder, or the URL of the Redis that carries its samples. Then `run` is its name, and
                `prefix` the run's `transport.redis.prefix`; a password that the URL leaves out is in the environment
                (`TAILRACE_REDIS_PASSWORD`).
            name: Of this rank, and of no other one.
            leads: Whether it is the rank that tells of steps, weights and the end, for all of them.
            step: The last step that the trainer took, and `version` the weights that it holds: those of the checkpoint
                that it goes on from.
            folder: Those weights, as for `step_done`: for a run that was started again, whose generators begin with the
                weights of version 0.

        Raises what `RedisSampleReceiver` does, and `DataError` for a folder that does not tell of a feed.
        """
        place = (
            FeedPlace(str(where), run, prefix) if "://" in str(where) else FeedPlace.told_in(Path(where), patience_s)
        )
        self.stop: StopRequested | None = None
        """Why the run asks for the end, once it does."""
        self._leads, self._is_over = leads, False
        url = with_password(place.url)
        self._end = RedisSampleReceiver(url, place.run, name, prefix=place.prefix, patience_s=patience_s)
        self._consumer = name
        if leads:
            self._end.report(TrainingBegan(consumer=name, step=step, version=version))
            self._tell_weights(version, folder)

    @property
    def num_ignored(self) -> int:
        """Entries of another run, or of another start of this one, that were passed over."""
        return self._end.num_ignored

    def pull(self, count: int) -> list[StreamedSample]:
        """Wait for so many samples, the oldest first; [] once the run asks for the end: then train on nothing more."""
        samples: list[StreamedSample] = []
        if self.stop is None:
            self._end.report(SamplesWanted(consumer=self._consumer, samples=count))
        while self.stop is None and len(samples) < count:
            pulled = self._end.pull(count - len(samples))
            if isinstance(pulled, StopRequested):
                self.stop = pulled
            else:
                samples += pulled
        return samples if self.stop is None else []

    def drop(self, samples: Sequence[StreamedSample], reason: str) -> None:
        """This rank will not train on these; `reason` is letters, digits and `_`, and is counted."""
        self._end.report(SamplesDropped(consumer=self._consumer, sample_ids=_ids(samples), reason=reason))

    def step_done(
        self,
        step: int,
        samples: Sequence[StreamedSample | SampleId],
        *,
        version: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """The trainer took this step on these samples, of all ranks.

        Weights of `version` (the step's number, unless it says otherwise) lie whole in `folder`, in Hugging Face
        layout, and stay as they are; without a folder the generators keep those that they have.
        """
        version = step if version is None else version
        self._tell_weights(version, folder)
        done = StepDone(
            consumer=self._consumer, step=step, version=version, sample_ids=_ids(samples), metrics=dict(metrics or {})
        )
        self._end.report(done)

    def _tell_weights(self, version: int, folder: str | os.PathLike[str] | None) -> None:
        if folder is not None:
            absolute = str(Path(folder).absolute())
            self._end.report(WeightsWritten(consumer=self._consumer, version=version, folder=absolute))

    def checkpoint_saved(self, step: int, path: str | os.PathLike[str] = "") -> None:
        """A durable checkpoint contains this step: the trainer will never go back to an earlier one."""
        self._end.report(CheckpointSaved(consumer=self._consumer, step=step, path=str(path)))

    def end(self, status: RunStatus = RunStatus.FINISHED, reason: str = "the trainer has taken all its steps") -> None:
        """Write the terminal record, once; a rank that does not lead only leaves."""
        if not self._is_over:
            self._is_over = True
            try:
                if self._leads:
                    self._end.report(TrainingOver(consumer=self._consumer, status=status, reason=reason))
            finally:
                self._end.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            status = RunStatus.CANCELLED if is_interrupt else RunStatus.FAILED
            with contextlib.suppress(TransportError):  # which may be what was raised
                self.end(status, "interrupted" if is_interrupt else f"{type(error).__name__}: {error}")
        elif self.stop is not None:
            self.end(self.stop.status, self.stop.reason)
        else:
            self.end()


@dataclass(frozen=True, slots=True)
class Denominators:
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
    counts = [sum(sample.num_loss_tokens for sample in samples), len(samples)]
    loss_tokens, num_samples = sum_over_ranks(counts)
    return Denominators(int(loss_tokens), int(num_samples))


def _ids(samples: Sequence[StreamedSample | SampleId]) -> tuple[SampleId, ...]:
    return tuple(one.sample_id if isinstance(one, StreamedSample) else one for one in samples)
