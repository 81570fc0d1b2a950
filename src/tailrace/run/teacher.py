"""The teacher of a run's loss: on a generator of its own, or behind an endpoint."""

from __future__ import annotations

from tailrace.config import RunSettings
from tailrace.generation.settings import ReplicaSettings
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.scoring import EndpointScorer, EngineScorer, Teacher, TeacherPlan
from tailrace.run.generators import Generators
from tailrace.training.settings.components import DistillationSettings

TEACHER = "teacher"
"""The role's name: in logs, metrics and errors."""


def teacher_settings(settings: RunSettings) -> RunSettings | None:
    """The run's settings as its teacher's generator has them: one, as the policy's are, with a model of its own, whose
    context has room for a branch and the token that is sampled after it. None where no such generator is needed."""
    chosen = settings.trainer.loss.distillation
    if chosen is None or chosen.url is not None:
        return None
    most = settings.max_model_tokens + 1
    generator = {"replicas": ReplicaSettings(), "connect": (), "return_routed_experts": False, "max_cache_tokens": most}
    model = {"name": chosen.model, "max_model_tokens": most}
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update=model),
            "generator": settings.generator.model_copy(update=generator),
        }
    )


async def require_endpoint(settings: RunSettings, renderer: ChatRenderer) -> None:
    """Raise `ModelError` where a teacher behind an endpoint cannot score what the policy samples; `SettingsError`
    without its key."""
    chosen = settings.trainer.loss.distillation
    if chosen is None or chosen.url is None:
        return
    scorer = _endpoint_scorer(chosen, chosen.url, renderer)
    try:
        await scorer.require_fitting(renderer.tokenizer, settings.max_model_tokens)
    finally:
        await scorer.close()


def make_teacher(settings: RunSettings, renderer: ChatRenderer, generators: Generators | None) -> Teacher | None:
    """What scores groups; `generators` are those of `teacher_settings`."""
    chosen = settings.trainer.loss.distillation
    if chosen is None:
        return None
    plan = TeacherPlan(timeout_s=chosen.timeout_s, retries=chosen.retries, retry_pause_s=chosen.retry_pause_s)
    if chosen.url is not None:
        return Teacher(_endpoint_scorer(chosen, chosen.url, renderer), plan)
    assert generators is not None, "no generator for the teacher"
    router, vocabulary = generators.router, renderer.tokenizer.num_tokens
    scorer = EngineScorer(router.generate, router.serving, vocabulary=vocabulary, top_k=chosen.top_k or 0)
    return Teacher(scorer, plan)


def _endpoint_scorer(chosen: DistillationSettings, url: str, renderer: ChatRenderer) -> EndpointScorer:
    """Raises `SettingsError` where the variable with its key is not set."""
    return EndpointScorer(
        url,
        chosen.model,
        vocabulary=renderer.tokenizer.num_tokens,
        top_k=chosen.top_k or 0,
        api_key_variable=chosen.api_key_variable,
    )
