"""What a client outside asks for: `POST /rollouts`.

{"environment": "shop", "wait_s": 20, "task": {"ticket": 1}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.gateway.dialects.fields import require_sendable
from tailrace.gateway.dialects.protocol import RequestInvalid
from tailrace.gateway.offers import LONGEST_WAIT_S
from tailrace.records import Json


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout to play."""

    environment: str | None = None
    """None: of whichever environment waits longest."""
    wait_s: float = 0.0
    """For as long where none waits; 60 at most."""
    task: dict[str, Any] | None = None
    """Its row, where the client brings its own. None: the rollout's, whatever that is."""


def read_claim(body: Mapping[str, Json]) -> Claim:
    """Raises `RequestInvalid`, naming the field.

    >>> read_claim({"wait_s": 5})
    Claim(environment=None, wait_s=5.0, task=None)
    """
    try:
        claim = msgspec.convert(body, Claim)
    except msgspec.ValidationError as error:
        raise RequestInvalid(f"a claim has `environment`, `wait_s` and `task`: {error}") from error
    if not 0 <= claim.wait_s <= LONGEST_WAIT_S:
        raise RequestInvalid(
            f"wait_s is {claim.wait_s:g}; it must be from 0 to {LONGEST_WAIT_S:g}: ask again after that",
            parameter="wait_s",
        )
    require_sendable(claim.task, "task")
    return claim
