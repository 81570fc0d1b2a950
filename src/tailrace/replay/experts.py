"""Routed experts of a replay: in a payload store in shared memory, written by one end and mapped by another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.records import Branch, Group, PayloadRef
from tailrace.transport.payloads.slab_store import SlabPayloadStore

_WRITER = "replay"


class ReplayedExperts:
    """The generator's and the trainer's end. True once anything was put. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._written, self._read = SlabPayloadStore(folder, writer=_WRITER), SlabPayloadStore(folder)
        self._stand_ins: dict[str, PayloadRef] = {}
        self._count = 0

    def __enter__(self) -> ReplayedExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self._written.close()
        self._read.close()

    def __bool__(self) -> bool:
        return self._count > 0

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        """As a generator does at the end of a request."""
        self._count += 1
        return self._written.put(array)

    def stand_in(self, groups: Iterable[Group]) -> None:
        """A capture knows only the size of its experts: put others of the same size."""
        for ref in _refs(groups):
            if ref.uri not in self._stand_ins:
                self._stand_ins[ref.uri] = self.put(np.ones(ref.shape, ref.dtype))

    def open(self, ref: PayloadRef) -> NDArray[np.generic]:
        """As the trainer does."""
        return self._read.open(self._stand_ins.get(ref.uri, ref))


def num_bytes(groups: Iterable[Group]) -> int:
    """Of the token columns, and of the experts that belong to them."""
    groups = list(groups)
    columns = sum(
        branch.token_ids.nbytes + branch.logprobs.nbytes + branch.policy_versions.nbytes + branch.loss_mask.nbytes
        for branch in _branches(groups)
    )
    return columns + sum(ref.num_bytes for ref in {ref.uri: ref for ref in _refs(groups)}.values())


def _branches(groups: Iterable[Group]) -> Iterator[Branch]:
    return (branch for group in groups for rollout in group.rollouts for branch in rollout.branches)


def _refs(groups: Iterable[Group]) -> Iterator[PayloadRef]:
    return (chunk.ref for branch in _branches(groups) for chunk in branch.payload_chunks if chunk.ref is not None)
