"""The trainer's position, the batches sent to it, the version that generators serve, and the ends of steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator

from tailrace.batching import FormedBatch
from tailrace.batching.slices import drained, in_turns
from tailrace.errors import AccountingError
from tailrace.records import Outcome, StepSkipped, StepTrained
from tailrace.scheduling.ledger import Accounts
from tailrace.tracing.phases import phase

ENDED_AT_ONCE = 128
"""Rollouts that end in one turn of the event loop."""
FREED_AT_ONCE = 32
"""Groups that are freed in one turn of the event loop."""


class Progress:
    """Versions and steps, and the batches between scheduler and trainer. Plain numbers."""

    def __init__(self, *, step: int = 0, version: int = 0, serving_version: int = 0) -> None:
        """With the parameters of `Scheduler.start`."""
        self.step, self.version = step, version
        self.sent: deque[FormedBatch] = deque()
        self.is_forming = False
        self.serving_version = serving_version
        """The oldest version that a token sampled now may be of."""
        self._awaited_version = serving_version

    def end_step(self, event: StepTrained | StepSkipped) -> FormedBatch:
        """The trainer is done with the oldest batch sent: that one. Raises `AccountingError` for another one."""
        formed = self.sent.popleft()
        if formed.batch.summary.step != event.step:
            raise AccountingError(f"step {event.step} ended, but step {formed.batch.summary.step} was next")
        self.step, self.version = event.step, event.version
        return formed

    def advance(self, step: int, version: int) -> None:
        """An outside trainer is there now, further on or, coming back from a checkpoint, further back."""
        self.step, self.version = step, version

    def install(self, version: int) -> None:
        """No generator serves an older version any more."""
        self.serving_version = max(self.serving_version, version)
        self.stop_awaiting(version)

    def stop_awaiting(self, version: int) -> None:
        """This version is awaited no more: it serves, or could not be installed."""
        self._awaited_version = max(self._awaited_version, version)

    @property
    def ahead(self) -> int:
        """Batches on their way, the one that is being formed among them."""
        return len(self.sent) + self.is_forming

    @property
    def waiting_rollouts(self) -> int:
        """In batches sent that the trainer has not begun."""
        return sum(formed.batch.summary.num_rollouts for formed in list(self.sent)[1:])

    @property
    def trainer_version(self) -> int:
        """The highest version that can train the next batch."""
        return self.version + self.ahead

    @property
    def age(self) -> int:
        """Versions by which a token sampled now will trail the next batch that is formed."""
        return self.trainer_version - self._awaited_version

    @property
    def is_even(self) -> bool:
        """Whether everything sent is trained, and its weights serve."""
        return self.ahead == 0 and self.age <= 0


class EndedSteps:
    """Steps whose rollouts still have to reach their terminal state, in order; in slices where there are many."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._waiting: deque[Generator[None, None, None]] = deque()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        """A step ended. The rollouts of a small batch end at once, unless others wait."""
        self._waiting.append(self._end(event, formed))
        if len(self._waiting) == 1 and formed.batch.summary.num_rollouts <= ENDED_AT_ONCE:
            self.drain()
        else:
            self._added.set()

    async def end_next(self) -> None:
        """Waits for a step, and ends its rollouts in turns with the event loop's other tasks."""
        while not self._waiting:
            self._added.clear()
            await self._added.wait()
        with phase("retire"):
            await in_turns(self._waiting[0])
        self._waiting.popleft()

    def drain(self) -> None:
        """End all rollouts of all steps at once."""
        with phase("retire"):
            while self._waiting:
                drained(self._waiting.popleft())

    def _end(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> Generator[None, None, None]:
        outcome = Outcome.trained(event.step) if isinstance(event, StepTrained) else Outcome.filtered(event.reason)
        ended = 0
        for group in formed.groups:
            self._accounts.end(group.trained, outcome)
            ended += len(group.trained)
            if ended >= ENDED_AT_ONCE:
                ended = 0
                yield
        self._accounts.ledger.check()
        self._accounts.observer.step_ended(event, formed)
        samples, groups = list(formed.batch.samples), list(formed.groups)
        del formed  # freeing thousands of samples or rollouts at once would stall the loop too
        while samples:
            del samples[-ENDED_AT_ONCE:]
            yield
        while groups:
            del groups[-FREED_AT_ONCE:]
            yield
