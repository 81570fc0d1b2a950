"""What a contradiction is: a sentence, and the keys that it is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tailrace.config.sources import Key, as_index

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings


class Contradiction:
    """A sentence that names the keys and what to write instead; `keys` are those keys."""

    def __init__(self, message: str, *keys: str) -> None:
        self.message = message
        self.keys: tuple[Key, ...] = tuple(tuple(map(as_index, key.split("."))) for key in keys)


class Contradictions(ValueError):
    """All that were found."""

    def __init__(self, found: list[Contradiction]) -> None:
        super().__init__("\n".join(one.message for one in found))
        self.found = found


def first_twice(names: Iterable[str]) -> str | None:
    """The first in the alphabet of those that are there more than once."""
    return min((name for name, count in Counter(names).items() if count > 1), default=None)


def key_of_other_hosts(settings: RunSettings) -> str:
    """The setting by which generators on other hosts serve the run; empty where none may."""
    if settings.generator.connect:
        return "generator.connect"
    return "generator.join_address" if settings.generator.join_address is not None else ""
