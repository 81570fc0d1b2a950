"""Tables that TRL's trainers write with `log_completions`: one Parquet file a step, one row a completion.

Their columns are `step`, `prompt`, `completion`, one for each reward function, `advantage`, and what was logged beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.dashboard.others.placed import Placed, digest, finite, messages_of
from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import Json, Outcome
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.run_folder import is_number

if TYPE_CHECKING:
    from pyarrow import parquet

_KNOWN = frozenset({"step", "prompt", "completion", "advantage", "mode", "image", "images"})
_MOST_ROWS = 100_000
_TASK_CHARACTERS = 40
ENVIRONMENT = "completions"


def placed_of_table(path: Path) -> list[Placed]:
    """The completions of a table; those of one prompt in one step are a group. Raises `DataError` for another file."""
    with guarded(f"{path} is no table of completions", DataError):
        from pyarrow import parquet

        with parquet.ParquetFile(path) as source:
            names = [name for name in source.schema_arrow.names if name not in ("image", "images")]
            missing = {"prompt", "completion"} - set(names)
            if missing:
                raise ValueError(f"it has no column {' and '.join(sorted(missing))}")
            return list(_placed(_rows(source, names), path))


def _rows(source: parquet.ParquetFile, names: list[str]) -> Iterator[dict[str, Json]]:
    taken = 0
    for batch in source.iter_batches(columns=names, batch_size=1_024):
        for row in batch.to_pylist():
            if taken == _MOST_ROWS:
                return
            taken += 1
            yield row


def _placed(rows: Iterator[dict[str, Json]], path: Path) -> Iterator[Placed]:
    members: dict[str, int] = {}
    for row in rows:
        step = _step(row, path)
        group = f"{digest(row['prompt'])}#{step}"
        members[group] = members.get(group, -1) + 1
        yield Placed("step", _record(row, step, group, members[group]))


def _step(row: dict[str, Json], path: Path) -> int:
    """The table's own, else what its name says."""
    step = row.get("step")
    if isinstance(step, int):
        return max(0, step)
    number = path.stem.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


def _record(row: dict[str, Json], step: int, group: str, member: int) -> RolloutRecord:
    rest = {name: value for name, value in row.items() if name not in _KNOWN}
    rewards = {name: finite(value) for name, value in rest.items() if is_number(value) or value is None}
    given = [value for value in rewards.values() if value is not None]
    answer = messages_of(row["completion"], "assistant")
    return RolloutRecord(
        rollout_id=f"{group}.{member}",
        group_id=group,
        task_id=_task(row["prompt"]),
        environment=ENVIRONMENT,
        step=step,
        outcome=Outcome.trained(step),
        reward=sum(given) if given else None,
        reward_components=rewards,
        advantage=finite(row.get("advantage")),
        messages=[*messages_of(row["prompt"], "user"), *answer],
        columns={name: value for name, value in rest.items() if name not in rewards},
        turns=sum(message.get("role") == "assistant" for message in answer),
        branches=1,
    )


def _task(prompt: Json) -> str:
    """What tells it from others, and begins as its prompt: the newest message of a conversation.

    >>> _task("Sort these: Ida, Tom, Piper, Uma, Bo, Oscar, Olga, Ella")
    'Sort these: Ida, Tom, Piper, Uma, Bo, Os… (8cb45473b8)'
    """
    asked = messages_of(prompt, "user")
    text = " ".join(str(asked[-1].get("content", "")).split()) if asked else ""
    return f"{text[:_TASK_CHARACTERS]}{'…' * (len(text) > _TASK_CHARACTERS)} ({digest(prompt)})"
