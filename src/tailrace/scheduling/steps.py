"""The ends of steps: every rollout of a trained batch reaches its terminal state, in slices where there are many."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from tailrace.batching import FormedBatch
from tailrace.batching.slices import drained, in_turns
from tailrace.records import Outcome, StepSkipped, StepTrained
from tailrace.scheduling.accounts import Accounts
from tailrace.scheduling.observer import SchedulerObserver
from tailrace.tracing.phases import phase

ENDED_AT_ONCE = 128
"""Rollouts whose end is written down before the event loop may turn to others."""
FREED_AT_ONCE = 32
"""Groups that are let go of before the event loop may turn to others."""


class EndedSteps:
    """Steps whose rollouts are still to be written down, in order."""

    def __init__(self, accounts: Accounts, observer: SchedulerObserver) -> None:
        self._accounts, self._observer = accounts, observer
        self._waiting: deque[Generator[None, None, None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        """A step ended. A small batch is written down here and now, unless others wait."""
        self._waiting.append(self._end(event, formed))
        if len(self._waiting) == 1 and formed.batch.summary.num_rollouts <= ENDED_AT_ONCE:
            self.drain()

    async def end_next(self) -> None:
        """Write the next one down, the event loop's other tasks in between."""
        with phase("retire"):
            await in_turns(self._waiting[0])
        self._waiting.popleft()

    def drain(self) -> None:
        """Write all of them down at once."""
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
        self._observer.step_ended(event, formed)
        groups = list(formed.groups)
        del formed  # to free thousands of rollouts at once takes a while as well
        while groups:
            del groups[-FREED_AT_ONCE:]
            yield
