"""Which Ray cluster has the roles of a run, where it has."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RaySettings(BaseModel):
    """Section `ray`: the cluster of placement = "ray"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str | None = Field(
        None,
        pattern=r"^[^\s/]+:\d+$",
        description="Of the cluster's head, as HOST:PORT (`ray start` says it). This machine has to be one of the"
        " cluster's. Unset: the cluster that this machine belongs to (or RAY_ADDRESS).",
    )
    wait_s: float | None = Field(
        None,
        gt=0,
        description="Seconds to wait for resources that the cluster lacks: for an autoscaler, or for another run to"
        " end. Unset: what the cluster does not have at all is an error at once, what others use after 20 s.",
    )
