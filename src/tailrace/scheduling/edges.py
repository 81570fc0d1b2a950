"""What happens to a group that runs when an edge passes it by. Pure: settings and counts in, decisions out.

Two edges: the staleness bound (`on_stale`), which a group outlives when it runs too long, and the edge of a step under
over-sampling (`on_straggler`).
"""

from __future__ import annotations

from tailrace.scheduling.batches import RESTARTED
from tailrace.scheduling.groups import GivenUp
from tailrace.scheduling.settings import SchedulingSettings

STALE = "stale"
REQUEUED = "requeued"
STRAGGLER = "straggler"


def outlived(settings: SchedulingSettings, restarts: int) -> GivenUp | None:
    """What becomes of a group that runs and whose first tokens no batch can train on any more; None: it goes on.

    Stopped as soon as that is known, since what it would still sample is thrown away as well. `restart` becomes `mask`
    once the task was restarted `max_restarts` times.
    """
    match settings.on_stale:
        case "restart" if restarts < settings.max_restarts:
            return GivenUp(RESTARTED, again=True)
        case "drop":
            return GivenUp(STALE, again=False)
        case _:
            return None


def straggled(settings: SchedulingSettings) -> GivenUp | None:
    """What becomes of a group that runs at the edge of a step; None: it goes on, now or in the next step."""
    if settings.over_sampling == 1:
        return None
    match settings.on_straggler:
        case "requeue":
            return GivenUp(REQUEUED, again=True)
        case "drop":
            return GivenUp(STRAGGLER, again=False)
        case _:
            return None
