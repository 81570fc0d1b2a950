"""Settings of what goes between the processes of a run."""

from __future__ import annotations

import os
import re
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]+")

BatchTransport: TypeAlias = Literal["memory", "shared_memory", "files", "zmq", "redis"]


class RedisSettings(BaseModel):
    """Section `transport.redis`: the Redis that batches and the event log go through, where they do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(
        default=None,
        description="Where it is: redis://host:6379/0, rediss:// for TLS (with ?ssl_ca_certs=FILE where its certificate"
        " is your own), unix:///socket; a user of its access lists before the @. What is written here is in the run's"
        " config.toml, too: leave the password out, and give it in the environment variable TAILRACE_REDIS_PASSWORD",
    )
    start: bool = Field(
        default=False,
        description="Start one for this run alone (redis-server has to be installed): on a free port of this machine's"
        " loopback, with a password of its own, in memory",
    )
    bodies: Literal["streams", "files"] = Field(
        default="streams",
        description="Where the bytes of batches go. streams: through Redis, too. files: checksummed files in the run's"
        " folder, which both ends have to see; Redis carries references to them",
    )
    outage_s: float = Field(
        default=60.0,
        gt=0,
        description="How long Redis may be away, or without memory, before the run fails with that reason, in seconds."
        " Until then nothing new starts, and everybody waits",
    )
    prefix: str = Field(
        default="tailrace",
        description="What the names of all keys begin with, of letters, digits, `_`, `.`, `:` and `-`; the run's name"
        " follows",
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        """What cannot be read may hold a password, and is not repeated."""
        try:
            urlsplit(url or "")
        except ValueError as error:
            raise ValueError(
                f"transport.redis.url cannot be read ({error}): write redis://HOST:PORT/0, and what is `[` or `]` in a"
                " user's name as %5B or %5D"
            ) from None
        return url

    @field_validator("prefix")
    @classmethod
    def _names_keys_alone(cls, prefix: str) -> str:
        """A run removes what earlier starts of it left, which it finds by a pattern: a `*` would find others' keys."""
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"transport.redis.prefix = {prefix!r} names no keys: write letters, digits, `_`, `.`, `:` and `-`"
                " alone, as in team-1:tailrace. What an earlier start of a run left is removed by a pattern, in which"
                " `*`, `?`, `[` and the like would stand for others' keys too"
            )
        return prefix


class TransportSettings(BaseModel):
    """Section `transport`: what carries data from one process to another."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batches: BatchTransport | None = Field(
        None,
        description="What carries batches to the trainer. memory: the event loop that both share; the only one for"
        " placement = inline, and only for that. shared_memory: recycled files in the host's shared memory. files:"
        " checksummed files in the run's folder, each batch published by one rename: slower, on any file system. zmq:"
        " by value, through a socket. redis: through streams of the Redis of transport.redis, and the event log with"
        " them. Unset: memory inline, redis for placement = redis, zmq for placement = ray, shared_memory otherwise.",
    )
    redis: RedisSettings = Field(default_factory=RedisSettings)
    payloads: Literal["reference", "value"] = Field(
        default="reference",
        description="How routed experts reach the trainer: the generator leaves them in shared memory and a reference "
        "travels, or (value) they travel over its socket, for generators of other hosts (generator.connect)",
    )
    weights: Literal["deltas", "whole", "nccl", "object_store"] | None = Field(
        default=None,
        description="How new weights go to generators of other hosts (generator.connect). deltas: what changed since"
        " those that a generator has, bit for bit, where that is much shorter. whole: all of them. Unset: deltas. And"
        " to this run's own generators: nccl sends them from the trainer's GPU to vLLM's, by vLLM's weight transfer;"
        " object_store brings them to each node once, through Ray's, as deltas where those are short; unset: through"
        " shared memory, or, with placement = ray, as files in the run's folder",
    )
    payload_folder: str | None = Field(
        default=None,
        description="Folder that takes them instead of shared memory; unset: shared memory, and the run's folder where "
        "that is full",
    )

    @field_validator("payload_folder")
    @classmethod
    def _begins_at_home(cls, path: str | None) -> str | None:
        return path and os.path.expanduser(path)
