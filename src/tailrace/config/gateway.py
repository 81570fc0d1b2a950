"""How rollouts' policies answer over HTTP."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class GatewaySettings(BaseModel):
    """Section `gateway`: HTTP for agents that are programs; an extra: `pip install 'tailrace[gateway]'`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen at. Keys are sent as they are, no TLS.")
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="0: a free one, taken where an agent first asks for its policy's address. Otherwise the"
        " orchestrator's, from the start of a run on; agent worker n, counted from 1, listens at port + n.",
    )
    sampling: Literal["client", "run"] = Field(
        "client",
        description="Whose temperature, top_p and seed hold. client: the request's, and what cannot be trained on is"
        " refused; run: the run's own, whatever a request asks for.",
    )
    system_messages: Literal["exact", "first"] = Field(
        "exact",
        description="first: a conversation keeps the system messages that it began with, whatever clients that rewrite"
        " theirs at every turn send later; exact: another system message is another conversation, and another branch.",
    )
    max_body_mb: float = Field(8.0, gt=0, le=1024, description="Megabytes of a request's body at most.")
    client_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that a client may take to send a request, or to read what it is sent."
    )
    keep_alive_s: float = Field(
        10.0, gt=0, description="Seconds of silence after which a stream gets a comment, so that no proxy closes it."
    )

    @property
    def is_everywhere(self) -> bool:
        """Whether it listens at all addresses of this machine."""
        return self.host in ("0.0.0.0", "::")
