"""Every error that Tailrace raises on purpose.

Each message says what was found, what was expected and what to do about it, and names the file, field or task.

    TailraceError
    ├── SettingsError, DataError, ModelError        end the command with exit code 2
    │   └── NotAnswering (a SettingsError), HubNotAnswering (a ModelError)      with 1: it may pass
    ├── OutputLost                                  a command's result cannot be printed
    ├── RolloutError                                costs one rollout, under a reason that is counted
    │   ├── RolloutTimeout, EnvironmentFailed, InvalidReward, BudgetExceeded
    │   │   └── WorkerLost, ProgramFailed, ClientLost (an EnvironmentFailed)
    │   └── ScoringFailed ── JudgeFailed, TeacherFailed   costs one group
    ├── ErrorBudgetSpent                            an exception group of what failed
    ├── ToolError                                   the policy reads it, the rollout continues
    ├── GenerationError                             RequestRefused, ChatFailed, EngineFailed
    ├── TransportError                              CorruptData (OtherSchema), NoRoom, PayloadLost, PeerGone,
    │                                               ConsumerRefused
    ├── TrainingError                               Diverged, CheckpointError, NothingLeft, RankLost, Misreported
    ├── AccountingError, LifecycleError (ReplicaReleased, ClusterFull)
    └── Deadlock                                    a simulated run cannot go on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class TailraceError(Exception):
    """Base of every error that Tailrace raises on purpose."""

    @classmethod
    def known_kind(cls) -> type[TailraceError]:
        """The nearest of its classes that is one of this module's: a user's own may need more than a message."""
        return next(kind for kind in cls.__mro__ if kind.__module__ == __name__ and issubclass(kind, TailraceError))


class SettingsError(TailraceError):
    """A setting is unknown, contradictory or impossible. Ends the command with exit code 2."""

    def __init__(self, message: str, *, key: tuple[str | int, ...] = ()) -> None:
        """`key` is the setting's place in the tables, from which the caller finds the file and line."""
        super().__init__(message)
        self.key = key


class NotAnswering(SettingsError):
    """Nothing answers where a setting says, which may be different later. Ends the command with exit code 1."""


class DataError(TailraceError):
    """A data set, a task row or a run folder is unusable. Ends the command with exit code 2."""


class ModelError(TailraceError):
    """A model or tokenizer cannot be found, loaded or used. Ends the command with exit code 2."""


class HubNotAnswering(ModelError):
    """No hub answers, and its files are in no cache. Ends the command with exit code 1."""


class OutputLost(TailraceError):
    """Standard output does not take what a command found. Ends the command with exit code 1, unless files have it."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output takes nothing more: {error.strerror}")
        self.reader_has_left = isinstance(error, BrokenPipeError)
        """As `head` does when it has read enough: that is no mistake of anybody's."""


class RolloutError(TailraceError):
    """One rollout is lost. Costs that rollout, and is counted under `reason`."""

    reason = "rollout_error"
    may_pass = False
    """Whether the same may succeed later: what an environment or a judge calls is away."""
    is_blameless = False
    """Whether another rollout is to blame: this one is tried again, and uses up none of its retries."""
    is_mistake = False
    """Whether users' code did what wrong code does, and what it calls being away hardly ever brings about."""

    def as_mistake(self) -> Self:
        """This very error, of code that was never right."""
        self.is_mistake = True
        return self

    def saying(self, message: str) -> RolloutError:
        """Another one of the same known kind, which says this."""
        error = self.known_kind()(message)
        assert isinstance(error, RolloutError)  # as this one is
        error.reason, error.may_pass, error.is_mistake = self.reason, self.may_pass, self.is_mistake
        return error


class RolloutTimeout(RolloutError):
    """A rollout outlived its time limit."""

    reason = "timeout"
    may_pass = True


class EnvironmentFailed(RolloutError):
    """The agent, environment or reward of a rollout raised; the original error is the cause."""

    reason = "environment_failed"
    may_pass = True


class WorkerLost(EnvironmentFailed):
    """The process that played a rollout ended, or had to be killed; the message says where it was."""

    reason = "worker_lost"

    def of_task(self, task_id: str) -> WorkerLost:
        """The same, of one of the rollouts that were played there."""
        named = WorkerLost(f"task {task_id}: {self}")
        named.is_blameless, named.may_pass = self.is_blameless, self.may_pass
        return named

    def of_another(self) -> WorkerLost:
        """The same, of rollouts that only were there when another one ended the process."""
        lost = WorkerLost(str(self))
        lost.is_blameless, lost.may_pass = True, False
        return lost


class ProgramFailed(EnvironmentFailed):
    """The program that was a rollout's agent failed, or took more than its limits; `reason` says which."""

    def __init__(self, message: str, *, reason: str = "program_failed") -> None:
        super().__init__(message)
        self.reason = reason


class ClientLost(EnvironmentFailed):
    """The client outside that claimed a rollout was silent for longer than its lease."""

    reason = "client_lost"


class InvalidReward(RolloutError):
    """A reward is not a number, not finite, or larger than float32 has them."""

    reason = "invalid_reward"


class ScoringFailed(RolloutError):
    """A group's `score_group` raised, or returned something else than groups. Costs that group."""

    reason = "scoring_failed"
    may_pass = True


class JudgeFailed(ScoringFailed):
    """A judge gave no valid scores, however often it was asked. Never a reward of 0."""

    reason = "judge_failed"
    may_pass = False  # a judge that gives no valid scores; one that cannot be reached says so itself


class TeacherFailed(ScoringFailed):
    """A teacher did not score a group's tokens, however often it was asked."""

    reason = "teacher_failed"


class BudgetExceeded(RolloutError):
    """A rollout has no turn or token left and asked for more."""

    reason = "budget_exceeded"


class ErrorBudgetSpent(TailraceError, ExceptionGroup[Exception]):
    """More rollouts or scores failed than their error budget allows; holds the latest of those errors."""

    def derive(self, excs: Sequence[Exception]) -> ErrorBudgetSpent:  # type: ignore[override]
        """What `split` and `except*` keep of it is of this kind too."""
        return ErrorBudgetSpent(self.message, excs)


class ToolError(TailraceError):
    """A tool refuses a call. Its text goes back to the policy as the tool's message, and the rollout continues."""


class GenerationError(TailraceError):
    """Generation failed."""


class RequestRefused(GenerationError):
    """One request is impossible (prompt too long, unknown token, bad sampling settings); others are unaffected.

    Costs the rollout that it is of, and is counted under `reason`.
    """

    reason = "request_refused"


class ChatFailed(GenerationError):
    """One call of a model beside the policy (a judge) brought no answer; `may_recover`: another one could."""

    def __init__(self, message: str, *, may_recover: bool, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.may_recover = may_recover
        self.pause_s = pause_s
        """Seconds that a server asks to be left alone first."""


class EngineFailed(GenerationError):
    """The engine is gone. Every outstanding and every later call fails with this; the original error is the cause."""


class TransportError(TailraceError):
    """Data or a message did not make it to another process."""


class CorruptData(TransportError):
    """Bytes are not what their header promises."""


class OtherSchema(CorruptData):
    """Another version of Tailrace wrote it, in a format that this one does not read."""


class PayloadLost(TransportError):
    """A payload that is referred to does not exist any more, or was never there."""


class NoRoom(TransportError):
    """A folder, shared memory for example, has no room for what was to be written."""


class PeerGone(TransportError):
    """The process on the other side ended or stopped answering."""


class ConsumerRefused(TransportError):
    """A rank of an outside trainer may not have samples: another one has its name, or it was given up before."""


class TrainingError(TailraceError):
    """Training cannot go on."""


class NothingLeft(TrainingError):
    """Nearly all rollouts earn the highest reward there was: nothing is left to learn. Ends the run as finished."""


class Diverged(TrainingError):
    """Loss or gradients are not finite."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read."""


class RankLost(TrainingError):
    """A rank of the trainer died or stopped, and the others cannot go on without it; the message names it."""


class Misreported(TrainingError):
    """What an outside trainer told of its training cannot be: ends the run, and nothing of the report is believed."""


class AccountingError(TailraceError):
    """The ledger does not balance: a bug of Tailrace, never of the user."""


class LifecycleError(TailraceError):
    """A process of the run failed or left early."""


class ReplicaReleased(LifecycleError):
    """A generator left in order, as it or somebody else asked; its requests had moved on before."""


class ClusterFull(LifecycleError):
    """No machine of a cluster had room for a role in time; it was not started."""


class Deadlock(TailraceError):
    """No event is left in virtual time, and a task still waits; the message names it."""
