"""What is left of a run's settings where only its generators are started: by `tailrace eval` and `tailrace try`."""

from __future__ import annotations

from tailrace.config.settings import RunSettings
from tailrace.generation.settings import ReplicaSettings
from tailrace.training.settings.trainer import TrainerSettings


def without_training(settings: RunSettings) -> RunSettings:
    """Settings of the generators that the run would begin with, and of no other role: valid, whatever the run's are.

    A single generator is in this process, unless GPUs are named for it; what a trainer or a cluster asks for is gone.

    >>> from tailrace.config import load_settings
    >>> run = load_settings("quickstart", ["--trainer.ranks", "2", "--generator.replicas", "{min = 1, max = 4}"])
    >>> alone = without_training(run)
    >>> alone.placement, alone.trainer.ranks, alone.generator.replica_names
    ('inline', 1, ('generator',))
    """
    count = settings.generator.replicas.min
    generator = settings.generator.model_copy(
        update={
            "replicas": ReplicaSettings(min=count, max=count),
            "join_address": None,
            "join_key": None,
            "return_routed_experts": False,  # nobody would take them
        }
    )
    has_own_process = count > 1 or generator.connect or generator.devices is not None
    # A branch has to fit a row, and a batch one rank, though neither is made.
    row_tokens = max(settings.scheduling.row_tokens, settings.max_model_tokens)
    return RunSettings(
        seed=settings.seed,
        deadline_scale=settings.deadline_scale,
        placement="local" if has_own_process else "inline",
        max_epochs=1,
        model=settings.model,
        environments=settings.environments,
        rollouts=settings.rollouts.model_copy(update={"agent_workers": 0, "top_k": 0}),
        scheduling=settings.scheduling.model_copy(update={"row_tokens": row_tokens}),
        generator=generator,
        trainer=TrainerSettings(lora=settings.trainer.lora),  # an engine may be built for adapters
        restarts=settings.restarts,
        shutdown=settings.shutdown,
        observability=settings.observability,
    )
