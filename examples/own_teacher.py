"""No reward at all: the policy learns from what a teacher finds likely at every token that it sampled itself.

    tailrace train quickstart --name teacher
    tailrace train quickstart --name student --environment.name examples.own_teacher:names --max_steps 60 \\
        --trainer.loss.distillation.model runs/teacher/checkpoints/step_000160 --trainer.loss.distillation.top_k 8 \\
        --model.max_model_tokens 1000 --trainer.warmup_steps 5
    tailrace eval quickstart --greedy --model.name runs/student/checkpoints/step_000060

Run it from the folder above this one. The teacher is the quickstart's model after its training, the student the same
model before it. Rollouts go on being rewarded, as the metrics and the last command show, but no reward is learnt from.
A teacher scores a branch with one token after it, for which its context of 1,024 has to have room.
"""

from dataclasses import replace

from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.records import Group


async def teacher_alone(group: Group) -> Group:
    """Every rollout's reward is as good as any other's: what remains to learn from is the teacher."""
    group.advantages = [0.0] * len(group.rollouts)
    return group


names = replace(load_environment(EnvironmentSettings(name="alphabet-sort")), score_group=teacher_alone)
