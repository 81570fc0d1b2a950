"""Which Ray cluster has the roles of a run, where it has."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator


class RaySettings(BaseModel):
    """Section `ray`: the cluster of placement = "ray"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str | None = Field(
        None,
        description="Of the cluster's head, as HOST:PORT (`ray start` says it). This machine has to be one of the"
        " cluster's. Unset: the cluster that this machine belongs to (or RAY_ADDRESS).",
    )
    wait_s: float | None = Field(
        None,
        gt=0,
        description="Seconds to wait for resources that the cluster lacks: for an autoscaler, or for another run to"
        " end. Unset: what the cluster does not have at all is an error at once, what others use after 20 s.",
    )

    @field_validator("address")
    @classmethod
    def _is_that_of_a_head(cls, address: str | None) -> str | None:
        found = re.fullmatch(r"[^\s/]+:(\d{1,5})", address or "")
        if address is None or (found is not None and 0 < int(found[1]) < 1 << 16):
            return address
        own = "give HOST:PORT of the head, as `ray start` says it, or nothing for the cluster of this machine"
        client = " (a run is one of its cluster's own, and does not go through Ray Client)" * address.startswith("ray:")
        raise ValueError(f"ray.address = {address!r} is no address of a head: {own}{client}")
