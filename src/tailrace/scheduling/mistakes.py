"""Code that never worked: told after its first tasks, where an outage of what it calls is waited for.

An outage may show as any error, in code that worked before. So it is not called one only while nothing of an
environment has come back, ever, and all that failed did so by errors that wrong code raises
(`RolloutError.is_mistake`). Tasks that began first count, not those that failed first: malformed rows among good ones
always do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from tailrace.errors import RolloutError, TrainingError
from tailrace.scheduling.backoff import Part
from tailrace.scheduling.tasks import TaskKey

TASKS: Final = 4
"""So many, since some rows of a data set may be malformed."""


class Mistakes:
    """What failed of environments of which nothing has come back yet.

    >>> mistakes = Mistakes(lambda environment: False)
    >>> wrong = RolloutError("task shop/train/0: KeyError: 'qestion'")
    >>> wrong.is_mistake = True
    >>> tasks = [TaskKey("shop", 0, index) for index in range(TASKS)]
    >>> for task in tasks:
    ...     mistakes.began(task)
    >>> for task in tasks:
    ...     mistakes.failed(task, "rollouts", wrong)
    Traceback (most recent call last):
        ...
    tailrace.errors.TrainingError: environment 'shop' does not work: the rollouts of its first 4 tasks all failed...
    """

    def __init__(self, has_worked: Callable[[str], bool]) -> None:
        """`has_worked`: whether any rollout of an environment came back before this start of the run."""
        self._has_worked = has_worked
        self._first = defaultdict[str, set[TaskKey]](set)
        """Of each environment the tasks that began first."""
        self._failed = defaultdict[tuple[str, Part], set[TaskKey]](set)
        """Of those."""
        self._excused: set[tuple[str, Part]] = set()
        """What came back, or failed by other errors too."""

    def began(self, key: TaskKey) -> None:
        """Its rollouts are about to be played."""
        if len(first := self._first[key.environment]) < TASKS:
            first.add(key)

    def came_back(self, environment: str, part: Part) -> None:
        """One succeeded: what fails from now on may be an outage."""
        self._excused.add((environment, part))

    def failed(self, key: TaskKey, part: Part, error: RolloutError) -> None:
        """One failed. Raises `TrainingError` where all did, of enough tasks, by mistakes."""
        place = key.environment, part
        if not error.is_mistake or self._has_worked(key.environment):
            self._excused.add(place)
        if place in self._excused or key not in self._first[key.environment]:
            return
        self._failed[place].add(key)
        if len(self._failed[place]) == TASKS:
            newest = str(error).partition("\n")[0]
            raise TrainingError(
                f"environment {key.environment!r} does not work: the {part} of its first {TASKS} tasks all failed, by "
                f"errors that wrong code raises. The newest: {newest}; the log has a traceback"
            )
