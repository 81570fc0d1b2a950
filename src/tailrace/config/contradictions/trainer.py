"""Of the trainer's ranks, adapters and teacher with other sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.config.contradictions.contradiction import Contradiction, first_twice, key_of_other_hosts

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings


def _ranks(settings: RunSettings) -> Iterator[Contradiction]:
    trainer = settings.trainer
    if trainer.ranks > 1 and settings.placement == "inline":
        yield Contradiction(
            f"trainer.ranks = {trainer.ranks} needs a process for each rank, and placement = 'inline' has one for all: "
            'leave it out, or write placement = "local"',
            *("trainer.ranks", "placement"),
        )
    if trainer.devices is not None and trainer.device.startswith("cuda") and len(trainer.devices) != trainer.ranks:
        yield Contradiction(
            f"trainer.devices names {len(trainer.devices)} GPUs, and trainer.ranks = {trainer.ranks} needs one for "
            "each rank: give both the same number",
            *("trainer.devices", "trainer.ranks"),
        )
    if twice := first_twice(trainer.devices or ()):
        yield Contradiction(
            f"trainer.devices names the GPU {twice} twice, and ranks cannot share one", "trainer.devices"
        )
    if trainer.ranks > 1 and ":" in trainer.device:
        yield Contradiction(
            f"trainer.device = {trainer.device!r} is one GPU, and trainer.ranks = {trainer.ranks}: write "
            'trainer.device = "cuda", and name their GPUs in trainer.devices',
            *("trainer.device", "trainer.ranks"),
        )


def _adapters(settings: RunSettings) -> Iterator[Contradiction]:
    generator, publish = settings.generator, "trainer.lora.publish"
    if not settings.trainer.lora.publishes_adapters:
        if generator.vllm.get("enable_lora"):
            yield Contradiction(
                "generator.vllm.enable_lora is for weights that come as adapters: leave it out, or write "
                'trainer.lora.publish = "adapters", which sets it',
                *("generator.vllm", publish),
            )
    elif generator.engine != "vllm":
        yield Contradiction(
            f"trainer.lora.publish = 'adapters' needs an engine that adds them up, and generator.engine is "
            f'{generator.engine!r}: leave it out, or write generator.engine = "vllm"',
            *(publish, "generator.engine"),
        )
    elif elsewhere := key_of_other_hosts(settings):
        yield Contradiction(
            "trainer.lora.publish = 'adapters' needs generators that were started for it, and those of "
            f"{elsewhere} take whole weights: leave it out",
            *(publish, elsewhere),
        )


def _teacher(settings: RunSettings) -> Iterator[Contradiction]:
    if settings.trainer.loss.distillation is None:
        return
    if settings.scheduling.group_release == "early":
        yield Contradiction(
            "trainer.loss.distillation asks a teacher when a group is scored, and scheduling.group_release = 'early' "
            "trains on rollouts before: leave one of them out",
            *("trainer.loss.distillation", "scheduling.group_release"),
        )
    if settings.rollouts.restricts:
        yield Contradiction(
            "trainer.loss.distillation compares with a teacher's log-probabilities over the whole vocabulary, and "
            "rollouts.top_p or rollouts.top_k leaves less of it to the policy: leave one of them out",
            *("trainer.loss.distillation", "rollouts.top_p"),
        )
    asked = [settings.rollouts.temperature, *(one.temperature for one in settings.environments)]
    if odd := next((one for one in asked if one not in (None, 1.0)), None):
        yield Contradiction(
            f"trainer.loss.distillation compares with a teacher's log-probabilities, which are told at temperature 1, "
            f"and rollouts are sampled at {odd}: write rollouts.temperature = 1.0",
            *("trainer.loss.distillation", "rollouts.temperature"),
        )


CHECKS = (
    _ranks,
    _adapters,
    _teacher,
)
