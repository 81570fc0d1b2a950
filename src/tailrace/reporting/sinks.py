"""Files of records, written off the event loop.

    caller ──write()──▶ bounded queue ──▶ one writer thread ──▶ metrics.jsonl, rollouts/step_000012.jsonl
                 └────▶ bounded queue ──▶ another one ────────▶ tokens/step_000012.parquet (`reporting.tokens`)

`write` never waits: a full queue drops the record and counts it. Nothing that goes wrong with a file reaches the run: a
sink's first failure is logged, all are counted, and the next record is tried again (a disk may get room).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tailrace.errors import DataError
from tailrace.guards import decoded
from tailrace.records import Json
from tailrace.reporting.rollout_records import (
    RolloutEntry,
    RolloutRecord,
    decode_line,
    encode_line,
    reward_of_line,
    rollout_record,
)
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.phases import phase

Kind: TypeAlias = Literal["step", "evaluation"]
"""What the rollouts of a file were played for."""

_OBJECT = msgspec.json.Decoder(dict[str, Json])


class RunWriters:
    """The threads that write a run's files."""

    def __init__(self, *, queue_records: int) -> None:
        self.records = BackgroundWriter(queue_records=queue_records)
        """Metrics, rollouts, and whatever else is done in a moment."""
        self.tokens = BackgroundWriter(queue_records=queue_records)
        """Those of a large step take minutes, for which no line of metrics waits."""
        self._all = (self.records, self.tokens)

    @property
    def lost_records(self) -> int:
        """Of all files: dropped, or refused by a disk."""
        return sum(writer.dropped + writer.failed for writer in self._all)

    def hurry(self, limit_s: float) -> None:
        """`close` waits for so long at most; one that waits already, for so long from now on."""
        for writer in self._all:
            writer.hurry(limit_s)

    async def close(self, timeout_s: float) -> None:
        """Take no more, and finish what waits for as long as each thread ends something within every `timeout_s`."""
        await asyncio.gather(*(asyncio.to_thread(writer.close, timeout_s) for writer in self._all))


class JsonlSink:
    """One file of one JSON object a line, appended to: `metrics.jsonl`."""

    def __init__(self, path: Path, writer: BackgroundWriter) -> None:
        self._path = path
        self._writer = writer

    def write(self, record: Mapping[str, Json]) -> None:
        """Append one record. Never waits and never raises: where there is no room it is dropped, and counted."""
        line = dict(record)
        self._writer.submit(lambda: self._append(line))

    def _append(self, record: dict[str, Json]) -> None:
        with phase("write_metrics"):
            append_lines(self._path, [msgspec.json.encode(record) + b"\n"])


class WaitingRollouts:
    """Jobs that write rollouts, bounded in rollouts and not only in jobs: what waits holds on to its rollouts' tokens.

    What is written is let go of rollout by rollout: to free thousands of them at once holds every thread up, the event
    loop's too.
    """

    def __init__(self, writer: BackgroundWriter, *, at_most: int = 1024) -> None:
        """So many wait for the disk, or one file's worth where that is more."""
        self._writer, self._at_most = writer, at_most
        self._submitted = self._written = 0

    def submit(self, entries: Sequence[RolloutEntry], job: Callable[[Iterator[RolloutEntry]], None]) -> bool:
        """Have `job` write them; it sees each once. Never waits and never raises: False when they were dropped."""
        kept = deque(entries)
        waiting = self._submitted - self._written
        if waiting and waiting + len(kept) > self._at_most:
            self._writer.drop()
            return False
        count = len(kept)
        accepted = self._writer.submit(lambda: self._run(job, kept, count))
        self._submitted += count * accepted
        return accepted

    def _run(self, job: Callable[[Iterator[RolloutEntry]], None], entries: deque[RolloutEntry], count: int) -> None:
        try:
            job(_taken(entries))
        finally:
            self._written += count


class RolloutWriter:
    """A folder of readable rollouts, one file per step: `rollouts/step_000012.jsonl`."""

    def __init__(
        self, folder: Path, writer: BackgroundWriter, *, every_steps: int = 1, waiting_rollouts: int = 1024
    ) -> None:
        """At most `waiting_rollouts` wait for the disk, or one file's worth where that is more."""
        self._folder = folder
        self._every_steps = every_steps
        self._waiting = WaitingRollouts(writer, at_most=waiting_rollouts)

    def write(self, step: int, entries: Sequence[RolloutEntry]) -> None:
        """Append these rollouts to the file of `step`. Never waits and never raises: they are dropped, and counted,
        where there is no room.

        Does nothing where `every_steps` leaves the step out. The rollouts must be final: they are read later, in the
        writer's thread.
        """
        if self._every_steps and step % self._every_steps == 0 and entries:
            self._submit(rollouts_path(self._folder, step), step, entries)

    def write_evaluation(self, step: int, entries: Sequence[RolloutEntry]) -> None:
        """Append an evaluation's rollouts to a file of their own. Never waits and never raises."""
        if self._every_steps:
            self._submit(rollouts_path(self._folder, step, "evaluation"), step, entries)

    def _submit(self, path: Path, step: int, entries: Sequence[RolloutEntry]) -> None:
        self._waiting.submit(entries, lambda taken: _append_rollouts(path, step, taken))


def _append_rollouts(path: Path, step: int, entries: Iterator[RolloutEntry]) -> None:
    with phase("write_rollouts") as writing:
        data = b"".join(encode_line(rollout_record(entry, step)) for entry in entries)
        writing.add_bytes(len(data))
        append_lines(path, [data])


def _taken(entries: deque[RolloutEntry]) -> Iterator[RolloutEntry]:
    while entries:
        yield entries.popleft()


def rollouts_path(folder: Path, step: int, kind: Kind = "step") -> Path:
    """The file of one step's rollouts, or of those of its evaluation.

    >>> rollouts_path(Path("rollouts"), 12).name, rollouts_path(Path("rollouts"), 40, "evaluation").name
    ('step_000012.jsonl', 'evaluation_000040.jsonl')
    """
    return folder / f"{kind}_{step:06d}.jsonl"


def step_of_path(path: Path) -> int | None:
    """The step that a file of rollouts or of an evaluation is of; None for another file.

    >>> step_of_path(Path("rollouts/step_000012.jsonl")), step_of_path(Path("rollouts/evaluation_000040.jsonl"))
    (12, 40)
    """
    kind, _, step = path.stem.partition("_")
    return int(step) if kind in ("step", "evaluation") and step.isdecimal() else None


def read_jsonl(path: Path) -> Iterator[dict[str, Json]]:
    """The objects of a file that `JsonlSink` wrote, one by one: of a long run they come to gigabytes.

    Without lines that a full disk cut short; none without the file.
    """
    return (record for line in _lines(path) if (record := decode_object(line)) is not None)


def decode_object(line: bytes) -> dict[str, Json] | None:
    """The object of such a line; None for one that was cut short, or is none."""
    return decoded(_OBJECT.decode, line)


def steps_of_rollouts(folder: Path) -> list[int]:
    """The steps that have a file of rollouts, in order, whatever else lies beside these files."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        files = [Path(entry.name) for entry in found if entry.is_file()]
    steps = ((path, step) for path in files if (step := step_of_path(path)) is not None)
    return sorted(step for path, step in steps if path == rollouts_path(Path(), step))


def read_rollouts(folder: Path, step: int | None = None) -> Iterator[RolloutRecord]:
    """The rollouts of one step, or of all of them in order, without lines that a full disk cut short."""
    for one in steps_of_rollouts(folder) if step is None else [step]:
        for line in _lines(rollouts_path(folder, one)):
            try:
                yield decode_line(line)
            except DataError:
                continue


def read_rewards(folder: Path, step: int) -> Iterator[tuple[float, int]]:
    """Reward and place of each rollout of a step that has a reward, without holding more than one of its lines."""
    offset = 0
    with rollouts_path(folder, step).open("rb") as file:
        for line in file:
            with suppress(DataError):
                if (reward := reward_of_line(line)) is not None:
                    yield reward, offset
            offset += len(line)


def read_rollout_at(folder: Path, step: int, offset: int) -> RolloutRecord | None:
    """The rollout at a place of a step's file; None where it is no whole record."""
    with rollouts_path(folder, step).open("rb") as file, suppress(DataError):
        file.seek(offset)
        return decode_line(file.readline())
    return None


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if stripped := line.strip():
                yield stripped


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append whole lines; a line that an earlier failure cut short is ended first. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.writelines(lines)
