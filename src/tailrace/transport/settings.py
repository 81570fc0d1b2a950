"""Settings of what goes between the processes of a run."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

BatchTransport: TypeAlias = Literal["memory", "shared_memory", "files", "zmq"]


class TransportSettings(BaseModel):
    """Section `transport`: what carries data from one process to another."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batches: BatchTransport | None = Field(
        None,
        description="What carries batches to the trainer. memory: the event loop that both share; the only one for"
        " placement = inline, and only for that. shared_memory: recycled files in the host's shared memory. files:"
        " checksummed files in the run's folder, each batch published by one rename: slower, on any file system. zmq:"
        " by value, through a socket. Unset: memory inline, shared_memory otherwise.",
    )
    payloads: Literal["reference", "value"] = Field(
        default="reference",
        description="How routed experts reach the trainer: the generator leaves them in shared memory and a reference "
        "travels, or (value) they travel over its socket, for generators of other hosts (generator.connect)",
    )
    weights: Literal["deltas", "whole", "nccl"] | None = Field(
        default=None,
        description="How new weights go to generators of other hosts (generator.connect). deltas: what changed since"
        " those that a generator has, bit for bit, where that is much shorter. whole: all of them. Unset: deltas. And"
        " to this run's own generators: nccl sends them from the trainer's GPU to vLLM's, by vLLM's weight transfer;"
        " unset: through shared memory",
    )
    payload_folder: str | None = Field(
        default=None,
        description="Folder that takes them instead of shared memory; unset: shared memory, and the run's folder where "
        "that is full",
    )
