"""What a role's process is started with, and how it gets it.

The parent writes a `Launch` as one line of JSON into the child's standard input and keeps that pipe open for as long as
it lives: its end of file is how the child learns that its parent vanished, on every system and however it died.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A role to be run in a process of its own."""

    name: str
    """`trainer`, `generator-0`, ...; names the log file and stands in errors."""
    function: str
    """`module:function` of an `async def function(settings: bytes) -> None`."""
    settings: bytes = b""
    """Handed to the function as it is."""
    threads: int = 1
    """Threads of its numerical libraries; more than its share of cores makes all of them slower."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set beside those it inherits."""


class Launch(msgspec.Struct, frozen=True):
    """The child's first line of input."""

    role: str
    function: str
    settings: bytes
    sys_path: list[str]
    """The parent's, so that both import the same modules."""
    orphan_grace_s: float
    """From the parent's end to this process group's, at most."""


def child_environment(role: RoleSpec) -> dict[str, str]:
    """The whole environment of a role's process."""
    return {
        **os.environ,
        **dict.fromkeys(_THREAD_VARIABLES, str(role.threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **role.environment,
    }
