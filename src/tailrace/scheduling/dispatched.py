"""Samples dispatched to a trainer that is not ours, and the credits that bound them. Pure.

    dispatched ──► waits (nobody's) ──► a consumer's ──► trained | dropped
                       └──── given back: the consumer or the sample was lost ────► dispatched again, or too old by then

A sample holds a credit from the hand-over until it is trained on, dropped or given back: by its name, so each credit
comes back exactly once. There are as many credits as the window is wide. A consumer that cannot go on is lent what it
lacks beyond them: however many samples a step takes, it gets them.

Reports are checked here, whole, before any of them counts: what cannot be raises `Misreported`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tailrace.errors import Misreported
from tailrace.recent import RecentTable
from tailrace.records import Rollout, SampleId, SamplesDropped, StepDone, TrainingSample
from tailrace.scheduling.outstanding import ReadyGroup


@dataclass(slots=True, eq=False)
class DispatchedRollout:
    """A rollout of which samples were handed over."""

    rollout: Rollout
    ready: ReadyGroup
    """What it was handed over with."""
    group_rollouts: int
    open: set[SampleId]
    """Its samples that are neither trained nor dropped."""
    taken: int = 0
    """Its samples that consumers have."""
    loss_tokens: int = 0
    """Of those that were trained."""
    trained_samples: int = 0
    reason: str = ""
    """Why the newest of those that were dropped was."""
    is_over: bool = False
    """It has its terminal state: it is trained on again, by a trainer that came back from a checkpoint."""


@dataclass(slots=True, eq=False)
class DispatchedSample:
    """One sample, and who has it."""

    sample_id: SampleId
    sample: TrainingSample
    of: DispatchedRollout
    holder: str | None = None
    """A consumer; None while nobody took it."""
    was_taken: bool = False
    """Ever: by a consumer that was lost, perhaps, whose gradient the step had in it."""

    @property
    def loss_tokens(self) -> int:
        """That are young enough."""
        return sum(self.sample.loss_versions().values())


class DispatchedSamples:
    """All of them.

    >>> dispatched = DispatchedSamples(window=2)
    >>> dispatched.join("rank-0")
    >>> dispatched.want("rank-0", 3)  # more than the window lets out
    >>> dispatched.credits_free
    3
    """

    def __init__(self, window: int) -> None:
        """`window` counts samples."""
        self._window = window
        self.in_hand: dict[SampleId, DispatchedSample] = {}
        """Those with a credit, in the order of their hand-over."""
        self.returned: dict[SampleId, DispatchedSample] = {}
        """Given back: to be handed over anew, before any other."""
        self.returns = 0
        """How many ever were."""
        self.trained_again = 0
        """Samples that were told of once they were over."""
        self.waiting = 0
        """Handed over, and taken by nobody."""
        self.taken_rollouts = 0
        """Rollouts of which consumers have samples."""
        self._wanted: dict[str, int] = {}
        """By consumer that is there."""
        self._over = RecentTable[SampleId, None]()
        """Samples that are over, to tell one that is told of twice from one that never was."""

    @property
    def consumers(self) -> list[str]:
        """Those that are there."""
        return [*self._wanted]

    @property
    def wanted(self) -> int:
        """Samples that consumers cannot go on without."""
        return sum(self._wanted.values())

    @property
    def is_fed(self) -> bool:
        """Whether consumers have something to train on, and none that cannot go on without more."""
        return bool(self.in_hand) and not self.wanted

    @property
    def credits_free(self) -> int:
        """Above 0, what is ready may be handed over; it may overdraw by a group's samples less one."""
        return max(self._window - len(self.in_hand), self.wanted - self.waiting)

    def dispatch(self, samples: Iterable[DispatchedSample]) -> None:
        """These are about to be offered."""
        for one in samples:
            one.holder = None
            self.in_hand[one.sample_id] = one
            self.waiting += 1

    # --- what consumers tell -----------------------------------------------------------------------------------------

    def join(self, consumer: str) -> None:
        """A consumer is there. Raises `Misreported` where one of its name is."""
        if consumer in self._wanted:
            raise Misreported(f"two consumers are called {consumer!r}: every rank of the trainer needs its own name")
        self._wanted[consumer] = 0

    def want(self, consumer: str, samples: int) -> None:
        """It cannot go on without so many more. Raises `Misreported`."""
        self._require_there(consumer, "wants samples")
        if samples < 0:
            raise Misreported(f"consumer {consumer!r} wants {samples} samples")
        self._wanted[consumer] = samples

    def take(self, consumer: str, sample_ids: Sequence[SampleId]) -> None:
        """It has these. Raises `Misreported` for one that was not handed over, or that another one has."""
        self._require_there(consumer, "took samples")
        taken = self._found(consumer, "took", sample_ids)
        if others := next((one for one in taken if one.holder not in (None, consumer)), None):
            raise Misreported(f"consumer {consumer!r} took sample {others.sample_id}, which {others.holder!r} has")
        for one in taken:
            if self.returned.pop(one.sample_id, None):  # it was thought to be lost, and is not
                self.dispatch([one])
            if one.holder is None:
                one.holder, one.was_taken = consumer, True
                self.waiting -= 1
                self.taken_rollouts += not one.of.taken
                one.of.taken += 1
        self._wanted[consumer] = max(0, self._wanted[consumer] - len(sample_ids))

    def lose(self, consumer: str, sample_ids: Sequence[SampleId]) -> list[DispatchedSample]:
        """A consumer is gone; what it had, and the rest of what it was given, is given back: those."""
        self._wanted.pop(consumer, None)
        given = {*sample_ids}
        given_back = [one for one in self.in_hand.values() if one.holder == consumer or one.sample_id in given]
        for one in given_back:
            self._leave(one)
            one.holder = None
            self.returned[one.sample_id] = one
        self.returns += len(given_back)
        return given_back

    def take_back(self, trained: Iterable[DispatchedSample]) -> None:
        """The trainer gave up the steps that were taken on these: they are to be handed over anew."""
        for one in trained:
            one.holder = None
            self._over.forget(one.sample_id)
            self.returned[one.sample_id] = one
            if not one.of.is_over:
                one.of.open.add(one.sample_id)
                one.of.trained_samples -= 1
                one.of.loss_tokens -= one.loss_tokens

    def train(self, report: StepDone) -> list[DispatchedSample]:
        """A step was taken on these; without those that are over already. Raises `Misreported`, and then knows nothing
        of the report."""
        what = f"trained step {report.step} on"
        self._require_there(report.consumer, what)
        if not report.sample_ids:
            raise Misreported(f"consumer {report.consumer!r} told of step {report.step} without a sample")
        if len({*report.sample_ids}) < len(report.sample_ids):
            raise Misreported(f"consumer {report.consumer!r} {what} a sample twice")
        trained = self._found(report.consumer, what, report.sample_ids)
        if never := next((one for one in trained if not one.was_taken), None):
            raise Misreported(f"consumer {report.consumer!r} {what} {never.sample_id}, which nobody was given yet")
        self.trained_again += len(report.sample_ids) - len(trained)
        for one in trained:
            self._end(one)
            one.of.trained_samples += 1
            one.of.loss_tokens += one.loss_tokens
        return trained

    def drop(self, report: SamplesDropped) -> list[DispatchedSample]:
        """Nobody will train on these; without those that are over already. Raises `Misreported`."""
        self._require_there(report.consumer, "dropped samples")
        if not (report.reason.isidentifier() and report.reason.isascii() and len(report.reason) <= 64):
            raise Misreported(
                f"consumer {report.consumer!r} dropped samples for the reason {report.reason[:80]!r}: write up to 64 "
                "letters, digits and _"
            )
        dropped = self._found(report.consumer, "dropped", report.sample_ids)
        for one in dropped:
            self._end(one)
            one.of.reason = report.reason
        return dropped

    def expire(self, one: DispatchedSample, reason: str) -> None:
        """One that was given back is not handed over anew."""
        self._end(one)
        one.of.reason = reason

    # --- inside ------------------------------------------------------------------------------------------------------

    def _require_there(self, consumer: str, what: str) -> None:
        if consumer not in self._wanted:
            raise Misreported(f"a consumer {consumer!r} {what}, and there is none of that name: it has to join first")

    def _found(self, consumer: str, what: str, sample_ids: Sequence[SampleId]) -> list[DispatchedSample]:
        """Those in hand, or given back; names of samples that are over are passed over."""
        known = [self.in_hand.get(one) or self.returned.get(one) for one in sample_ids]
        unknown = [name for name, one in zip(sample_ids, known, strict=True) if one is None and name not in self._over]
        if unknown:
            raise Misreported(
                f"consumer {consumer!r} {what} {len(unknown)} samples that were never handed over, {unknown[0]!r} first"
            )
        return [one for one in known if one is not None]

    def _end(self, one: DispatchedSample) -> None:
        """It is over, in hand or given back; its credit is free."""
        if self.returned.pop(one.sample_id, None) is None:
            self._leave(one)
        one.of.open.discard(one.sample_id)
        self._over[one.sample_id] = None

    def _leave(self, one: DispatchedSample) -> None:
        """It is in no hand any more."""
        del self.in_hand[one.sample_id]
        if one.holder is None:
            self.waiting -= 1
            return
        one.of.taken -= 1
        self.taken_rollouts -= not one.of.taken
