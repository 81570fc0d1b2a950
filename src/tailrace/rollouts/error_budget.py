"""Error budgets: how many rollouts or scores may fail before everything ends."""

from __future__ import annotations

from collections import deque
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from tailrace.errors import EngineFailed, ErrorBudgetSpent, SettingsError, TransportError
from tailrace.rollouts.attribution import leaves_of

GRACE = 20
"""A share means nothing before so many have started."""
ERRORS_KEPT = 32
"""Of all failures, the latest so many are listed in full."""

_BEYOND = (EngineFailed, TransportError, SettingsError)
"""Errors that concern more than one rollout: no error budget counts them, they end everything at once."""


class ErrorBudget(BaseModel, extra="forbid", frozen=True):
    """What one failure costs, and how many may fail before everything ends.

    With neither limit set any number may. A share is judged once 20 have started, or when all is over.

    >>> ErrorBudget(max_share=0.1).allows(failed=2, started=20)
    True
    >>> ErrorBudget(max_count=2).allows(failed=3, started=1000)
    False
    """

    on_error: Literal["raise", "drop", "keep_unscored"] = Field(
        "drop",
        description="raise: the first failure ends everything; drop: it costs its rollout or group; keep_unscored: what"
        " could not be scored is kept without a reward, and never trained on (a rollout itself is dropped).",
    )
    max_count: int | None = Field(None, ge=0, description="More failures than this end everything.")
    max_share: float | None = Field(None, ge=0, le=1, description="The same as a share of those started, once 20 have.")

    @model_validator(mode="after")
    def _require_use_of_limits(self) -> ErrorBudget:
        if self.on_error == "raise" and (self.max_count is not None or self.max_share is not None):
            raise ValueError("on_error = 'raise' ends with the first failure: leave max_count and max_share out")
        return self

    def allows(self, *, failed: int, started: int, is_over: bool = False) -> bool:
        """Whether so many failures of those started are within the error budget."""
        if self.on_error == "raise":
            return not failed
        if self.max_count is not None and failed > self.max_count:
            return False
        is_judged = self.max_share is not None and (started >= GRACE or is_over)
        return not (is_judged and self.max_share is not None and failed > self.max_share * started)

    def __str__(self) -> str:
        limits = {"max_count": self.max_count, "max_share": self.max_share}
        listed = ", ".join(f"{name} = {value}" for name, value in limits.items() if value is not None)
        return listed or f"on_error = {self.on_error}"


RAISE = ErrorBudget(on_error="raise")
"""No failure is tolerated."""


class ErrorTally:
    """Counts what was started and what failed against one error budget."""

    def __init__(self, budget: ErrorBudget, what: str, setting: str) -> None:
        """`what` are the things counted, in the plural; `setting` is the budget's name for people."""
        self.budget = budget
        self.started = 0
        self.failed = 0
        self._what = what
        self._setting = setting
        self._errors: deque[Exception] = deque(maxlen=ERRORS_KEPT)

    def fail(self, error: Exception) -> None:
        """Count a failure.

        Raises `ErrorBudgetSpent` where it is one too many, and an error that no error budget counts as it is.
        """
        if any(isinstance(leaf, _BEYOND) for leaf in leaves_of(error)):
            raise error
        self.failed += 1
        self._errors.append(error)
        self._require_within()

    def __contains__(self, error: Exception) -> bool:
        """Whether it is among the latest failures."""
        return any(error is counted for counted in self._errors)

    def end(self) -> None:
        """Nothing more will start. Raises `ErrorBudgetSpent` where the share of failures is too large."""
        self._require_within(is_over=True)

    def _require_within(self, *, is_over: bool = False) -> None:
        if self.budget.allows(failed=self.failed, started=self.started, is_over=is_over):
            return
        raise ErrorBudgetSpent(
            f"{self.failed} of {self.started} {self._what} failed, which {self._setting} does not allow "
            f"({self.budget}); the latest: {self._errors[-1]}",
            list(self._errors),
        )
