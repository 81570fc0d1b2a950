"""Model state dicts on their way from the trainer to the generators.

The trainer publishes, a reference travels in the event log, a generator opens it and copies what it needs before it
lets go. A reader never sees half a state dict: what it has open is not overwritten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from tailrace.errors import TransportError
from tailrace.records import ModelStateDictRef

if TYPE_CHECKING:
    import torch


class ModelStateDict(Mapping[str, "torch.Tensor"]):
    """Tensors by name, and the policy version that they are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._tensors = dict(tensors)
        self.version = version

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class ModelStateDictStore(Protocol):
    """Where the trainer leaves its weights and generators find them. Its calls block: keep them off the event loop."""

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> ModelStateDictRef:
        """Copy the tensors into the store. The caller may change them as soon as this returns.

        Raises `TransportError` where the store has no room.
        """
        ...

    def open(self, ref: ModelStateDictRef) -> AbstractContextManager[ModelStateDict]:
        """Lend the tensors for the length of a `with` block; copy what must outlive it.

        The store may have recycled the place for newer weights: then these are lent, and `version` says so. It is never
        lower than the reference's. Raises `TransportError` when the place is gone, and `CorruptData`.
        """
        ...

    def close(self) -> None:
        """Let go of everything that this end holds. Closing twice does nothing."""
        ...


class MemoryModelStateDictStore:
    """A store within one process, which keeps a copy of the newest state dict. Safe across threads."""

    def __init__(self) -> None:
        self._newest: ModelStateDict | None = None
        self._lock = threading.Lock()

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> ModelStateDictRef:
        """See `ModelStateDictStore.publish`."""
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        with self._lock:
            self._newest = ModelStateDict(copies, version)
        num_bytes = sum(tensor.nbytes for tensor in copies.values())
        return ModelStateDictRef(version=version, uri="memory:newest", num_bytes=num_bytes)

    @contextmanager
    def open(self, ref: ModelStateDictRef) -> Iterator[ModelStateDict]:
        """See `ModelStateDictStore.open`."""
        with self._lock:
            newest = self._newest
        if newest is None or newest.version < ref.version:
            raise TransportError(f"no model state dict of version {ref.version} in this store ({ref.uri})")
        yield newest

    def close(self) -> None:
        """See `ModelStateDictStore.close`."""
        with self._lock:
            self._newest = None
