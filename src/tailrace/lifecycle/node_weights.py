"""New weights from node to node through Ray's object store, for `transport.weights = "object_store"`.

    trainer ── file ──► NodeWeights ── put ──► object store ── get ──► NodeWeights ── file ──► the node's generators
                        (its node)                                     (each other node)

A state dict is put once, whole or as a delta, for all nodes that need the same; nodes pass it on among themselves, and
each has one file for all of its generators. Which node has what `WeightsOfNodes` knows, in the run's own process, by
which no bytes go. A node that is lost, with the trainer's last weights, is made up for by any other that has them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tailrace.errors import TailraceError, TransportError
from tailrace.generation.rpc.uploads import PIECE_BYTES, Upload, UploadedModelStateDicts
from tailrace.records import ModelStateDictRef
from tailrace.transport.owned_folders import NodeFolder, remove_leftovers
from tailrace.transport.weights.lending import LendingFigures, ModelStateDictLender
from tailrace.transport.weights.stores import remove_abandoned

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A state dict's file in the object store, or a delta that leads to it."""

    version: int
    upload: Upload
    content: ObjectRef[Any]
    """Bytes, as an array."""
    figures: LendingFigures
    """Of this file, or delta."""


class NodeWeights:
    """An actor on one node: puts what was published there, and gets what was on others. Its calls come one by one."""

    def __init__(self, epoch: str, host: str) -> None:
        """`host` is the address by which the cluster knows the node. Raises `SettingsError`."""
        remove_leftovers()
        self._folder = NodeFolder(epoch, host)
        self._lender = ModelStateDictLender(self._folder.path)
        self._received = UploadedModelStateDicts(self._folder.path)
        self._stored: dict[tuple[str, str], StoredWeights] = {}

    def put(self, ref: ModelStateDictRef, held: str) -> StoredWeights:
        """For a node that holds the file of digest `held`. Raises as `ModelStateDictLender.lend` does."""
        import ray

        remove_abandoned(self._folder.path, ref.uri)
        before = self._lender.figures
        with self._lender.lend(ref, held) as lent:
            key = lent.digest, lent.base
            if key not in self._stored:
                content = ray.put(np.frombuffer(lent.content, np.uint8))
                upload = Upload(num_bytes=len(lent.content), digest=lent.digest, base=lent.base)
                stored = StoredWeights(lent.version, upload, content, self._lender.figures.since(before))
                # the store frees what nobody has a reference to
                self._stored = {of: other for of, other in self._stored.items() if of[0] == lent.digest} | {key: stored}
            return self._stored[key]

    def get(self, stored: StoredWeights) -> ModelStateDictRef:
        """Make a file of it, which the reference names. Raises as `UploadedModelStateDicts.write` does."""
        import ray

        content, uri = memoryview(ray.get(stored.content)), ""
        for offset in range(0, len(content), PIECE_BYTES):
            uri = self._received.write(stored.upload, offset, content[offset : offset + PIECE_BYTES])
        return ModelStateDictRef(stored.version, uri, stored.figures.whole_bytes)

    def close(self) -> None:
        """Remove what this node has."""
        self._received.close()
        self._lender.close()
        self._folder.leave()


@dataclass(slots=True, eq=False)
class _Node:
    """What is known of one."""

    actor: ActorHandle
    published: ModelStateDictRef | None = None
    """What it got last, as it was published, and where that is here."""
    own: ModelStateDictRef | None = None
    held: str = ""
    """Digest of its file; none where it is not known."""

    def names(self, ref: ModelStateDictRef) -> ModelStateDictRef:
        """What the node itself calls weights that were published here, or came here."""
        if self.own is not None and self.published == ref:
            return self.own
        return msgspec.structs.replace(ref, uri=_place(ref)[1])


@dataclass(slots=True, eq=False)
class WeightsOfNodes:
    """Brings published weights to nodes. Use it on one event loop."""

    start: Callable[[str], Awaitable[ActorHandle]]
    """Starts `NodeWeights` on the node of this address. Raises `TransportError`."""
    end: Callable[[ActorHandle], None]
    """Ends an actor that does not answer."""
    figures: LendingFigures = field(default_factory=LendingFigures)
    """Of everything that went from node to node."""
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def bring(self, ref: ModelStateDictRef, host: str) -> ModelStateDictRef:
        """The reference by which processes on this node open the same weights, or newer ones.

        Raises `TransportError` where no node that is left has them, and `CorruptData`.
        """
        async with self._turns[host]:  # the node's other generators wait for the same file
            target, failures = await self._node(host), list[str]()
            if host == _place(ref)[0] or target.published == ref:
                return target.names(ref)
            for source in [*self._sources(ref)]:
                try:
                    return await self._move(ref, source, host)
                except TailraceError as error:
                    failures.append(f"from {source}: {error}")
            raise TransportError(f"weights of version {ref.version} did not come to {host}; {'; '.join(failures)}")

    async def close(self) -> None:
        """Nothing is left on any node that answers."""
        nodes, self._nodes = self._nodes, {}
        await asyncio.gather(*(node.actor.close.remote() for node in nodes.values()), return_exceptions=True)

    def _sources(self, ref: ModelStateDictRef) -> Iterator[str]:
        """Nodes that have these weights, the one where they were published first."""
        publisher = _place(ref)[0]
        yield publisher
        yield from (host for host, node in self._nodes.items() if node.published == ref and host != publisher)

    async def _node(self, host: str) -> _Node:
        async with self._starting:
            if host not in self._nodes:
                self._nodes[host] = _Node(await self.start(host))
            return self._nodes[host]

    async def _move(self, ref: ModelStateDictRef, source: str, host: str) -> ModelStateDictRef:
        """As a delta where that is short, and the node can apply it."""
        there, target = await self._node(source), await self._node(host)
        held, target.held, target.published = target.held, "", None  # a file that is being changed is none
        for base in (held, "") if held else ("",):
            stored: StoredWeights = await self._ask(source, there.actor.put.remote(there.names(ref), base))
            try:
                own: ModelStateDictRef = await self._ask(host, target.actor.get.remote(stored))
            except TailraceError:
                if not stored.upload.base:
                    raise
            else:
                break
        target.held, target.published, target.own = stored.upload.digest, ref, own
        self.figures = self.figures.plus(stored.figures)
        return own

    async def _ask(self, host: str, answer: Awaitable[Any]) -> Any:
        """What a node's actor answers. Raises what that raised, and `TransportError` where it is lost."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return await answer
        except TailraceError:
            raise
        except RayTaskError as error:
            raise TransportError(f"the weights of the node {host}: {error.cause!r}") from error
        except RayError as error:
            if (lost := self._nodes.pop(host, None)) is not None:
                self.end(lost.actor)
            raise TransportError(f"the node {host} is lost, or what holds weights there: {error}") from error


def _place(ref: ModelStateDictRef) -> tuple[str, str]:
    """The node where it was published, and its name there."""
    host, _, name = ref.uri.rpartition("/")
    return host, name
