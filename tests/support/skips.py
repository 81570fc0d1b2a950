"""Which skips hide that something is lost: those for want of what was installed."""

from __future__ import annotations

import re
from collections.abc import Collection


def hides_a_loss(reason: str, made: Collection[str]) -> bool:
    """Whether what a test is skipped for is installed by one of the targets of the Makefile that were made.

    >>> reasons = ["no C++ compiler: make test-system", "could not import 'redis': No module named 'redis'", "no GPU"]
    >>> [hides_a_loss(reason, ["install-dev"]) for reason in reasons]
    [False, True, False]
    """
    named = re.findall(r"make ([\w./-]+)", reason)
    return not {*named, *(["install-dev"] if "could not import" in reason else [])}.isdisjoint(made)
