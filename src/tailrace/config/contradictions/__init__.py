"""Settings that are each valid and contradict each other, across sections.

In: a run's settings, valid by themselves. Out: all contradictions, each a sentence that names the keys and what to
write instead. Each module has the checks of one subject; a check looks at nothing but settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.config.contradictions import generators, placement, scheduling, trainer
from tailrace.config.contradictions.contradiction import Contradiction, Contradictions

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings

__all__ = ["Contradiction", "Contradictions", "find_contradictions"]

_CHECKS = (*scheduling.CHECKS, *generators.CHECKS, *trainer.CHECKS, *placement.CHECKS)


def find_contradictions(settings: RunSettings) -> list[Contradiction]:
    """Between the sections of a run's settings."""
    return [one for check in _CHECKS for one in check(settings)]
