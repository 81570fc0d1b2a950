"""What the roles of a run need of memory, in words: worked out from the model's configuration, no weights loaded."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.config import RunSettings
from tailrace.errors import ModelError
from tailrace.generation.memory import generator_memory
from tailrace.models.loading import BUNDLED_PREFIX, outline_of
from tailrace.models.sizes import ModelSizes, model_sizes
from tailrace.run.teacher import teacher_settings
from tailrace.training.memory import (
    AdapterSizes,
    TrainerMemory,
    adapter_sizes,
    kept_bytes,
    published_bytes,
    trainer_memory,
)

_GB = 1e9


def describe_memory(settings: RunSettings) -> list[str]:
    """Lines for people. Imports transformers.

    Raises `ModelError` for a bundled model that there is not and `SettingsError` for an adapter that the model cannot
    have.
    """
    try:
        outline = outline_of(settings.model.name)
        sizes = model_sizes(outline)
    except ModelError as error:
        if settings.model.name.startswith(BUNDLED_PREFIX):  # others may be found where the run will be
            raise
        return [f"What it needs of memory is not known here: {error}"]
    adapter = adapter_sizes(outline, settings.trainer.lora)
    trainer = _trainer(settings, sizes, adapter) if settings.trainer.feed == "batch" else ()
    return [*trainer, *_generators(settings, sizes, adapter), *_teacher(settings)]


def _trainer(settings: RunSettings, sizes: ModelSizes, adapter: AdapterSizes) -> Iterator[str]:
    trainer, row_tokens = settings.trainer, settings.scheduling.row_tokens
    reference = _reference_weights(settings, sizes, adapter)
    memory = trainer_memory(
        sizes,
        trainer,
        row_tokens=row_tokens,
        sample_tokens=settings.max_model_tokens,
        published=settings.model.dtype,
        adapter=adapter,
        reference_weights=sizes.weights if reference is None else reference,
    )
    who = "The trainer" if trainer.ranks == 1 else f"Each of the trainer's {trainer.ranks} ranks"
    where = "its GPU" if trainer.device.startswith("cuda") else "memory"
    yield f"{who} needs about {gigabytes(memory.device)} of {where}, for {sizes.weights:,} weights:"
    for name, num_bytes in _terms(memory, row_tokens):
        if num_bytes:
            yield f"  {gigabytes(num_bytes):>9}  {name}"
    if reference is None:
        yield "  The reference model is not known here, and is counted as large as the trained one."
    for tokens in (row_tokens // 2, row_tokens, 2 * row_tokens):
        kept = [
            kept_bytes(
                sizes,
                trainer.model_copy(update={"gradient_checkpointing": once_more}),
                tokens,
                sample_tokens=settings.max_model_tokens,
                trains_all=adapter.weights == 0,
            )
            for once_more in (False, True)
        ]
        yield (
            f"  Rows of {tokens:,} tokens keep {gigabytes(kept[0])}, and {gigabytes(kept[1])} with "
            "trainer.gradient_checkpointing."
        )
    offloaded = f", {gigabytes(memory.offloaded)} for offloaded activations" if memory.offloaded else ""
    if memory.offloaded_moments:
        offloaded += f", {gigabytes(memory.offloaded_moments)} for the optimizer's moments"
    on_host, published, first = memory.host, memory.publication, "it" if trainer.ranks == 1 else "rank 0"
    if settings.transport.weights == "nccl":
        on_gpu = published_bytes(sizes, trainer.lora, settings.model.dtype, adapter)
        yield (
            f"On its GPU {first} needs up to {gigabytes(2 * on_gpu)} more, for weights on their way to the "
            f"generators: those of a step, and of the one before; and {gigabytes(on_gpu)} for each older version "
            "that is still being sent, where that takes longer than a step."
        )
        on_host, published = on_host - published, 0
    yield (
        f"On the host {first} needs up to {gigabytes(on_host)} more: "
        f"{gigabytes(published)} for weights on their way to the generators, {gigabytes(memory.checkpoint)} "
        f"while a checkpoint is written{offloaded}."
    )


def _reference_weights(settings: RunSettings, sizes: ModelSizes, adapter: AdapterSizes) -> int | None:
    """None for a model that may be where the run will be."""
    chosen = settings.trainer.loss.reference_kl
    if chosen is None or (chosen.model is None and adapter.weights):
        return 0
    if chosen.model is None:
        return sizes.weights
    try:
        return model_sizes(outline_of(chosen.model)).weights
    except ModelError:
        return None


def _terms(memory: TrainerMemory, row_tokens: int) -> list[tuple[str, int]]:
    return [
        ("weights, in float32 (there is no second copy)", memory.weights),
        ("the adapter, its gradients and its moments", memory.adapter),
        ("gradients", memory.gradients),
        ("the optimizer's moments", memory.moments),
        ("the reference model", memory.reference),
        ("weights and gradients gathered from other ranks, layer by layer", memory.gathered),
        (f"activations of a row of {row_tokens:,} tokens", memory.kept),
        ("the head: logits of a chunk of tokens, its gradient of a row", memory.head),
    ]


def _generators(settings: RunSettings, sizes: ModelSizes, adapter: AdapterSizes) -> Iterator[str]:
    generator, dtype = settings.generator, settings.model.dtype
    if generator.connect:
        return
    published = published_bytes(sizes, settings.trainer.lora, dtype, adapter)
    memory = generator_memory(sizes, dtype, generator, max_model_tokens=settings.max_model_tokens, published=published)
    count = generator.replicas.max
    who = "The generator" if count == 1 else f"Each of {generator.replicas.min} to {count} generators"
    who = f"Each of {count} generators" if count == generator.replicas.min > 1 else who
    yield (
        f"{who} needs up to about {gigabytes(memory.total)}: weights {gigabytes(memory.weights)}, keys and values of "
        f"{generator.concurrency} requests of {settings.max_model_tokens:,} tokens {gigabytes(memory.cache)}, new "
        f"weights while they are taken over {gigabytes(memory.loading)}."
    )


def _teacher(settings: RunSettings) -> Iterator[str]:
    """Of the role that a teacher without a server of its own is: it never gets new weights."""
    chosen = teacher_settings(settings)
    if chosen is None:
        return
    try:
        sizes = model_sizes(outline_of(chosen.model.name))
    except ModelError as error:
        yield f"What the teacher needs of memory is not known here: {error}"
        return
    memory = generator_memory(
        sizes, chosen.model.dtype, chosen.generator, max_model_tokens=chosen.max_model_tokens, published=0
    )
    yield (
        f"The teacher, a process of its own, needs up to about {gigabytes(memory.total)}: {sizes.weights:,} weights "
        f"{gigabytes(memory.weights)}, keys and values of {chosen.generator.concurrency} branches of "
        f"{chosen.max_model_tokens:,} tokens {gigabytes(memory.cache)}."
    )


def gigabytes(num_bytes: float) -> str:
    """For people.

    >>> gigabytes(28.4e9), gigabytes(3.2e6), gigabytes(100)
    ('28.4 GB', '3.2 MB', '0.0 MB')
    """
    return f"{num_bytes / _GB:,.1f} GB" if num_bytes >= 0.1 * _GB else f"{num_bytes / 1e6:,.1f} MB"
