"""Which GPUs there are and which role gets which: decided before anything starts, without importing torch."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tailrace.errors import SettingsError

_DRIVER = Path("/proc/driver/nvidia/gpus")
_QUERY_S = 20.0


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What one role asks for."""

    role: str
    count: int
    """GPUs that it needs."""
    setting: str
    """That asks for them, as in `trainer.device = 'cuda'`."""
    chosen: tuple[str, ...] | None = None
    """Ids that the settings name; None: any."""


def assign_devices(needs: Sequence[DeviceNeed], pool: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By role, the ids of its GPUs: those chosen for it, else the next of the pool that no role chose, in order.

    A single GPU is shared by all. Roles that need none are left out. Raises `SettingsError`.

    >>> assign_devices([DeviceNeed("trainer", 1, "..."), DeviceNeed("generator", 2, "...")], ["0", "1", "2"])
    {'trainer': ('0',), 'generator': ('1', '2')}
    """
    needs = [need for need in needs if need.count]
    for need in needs:
        _require_possible(need, pool)
    taken = {device for need in needs for device in need.chosen or ()}
    asked = sum(need.count for need in needs if need.chosen is None)
    free = [device for device in pool if device not in taken]
    if len(pool) == 1 and all(need.count == 1 for need in needs):
        free = [pool[0]] * asked
    if asked > len(free):
        wants = ", ".join(f"{need.count} for the {need.role}" for need in needs)
        raise SettingsError(
            f"this run needs {wants}, and sees {len(pool)} GPUs ({', '.join(pool)}): lower generator.replicas or "
            "generator.tensor_parallel, or let roles share GPUs by naming them in trainer.devices and generator.devices"
        )
    shares = iter(free)
    return {need.role: need.chosen or tuple(next(shares) for _ in range(need.count)) for need in needs}


def _require_possible(need: DeviceNeed, pool: Sequence[str]) -> None:
    if not pool:
        raise SettingsError(f"{need.setting} cannot be used here: there is no GPU that this run sees")
    if need.chosen is None:
        return
    if unseen := [device for device in need.chosen if device not in pool]:
        raise SettingsError(f"{need.setting} names the GPU {unseen[0]}, and this run sees {', '.join(pool)}")
    if (given := len(set(need.chosen))) < need.count:
        raise SettingsError(f"{need.setting} gives the {need.role} {given} of the {need.count} GPUs that it needs")


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Ids of the GPUs that a process with this environment sees: numbers, or what CUDA_VISIBLE_DEVICES says (UUIDs).

    >>> visible_devices({"CUDA_VISIBLE_DEVICES": "2,GPU-8932f937"}), visible_devices({"CUDA_VISIBLE_DEVICES": ""})
    (('2', 'GPU-8932f937'), ())
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(map(str, range(_count_devices())))
    ids = [part.strip() for part in visible.split(",")]
    hidden_from = next((index for index, id in enumerate(ids) if id in {"", "-1"}), len(ids))  # as CUDA reads it
    return tuple(ids[:hidden_from])


@cache
def _count_devices() -> int:
    """Of the machine, or of what a container sees of it."""
    if query := shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run([query, "-L"], capture_output=True, text=True, timeout=_QUERY_S, check=True)
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return sum(1 for _ in _DRIVER.iterdir()) if _DRIVER.is_dir() else 0
