"""What to say of a name that is not known, and is nearly one that is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a sentence that names the nearest one; empty where none is as near as `cutoff` (of 0 to 1).

    >>> did_you_mean("reverse-txt", ["alphabet-sort", "reverse-text"]), did_you_mean("chess", ["reverse-text"])
    ("; did you mean 'reverse-text'?", '')
    """
    close = get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
