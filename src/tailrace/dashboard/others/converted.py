"""Folders laid out as runs', made of other libraries' files: a line once, a table again when it has changed."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tomli_w

from tailrace.dashboard.names import as_text
from tailrace.dashboard.others.placed import Placed
from tailrace.dashboard.others.sources import Library, Source
from tailrace.dashboard.others.trl_tables import placed_of_table
from tailrace.dashboard.others.verifiers_lines import placed_of_line
from tailrace.dashboard.tailing import Tail, stamp_of
from tailrace.errors import DataError
from tailrace.guards import decoded, read_at_most
from tailrace.reporting.rollout_records import encode_line
from tailrace.reporting.run_folder import METRICS_FILE, ROLLOUTS_FOLDER
from tailrace.reporting.sinks import Kind, rollouts_path

_ABOUT_FILE = "others.json"
_MOST_BYTES = 2 << 30
"""Of one source."""
_LACKS = {
    Library.VERIFIERS: "no advantages, and of tokens no texts: a rollout opens as its conversation.",
    Library.TRL: "no tokens, lengths, times or reasons of failure. Rewards are sums over its reward functions (whose "
    "weights are not in it), and completions of one prompt in one step are a group.",
}


class About(msgspec.Struct, frozen=True):
    """What a made folder says of itself."""

    library: str
    note: str


def about(folder: Path) -> About | None:
    """What a made folder says of itself; None for a run's own."""
    return decoded(lambda: msgspec.json.decode((folder / _ABOUT_FILE).read_bytes(), type=About))


@dataclass(slots=True)
class _Figures:
    """What the curves show of a step or an evaluation."""

    rewards: list[float] = field(default_factory=list)
    groups: dict[str, list[float]] = field(default_factory=dict)
    environments: dict[str, list[float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    num_failed: int = 0
    count: int = 0

    def add(self, placed: Placed) -> None:
        """One rollout more."""
        record = placed.record
        self.count += 1
        self.num_failed += record.outcome.state == "failed"
        if record.completion_tokens:
            self.lengths.append(record.completion_tokens)
        if record.reward is not None:
            self.rewards.append(record.reward)
            self.groups.setdefault(record.group_id, []).append(record.reward)
            self.environments.setdefault(record.environment, []).append(record.reward)


class OthersFiles:
    """The folders of one dashboard. From any thread."""

    def __init__(self) -> None:
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._known: dict[Path, _Converted] = {}
        self._lock = threading.Lock()

    def folder(self, source: Source) -> Path:
        """That of a source, as far as it was taken in."""
        return self._converted(source).folder

    def update(self, folders: Iterable[Path], *, seconds: float = math.inf) -> None:
        """Take in what came since in these, as far as time allows, the small ones first; others are left alone.

        Of each a line or a table more, but where another thread is at it.
        """
        until_s, wanted = time.monotonic() + seconds, set(folders)
        found = [known for known in [*self._known.values()] if known.folder in wanted]
        for known in sorted(found, key=_Converted.num_bytes):
            if known.lock.acquire(blocking=False):
                try:
                    known.update(until_s)
                finally:
                    known.lock.release()

    def _converted(self, source: Source) -> _Converted:
        with self._lock:
            if self._home is None:
                self._home = tempfile.TemporaryDirectory(prefix="tailrace-ui-")
            known = self._known.get(source.path)
            if known is None:
                known = _Converted(source, Path(self._home.name) / str(len(self._known)) / source.name)
                self._known[source.path] = known
            return known


class _Converted:
    """One source, as a folder."""

    def __init__(self, source: Source, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self._source = source
        self._tail = Tail(source.path)
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._figures: dict[tuple[int, Kind], _Figures] = {}
        self._num_lines = self._num_unread = 0
        self._rest = ""
        """A note on what was not taken in."""
        self._model = self._environment = ""
        (folder / ROLLOUTS_FOLDER).mkdir(parents=True)
        self._about()
        self._settings()

    def num_bytes(self) -> int:
        """What its source has."""
        return sum(stamp_of(path)[1] for path in self._source.tables())

    def update(self, until_s: float) -> None:
        """Take in what came since, as far as time allows."""
        is_lines = self._source.library is Library.VERIFIERS
        if not (self._take_lines(until_s) if is_lines else self._take_tables(until_s)):
            return
        lines = [_metrics_line(step, kind, figures) for (step, kind), figures in sorted(self._figures.items())]
        changed_ns = max((stamp_of(path)[0] for path in self._source.tables()), default=0)
        _write_whole(self.folder / METRICS_FILE, b"".join(lines), changed_ns=changed_ns)
        self._about()
        self._settings()

    def _take_lines(self, until_s: float) -> bool:
        """Whether anything has changed."""
        is_void = self._tail.start_over_if_replaced()
        if is_void:
            self._forget()
        before = self._num_lines, self._rest
        is_cut = self._tail.offset >= _MOST_BYTES
        batch: list[Placed] = []
        for line in () if is_cut else self._tail.lines():
            self._num_lines += 1
            try:
                batch += placed_of_line(line, self._num_lines, self._environment or self._source.name)
            except DataError:
                self._num_unread += 1
            if len(batch) >= 1_000:
                self._write(batch)
                batch = []
            if is_cut := self._tail.offset >= _MOST_BYTES or time.monotonic() > until_s:
                break
        self._write(batch)
        self._rest = _rest_of_lines(self._tail.offset, self.num_bytes()) if is_cut else ""
        return is_void or (self._num_lines, self._rest) != before

    def _take_tables(self, until_s: float) -> bool:
        """Whether anything has changed; with a table that has, or is gone, all are read again."""
        stamps = {path: stamp_of(path) for path in self._source.tables()}
        new = [path for path, stamp in stamps.items() if self._stamps.get(path) != stamp]
        is_void = any(path in self._stamps for path in new) or bool(self._stamps.keys() - stamps.keys())
        if is_void:
            self._forget()
            new = list(stamps)
        left = _MOST_BYTES - sum(size for _, size in self._stamps.values())
        taken = 0
        for path in new:
            left -= stamps[path][1]
            if left < 0:
                break
            try:
                self._write(placed_of_table(path))
            except DataError:
                self._num_unread += 1
            self._stamps[path] = stamps[path]
            taken += 1
            if time.monotonic() > until_s:
                break
        before, self._rest = self._rest, _rest_of_tables(len(new) - taken, left)
        return is_void or taken > 0 or self._rest != before

    def _forget(self) -> None:
        self._figures.clear()
        self._stamps.clear()
        self._num_lines = self._num_unread = 0
        for path in (self.folder / ROLLOUTS_FOLDER).iterdir():
            path.unlink()

    def _write(self, batch: Iterable[Placed]) -> None:
        files: dict[tuple[int, Kind], list[Placed]] = {}
        for one in batch:
            files.setdefault((one.record.step, one.kind), []).append(one)
            self._model = self._model or one.model
        for (step, kind), found in files.items():
            figures = self._figures.setdefault((step, kind), _Figures())
            path = rollouts_path(self.folder / ROLLOUTS_FOLDER, step, kind)
            with path.open("ab") as file:
                file.writelines(encode_line(one.record) for one in found)
            for one in found:
                figures.add(one)

    def _about(self) -> None:
        source = self._source
        unread = f" {self._num_unread} of its lines or tables could not be read." if self._num_unread else ""
        note = (
            f"{as_text(source.path)}: a file of {source.library}. It has {_LACKS[source.library]}{unread}{self._rest}"
        )
        _write_whole(self.folder / _ABOUT_FILE, msgspec.json.encode(About(source.library, note)))

    def _settings(self) -> None:
        """As far as the files tell; `metadata.json` stands beside the older ones of verifiers."""
        metadata = _metadata(self._source.path.with_name("metadata.json"))
        self._model, self._environment = self._model or metadata.model, self._environment or metadata.env_id
        names = sorted({name for figures in self._figures.values() for name in figures.environments})
        table = {
            "name": self._source.name,
            "model": {"name": self._model},
            "environments": [{"name": name} for name in names],
            "observability": {"tags": [str(self._source.library)]},
        }
        text = (
            f"# What is known of {as_text(self._source.path)}, which is no run of Tailrace's.\n\n{tomli_w.dumps(table)}"
        )
        _write_whole(self.folder / "config.toml", text.encode())


def _rest_of_lines(offset: int, size: int) -> str:
    """A note on what stands behind the line with which reading stopped.

    >>> _rest_of_lines(300, 300), _rest_of_lines(300, 1_000), _rest_of_lines(_MOST_BYTES, _MOST_BYTES + 9)
    ('', ' So far 30 % of it were read.', ' What stands behind its first 2 GiB is left out.')
    """
    if offset >= size:
        return ""
    if offset >= _MOST_BYTES:
        return f" What stands behind its first {_MOST_BYTES >> 30} GiB is left out."
    return f" So far {100 * offset // min(size, _MOST_BYTES)} % of it were read."


def _rest_of_tables(count: int, left: int) -> str:
    """A note on so many tables, with so many bytes left for more."""
    if not count:
        return ""
    if left < 0:
        return f" {count} of its tables are left out: those before have {_MOST_BYTES >> 30} GiB."
    return f" {count} of its tables are still to be read."


class _Metadata(msgspec.Struct):
    model: str = ""
    env_id: str = ""


def _metadata(path: Path) -> _Metadata:
    return decoded(lambda: msgspec.json.decode(read_at_most(path, 1 << 20), type=_Metadata)) or _Metadata()


def _write_whole(path: Path, data: bytes, *, changed_ns: int | None = None) -> None:
    """Who reads it meanwhile has what was there before."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    if changed_ns is not None:
        os.utime(part, ns=(changed_ns, changed_ns))
    part.replace(path)


def _metrics_line(step: int, kind: Kind, figures: _Figures) -> bytes:
    return msgspec.json.encode({"step": step, **dict(_metrics(kind, figures))}) + b"\n"


def _metrics(kind: Kind, figures: _Figures) -> Iterator[tuple[str, float]]:
    """By the names that a run's own have, so that curves lie over each other."""
    if kind == "evaluation":
        for name, rewards in figures.environments.items():
            yield f"eval/{name}/reward/mean", statistics.fmean(rewards)
        return
    if figures.rewards:
        yield "reward/mean", statistics.fmean(figures.rewards)
        yield "reward/std", statistics.pstdev(figures.rewards)
    for name, rewards in figures.environments.items():
        yield f"reward/{name}/mean", statistics.fmean(rewards)
    if groups := [rewards for rewards in figures.groups.values() if len(rewards) > 1]:
        yield "group/zero_spread_share", sum(len(set(rewards)) == 1 for rewards in groups) / len(groups)
    yield "rollout/failed_share", figures.num_failed / figures.count
    if figures.lengths:
        yield "rollout/completion_tokens", statistics.fmean(figures.lengths)
