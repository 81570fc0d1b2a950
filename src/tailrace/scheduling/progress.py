"""Where the trainer is, what is on its way to it, and what the generators serve. Plain numbers."""

from __future__ import annotations

from collections import deque

from tailrace.batching import FormedBatch
from tailrace.errors import AccountingError
from tailrace.records import StepSkipped, StepTrained


class Progress:
    """Versions and steps, and the batches between scheduler and trainer."""

    def __init__(self, *, step: int = 0, version: int = 0, serving_version: int | None = None) -> None:
        """See `StreamScheduler.start`."""
        self.step, self.version = step, version
        self.sent: deque[FormedBatch] = deque()
        self.is_forming = False
        self._serving_version = self._awaited_version = serving_version

    def end_step(self, event: StepTrained | StepSkipped) -> FormedBatch:
        """The trainer is done with the oldest batch sent: that one. Raises `AccountingError` for another one."""
        formed = self.sent.popleft()
        if formed.batch.summary.step != event.step:
            raise AccountingError(f"step {event.step} ended, but step {formed.batch.summary.step} was next")
        self.step, self.version = event.step, event.version
        return formed

    def install(self, version: int) -> None:
        """No generator serves anything older any more."""
        if self._serving_version is not None:
            self._serving_version = max(self._serving_version, version)
        self.expect_no(version)

    def expect_no(self, version: int) -> None:
        """Nobody waits for this version any more: it serves, or could not be installed."""
        if self._awaited_version is not None:
            self._awaited_version = max(self._awaited_version, version)

    @property
    def serving_version(self) -> int:
        """The oldest version that a token sampled now may be of."""
        return self.version if self._serving_version is None else self._serving_version

    @property
    def ahead(self) -> int:
        """Batches on their way, the one that is being formed among them."""
        return len(self.sent) + self.is_forming

    @property
    def waiting_rollouts(self) -> int:
        """Of the batches sent that the trainer does not work on yet."""
        return sum(formed.batch.summary.num_rollouts for formed in list(self.sent)[1:])

    @property
    def judged_version(self) -> int:
        """The highest version that can train the next batch."""
        return self.version + self.ahead

    @property
    def age(self) -> int:
        """Versions by which a token sampled now will trail the next batch that is formed."""
        return self.ahead if self._awaited_version is None else self.judged_version - self._awaited_version

    @property
    def is_even(self) -> bool:
        """Whether everything sent is trained, and its weights serve."""
        return self.ahead == 0 and self.age <= 0
