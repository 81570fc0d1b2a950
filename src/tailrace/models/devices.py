"""How settings name GPUs."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator


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
