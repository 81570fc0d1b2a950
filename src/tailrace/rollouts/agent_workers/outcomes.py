"""What came of a rollout that a worker played, as far as it can be sent."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.environments import AgentResult
from tailrace.errors import EnvironmentFailed, RolloutError
from tailrace.records import Rollout
from tailrace.rollouts.agent_workers.messages import Failure, RolloutReport, pack_rollout_report
from tailrace.rollouts.agent_workers.values import pack_values
from tailrace.rollouts.attribution import attribute_errors
from tailrace.rollouts.scoring.scorer import finite_metrics, with_finite_numbers


@dataclass(slots=True)
class RolloutOutcome:
    """So far. `packed` is called at the end, and before failures are read: it may add one."""

    reported: AgentResult | None = None
    scored: AgentResult | None = None
    failure: Failure | None = None
    score_failure: Failure | None = None

    def packed(self, rollout: Rollout) -> bytes:
        """The `RolloutReport`.

        What cannot be sent is left out of it, and fails the rollout, or, where it is a reward that is none, its score,
        as beside the orchestrator: the conversation is sent all the same.
        """
        try:
            return pack_rollout_report(self._report(rollout))
        except EnvironmentFailed:
            is_scored = self.scored is not None or self.score_failure is not None
            self.reported = self._sendable(self.reported, rollout, counts=not is_scored)
            self.scored = self._sendable(self.scored, rollout)
        try:
            return pack_rollout_report(self._report(rollout))
        except EnvironmentFailed as error:
            self._fail(error, rollout)
            return pack_rollout_report(RolloutReport([], rollout.metrics, None, None))

    def _report(self, rollout: Rollout) -> RolloutReport:
        return RolloutReport(rollout.messages, rollout.metrics, self.reported, self.scored, rollout.sampled_texts)

    def _sendable(self, result: AgentResult | None, rollout: Rollout, *, counts: bool = True) -> AgentResult | None:
        """It with plain numbers, and without those that are none; an empty one where it cannot be sent.

        What was wrong becomes a failure if it `counts`.
        """
        if result is None:
            return None
        try:
            with attribute_errors(rollout.task):
                plain = with_finite_numbers(result, rollout)
        except RolloutError as error:
            if counts:
                self.score_failure = Failure.of(error)
            plain = AgentResult(None, finite_metrics(result), result.info)
        try:
            pack_values(plain, "what the rollout reported")
        except EnvironmentFailed as error:
            if counts:
                self._fail(error, rollout)
            return AgentResult()
        return plain

    def _fail(self, error: EnvironmentFailed, rollout: Rollout) -> None:
        self.failure = self.failure or Failure.of(error.saying(f"task {rollout.task.task_id}: {error}"))
