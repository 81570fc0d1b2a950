"""A stream of training samples to the ranks of an outside trainer, and its reports back.

    offer ──► waits there ──► pull: one consumer has it ──► told of in a StepDone, or dropped ──► release
                              └── the consumer is lost: ConsumerLost ──► release, judged again, offer

How many are offered is the scheduler's to say (`scheduling.dispatched`): a stream bounds nothing. What is offered twice
under one id is there once. Reports arrive in the order in which they were told, each once.

The stream ends for everybody with `close`; it counts nothing that could end training. A carrier between processes:

- gives a sample to one consumer only, in the order of the offers, and tells it by `SamplesTaken` before `pull` returns;
- lets a consumer in under a name that no living one has (`ConsumerRefused` otherwise), and hears nothing more of one
  that it told to be lost;
- waits out an outage of its own inside `offer` and `reports`, and repeats what it had sent; where it cannot go on it
  raises `TransportError`, which ends the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from tailrace.records import FeedReport, FeedSample, SampleId, StopRequested


class SampleSender(Protocol):
    """The orchestrator's end."""

    async def offer(self, samples: Sequence[FeedSample]) -> None:
        """Return once the samples can be taken. Their branches may not change until they are released.

        Raises `PeerGone` once the stream is closed, and `TransportError` where it cannot go on.
        """
        ...

    async def release(self, sample_ids: Sequence[SampleId]) -> None:
        """Nobody is given these any more, and what they take up is free: trained on, dropped, or offered anew soon.

        Ids that are not there are passed over.
        """
        ...

    def reports(self) -> AsyncIterator[FeedReport]:
        """Yield what is told, for as long as the stream lasts. To be called once.

        Raises `CorruptData` for a report that is none, and `TransportError` where it cannot go on.
        """
        ...

    async def request_stop(self, stop: StopRequested) -> None:
        """Ask the trainer to answer with `TrainingOver`: every `pull` now returns this. The first request counts."""
        ...

    async def close(self, reason: str = "") -> None:
        """End the stream: whoever uses it gets `PeerGone` with the reason. Closing twice does nothing."""
        ...
