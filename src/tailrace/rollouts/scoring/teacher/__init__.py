"""A teacher: another model, which says how likely it finds the tokens that the policy sampled, and what else it would.

    group ─► a call for each branch ─► columns `teacher_logprobs`, `teacher_top_ids`, `teacher_top_logprobs`

It is a stage of scoring, which goes on while other groups generate. Token ids are sent as they were sampled, so that
the teacher must have the policy's tokenizer: one that has another is refused before the first rollout.
"""

from tailrace.rollouts.scoring.teacher.endpoint import EndpointScorer
from tailrace.rollouts.scoring.teacher.engine import EngineScorer
from tailrace.rollouts.scoring.teacher.teacher import Teacher, TeacherPlan

__all__ = ["EndpointScorer", "EngineScorer", "Teacher", "TeacherPlan"]
