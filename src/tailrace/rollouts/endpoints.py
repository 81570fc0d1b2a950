"""How a policy comes by an HTTP address, without knowing the gateway that gives it one."""

from __future__ import annotations

import importlib
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import msgspec

from tailrace.environments import Endpoint, Offer
from tailrace.environments.outside import AnswerClient
from tailrace.errors import SettingsError

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

        Raises `SettingsError` where the gateway cannot be started (its port is taken, a package is missing, ...). On
        leaving, whatever its block raised: the `EngineFailed` that a request met.
        """

    def claimed(self, offer: Offer) -> AbstractAsyncContextManager[AnswerClient]:
        """Let a client outside claim a rollout, and wait for that. Inside, another process plays it.

        What the context gives tells the client where that is; one that is told nothing gets another rollout, if any.
        Raises as `open` does.
        """

    def entry(self, worker: int) -> EndpointsEntry:
        """How an agent worker makes its own; they are numbered from 0 on."""

    async def start(self) -> None:
        """Called before the first rollout. Raises as `open` does."""

    async def close(self) -> None:
        """No rollout is played any more."""


def no_endpoints(environment: str) -> SettingsError:
    """For an environment whose policies need addresses, where nothing gives them any."""
    return SettingsError(
        f"environment {environment!r} asks for its policy's HTTP address, and nothing gives one here: pass `endpoints` "
        "(tailrace.gateway.Gateway) to the rollouter"
    )
