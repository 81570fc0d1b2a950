"""What models beside the policy took while groups were scored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Self


@dataclass(slots=True)
class ModelUsage:
    """Calls of one kind of model, failed ones included."""

    kind: ClassVar[str]
    """In the names of metrics."""

    calls: int = 0
    retries: int = 0
    failed_groups: int = 0

    def add(self, other: Self) -> None:
        """Add the usage of another model or group."""
        for name, amount in asdict(other).items():
            setattr(self, name, getattr(self, name) + amount)

    def since(self, earlier: Self) -> Self:
        """Usage after `earlier`."""
        return type(self)(**{name: amount - getattr(earlier, name) for name, amount in asdict(self).items()})

    def metrics(self, separator: str = "_") -> dict[str, float]:
        """Under the names that a group's metrics have (`judge_calls`), or a run's (`judge/calls`)."""
        return {f"{self.kind}{separator}{name}": amount for name, amount in asdict(self).items()}


@dataclass(slots=True)
class JudgeUsage(ModelUsage):
    """What judging cost."""

    kind: ClassVar = "judge"

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """By the prices of the settings."""


@dataclass(slots=True)
class TeacherUsage(ModelUsage):
    """What a teacher did."""

    kind: ClassVar = "teacher"

    scored_tokens: int = 0
    """Contexts included."""
