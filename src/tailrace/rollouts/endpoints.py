"""How a policy comes by an HTTP address, without knowing the gateway that gives it one."""

from __future__ import annotations

import importlib
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import msgspec

from tailrace.environments import Endpoint

if TYPE_CHECKING:
    from tailrace.rollouts.policy import RolloutPolicy


class EndpointsEntry(msgspec.Struct, frozen=True):
    """What another process makes endpoints of, for the rollouts that it plays."""

    factory: str
    """`module:function`, which takes the settings."""
    settings: str
    """As JSON."""

    def make(self) -> Endpoints:
        """Endpoints of this process."""
        module, _, name = self.factory.partition(":")
        made: Endpoints = getattr(importlib.import_module(module), name)(self.settings)
        return made


class Endpoints(Protocol):
    """Gives policies of rollouts that are played in this process their addresses: the gateway."""

    def open(self, policy: RolloutPolicy) -> AbstractAsyncContextManager[Endpoint]:
        """The policy answers over HTTP until the context is left.

        Raises `SettingsError` where the gateway cannot be started (its port is taken, a package is missing, ...).
        """

    def entry(self, worker: int) -> EndpointsEntry:
        """How an agent worker makes its own; they are numbered from 0 on."""

    async def start(self) -> None:
        """Called before the first rollout. Raises as `open` does."""

    async def close(self) -> None:
        """No rollout is played any more."""
