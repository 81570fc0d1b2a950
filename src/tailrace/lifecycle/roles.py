"""A role of a run: what a launcher starts, and what the role's own function is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TypeAlias, cast

from tailrace.errors import SettingsError


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Of a role that is on several nodes, with a process on each: which of them this one is, and where they meet."""

    role: str
    """Its name, which is that of the first process, too."""
    number: int
    count: int
    host: str
    """The first one's."""
    port: int


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What to start. It is the same in every life of the role."""

    name: str
    """`trainer`, `generator-0`, ...; names the log file and stands in errors."""
    entry: str
    """`module:function` of an `async def function(role: Role) -> None`."""
    settings: bytes = b""
    """Given to the function as it is."""
    threads: int = 1
    """CPU threads of its numerical libraries; more than its share of cores makes all of them slower."""
    devices: tuple[str, ...] | None = None
    """Ids of the GPUs that it sees; None: those that its parent sees."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set beside those it inherits."""
    share: NodeShare | None = None
    """What this process is of a role that is on several nodes."""

    @property
    def role(self) -> str:
        """The name of the role that this process is, or is a share of."""
        return self.name if self.share is None else self.share.role


@dataclass(frozen=True, slots=True)
class Role:
    """One life of a role, as its function is given it."""

    spec: RoleSpec
    life: int
    """How often it was started before."""
    address: str
    """Where it may listen; no other life of any role is given the same."""
    say_ready: Callable[[str], None]
    working: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Around what a thread computes, named for people: it is watched, and has to go on computing."""
    has_own_process: bool = True
    """Whether threads, devices and environment of its spec are those of its process. Else nothing was set for it."""

    @property
    def instance(self) -> str:
        """Names this life of the role among all."""
        return f"{self.spec.name}.{self.life}"

    def ready(self, address: str = "") -> None:
        """Tell the launcher's side that this role is ready. `address`: where it listens, if not at `address`."""
        self.say_ready(address or self.address)


EntryFunction: TypeAlias = Callable[[Role], Awaitable[None]]


def resolve_entry(entry: str) -> EntryFunction:
    """The function that `module:function` names. Raises `SettingsError` where it names none."""
    module, _, attribute = entry.partition(":")
    function = getattr(import_module(module), attribute, None)
    if not callable(function):
        raise SettingsError(f"{entry!r} names no function; a role's entry is written as module:function")
    return cast("EntryFunction", function)
