"""Which named columns of tokens users' code may set: agents for a reply, `score_group` for any branch."""

from __future__ import annotations

from tailrace.errors import SettingsError
from tailrace.records import CROSS_ENTROPY_WEIGHTS
from tailrace.records.columns import RESERVED
from tailrace.rollouts.turn_options import InvalidArgument


def require_own_column(name: str, *, environment: str, takes_demonstrations: bool | None) -> None:
    """Raise `InvalidArgument` for a column of Tailrace's own, `SettingsError` for one that no loss of the run reads.

    `takes_demonstrations` is whether there is a loss of cross-entropy; None: nothing is trained on.
    """
    if name in RESERVED:
        raise InvalidArgument(f"column {name!r} is filled by Tailrace itself: choose another name")
    if name == CROSS_ENTROPY_WEIGHTS and takes_demonstrations is False:
        raise SettingsError(
            f"environment {environment!r} sets the column {name!r}, and nothing reads it: write "
            "trainer.loss.cross_entropy = { coefficient = 1.0 }"
        )
