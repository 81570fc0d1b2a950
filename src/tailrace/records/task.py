"""One row of a data set: what a rollout is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.errors import DataError
from tailrace.records.conversation import Json
from tailrace.records.ids import TaskId


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a data set.

    >>> task = Task(task_id=TaskId("greet/0"), environment="greet", index=0, row={"name": "Ada"})
    >>> task["name"]
    'Ada'
    """

    task_id: TaskId
    environment: str
    index: int
    """Its row in the data set."""
    row: Mapping[str, Json]
    seed: int = 0
    """For environments that draw at random: the same for every rollout of the task in the same epoch."""

    def __getitem__(self, column: str) -> Json:
        """The value of a column. Raises `DataError` naming the task and the columns it has."""
        try:
            return self.row[column]
        except KeyError:
            have = ", ".join(sorted(self.row)) or "none"
            raise DataError(f"task {self.task_id} has no column {column!r}; its columns are: {have}") from None
