"""Builds engines from settings, whichever kind and however many ranks they have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from tailrace.config.serving import ServeSettings
from tailrace.errors import SettingsError
from tailrace.generation.engines.protocol import Engine
from tailrace.generation.engines.vllm.nodes import Nodes
from tailrace.generation.engines.vllm.options import require_vllm
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.lifecycle.garbage import import_large
from tailrace.lifecycle.roles import Role
from tailrace.run.ranks import FollowerSettings, Rank, follow_rank, lead
from tailrace.training.settings.lora import LoraSettings
from tailrace.transport.settings import TransportSettings


def require_engine(generator: GeneratorSettings) -> None:
    """Raise `SettingsError` for an engine that is not installed or settings that it does not take; imports neither."""
    if generator.engine == "vllm":
        require_vllm(generator)
    elif generator.batch_invariant and not generator.connect:  # else the run builds no engine
        raise SettingsError(
            "generator.batch_invariant: the torch engine's sums depend, in their last bits, on what runs beside a "
            "request; leave it off",
            key=("generator", "batch_invariant"),
        )
    elif generator.vllm or (generator.tensor_parallel > 1 and not generator.lockstep):
        given = "generator.vllm" if generator.vllm else "generator.tensor_parallel"
        raise SettingsError(f"{given} is for generator.engine = 'vllm', but the engine is {generator.engine!r}")


def with_adapters(generator: GeneratorSettings, lora: LoraSettings) -> GeneratorSettings:
    """Settings of an engine that gets weights as `lora` publishes them."""
    if not lora.publishes_adapters:
        return generator
    options = {"max_lora_rank": lora.rank, **generator.vllm, "enable_lora": True}
    return generator.model_copy(update={"vllm": options})


def with_weight_transfer(generator: GeneratorSettings, transport: TransportSettings) -> GeneratorSettings:
    """Settings of an engine whose workers take part in `transport.weights = "nccl"`."""
    if transport.weights != "nccl":
        return generator
    return generator.model_copy(update={"vllm": {**generator.vllm, "weight_transfer_config": {"backend": "nccl"}}})


def engine_factory(
    model: ModelSettings, generator: GeneratorSettings, torchrun: Rank | None = None, nodes: Nodes | None = None
) -> Callable[[], Engine]:
    """Builds the engine with the initial weights, in the thread that steps it. Raises `SettingsError`.

    Under `generator.lockstep` the other ranks are those of `torchrun`, or else processes that it starts; else vLLM has
    its workers on all of `nodes`, of which this is the first.
    """
    require_engine(generator)
    build = partial(build_engine, model, generator, nodes)
    if not generator.lockstep:
        return build
    return partial(lead, build, ServeSettings(model=model, generator=generator), torchrun)


def build_engine(model: ModelSettings, generator: GeneratorSettings, nodes: Nodes | None = None) -> Engine:
    """One rank's engine. Call it in the thread that steps it."""
    if generator.engine == "vllm":
        from tailrace.generation.engines.vllm.engine import vllm_engine_factory

        return vllm_engine_factory(model, generator, nodes)()
    import_large("tailrace.generation.engines.torch.engine")
    from tailrace.generation.engines.torch.engine import torch_engine_factory

    return torch_engine_factory(model, generator)()


async def follower(role: Role) -> None:
    """The process of a rank that `lead` started: the entry `ranks.FOLLOWER`."""
    received = msgspec.json.decode(role.spec.settings, type=FollowerSettings)
    settings = ServeSettings.model_validate_json(received.settings)
    follow_rank(partial(build_engine, settings.model, settings.generator), received.rank)
