"""The teacher of a run's loss: on a generator of its own, or behind an endpoint."""

from __future__ import annotations

import asyncio

from tailrace.config import RunSettings
from tailrace.errors import ModelError
from tailrace.generation.settings import ReplicaSettings
from tailrace.models.files import own_context
from tailrace.models.identity import identify
from tailrace.models.loading import require_weights
from tailrace.models.vocabulary import require_same_vocabulary
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


async def require_teacher(settings: RunSettings, renderer: ChatRenderer) -> None:
    """Raise `ModelError` where the teacher cannot score what the policy samples; `SettingsError` without its key."""
    chosen = settings.trainer.loss.distillation
    if chosen is None:
        return
    if chosen.url is None:
        await asyncio.to_thread(require_frozen, settings, chosen.model, "trainer.loss.distillation.model", room=1)
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


def require_frozen(settings: RunSettings, model: str, setting: str, *, room: int = 0) -> None:
    """Raise `ModelError` where a `model` beside the policy cannot score what that samples: as `setting` names it, with
    so much `room` beyond the longest branch. As far as can be seen without loading it."""
    require_weights(model)
    require_same_vocabulary(settings.model.name, model, setting=setting)
    context, needed = own_context(identify(model, with_weights=False).config), settings.max_model_tokens + room
    if context is not None and context < needed:
        beyond = ", with one more after it" if room else ""
        raise ModelError(
            f"{setting} is {model!r}, which was made for {context} tokens, and a rollout's branch may have "
            f"{settings.max_model_tokens}{beyond}: choose another one, or lower model.max_model_tokens"
        )


def _endpoint_scorer(chosen: DistillationSettings, url: str, renderer: ChatRenderer) -> EndpointScorer:
    """Raises `SettingsError` where the variable with its key is not set."""
    return EndpointScorer(
        url,
        chosen.model,
        vocabulary=renderer.tokenizer.num_tokens,
        top_k=chosen.top_k or 0,
        api_key_variable=chosen.api_key_variable,
    )
