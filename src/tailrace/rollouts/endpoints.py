"""How a policy comes by an HTTP address, without knowing the gateway that gives it one."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from tailrace.environments import Endpoint

if TYPE_CHECKING:
    from tailrace.rollouts.policy import RolloutPolicy


class Endpoints(Protocol):
    """Gives policies of rollouts that are played in this process their addresses: the gateway."""

    def open(self, policy: RolloutPolicy) -> AbstractAsyncContextManager[Endpoint]:
        """The policy answers over HTTP until the context is left.

        Raises `SettingsError` where the gateway cannot be started (its port is taken, a package is missing, ...).
        """
