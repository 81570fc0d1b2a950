"""Which files of other libraries there are."""

from __future__ import annotations

import enum
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tailrace.dashboard.names import as_text

_TRACES, _RESULTS, _METADATA = "traces.jsonl", "results.jsonl", "metadata.json"
_COMPLETIONS = "completions"
_MOST_SOURCES = 500


class Library(enum.StrEnum):
    """Who wrote them."""

    VERIFIERS = "verifiers"
    TRL = "TRL"


@dataclass(frozen=True, slots=True)
class Source:
    """What is shown as one run."""

    name: str
    path: Path
    """A file of lines, a table, or a folder of tables."""
    library: Library

    def tables(self) -> list[Path]:
        """The tables of a folder, or the one that it is."""
        return sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]


def source_at(path: Path) -> Source | None:
    """What a path names; None where it is nothing of these.

    A file is named by its folder where its own name says nothing.
    """
    if path.is_file():
        name = as_text(path.resolve().parent.name if path.name in (_TRACES, _RESULTS) else path.stem)
        library = {".jsonl": Library.VERIFIERS, ".parquet": Library.TRL}.get(path.suffix)
        return None if library is None else Source(name, path, library)
    if (path / _TRACES).is_file():
        return Source(as_text(path.resolve().name), path / _TRACES, Library.VERIFIERS)
    if (path / _RESULTS).is_file() and (path / _METADATA).is_file():
        return Source(as_text(path.resolve().name), path / _RESULTS, Library.VERIFIERS)
    for tables in (path / _COMPLETIONS, path):
        if tables.is_dir() and next(tables.glob("completions_*.parquet"), None) is not None:
            owner = tables.resolve().parent if tables.resolve().name == _COMPLETIONS else tables.resolve()
            return Source(as_text(owner.name), tables, Library.TRL)
    return None


def find_sources(root: Path, *, besides: Collection[Path] = ()) -> list[Source]:
    """The path itself where it is one, else those folders in it, `besides` those that are known as something else."""
    alone = source_at(root)
    if alone is not None:
        return [alone]
    try:
        with os.scandir(root) as entries:
            folders = sorted(Path(entry.path) for entry in entries if entry.name[0] != "." and entry.is_dir())
            folders = [folder for folder in folders if folder not in besides]
    except OSError:
        return []
    found = [source for folder in folders if (source := source_at(folder)) is not None]
    return found[:_MOST_SOURCES]
