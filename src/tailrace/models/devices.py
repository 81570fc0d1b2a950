"""How settings name devices."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator

from tailrace.errors import SettingsError

_INDEX = r"(:[0-9]{1,4})?"
ANY, CPU_OR_CUDA = re.compile(rf"cpu|(cuda|xpu|mps){_INDEX}"), re.compile(rf"cpu|cuda{_INDEX}")


def require_device_name(device: str, setting: str, names: re.Pattern[str] = ANY) -> str:
    """The device, where torch has one of that name on some machine, and it is one of `names`. Raises `ValueError`.

    >>> require_device_name("cuda:1", "trainer.device")
    'cuda:1'
    """
    if not names.fullmatch(device):
        raise ValueError(
            f"{setting} is {device!r}, which names no device: write cpu, cuda or, for one of several GPUs, cuda:1"
        )
    return device


def require_device(device: str, setting: str) -> None:
    """Raise `SettingsError` for a device that this machine has not, or torch was built without. Imports torch."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without it
        reason = str(error).partition("\n")[0]
        raise SettingsError(f"{setting} = {device!r} cannot be used here: {reason}") from error


def read_device_ids(value: object) -> object:
    """Numbers or UUIDs, as TOML (a list) and the command line (`1,2`) write them.

    >>> read_device_ids([0, "GPU-8932f937"]), read_device_ids("1,2")
    (('0', 'GPU-8932f937'), ('1', '2'))
    """
    if isinstance(value, str | int):
        value = str(value).split(",")
    return tuple(str(device).strip() for device in value) if isinstance(value, list | tuple) else value


DeviceIds: TypeAlias = Annotated[tuple[str, ...] | None, BeforeValidator(read_device_ids)]
"""As CUDA_VISIBLE_DEVICES has them; None: unset."""
