"""Model state dicts on their way from the trainer to the generators.

The trainer publishes, a reference travels in the event log, a generator opens it and copies what it needs. A reader
never sees half a state dict: what it has open is not overwritten.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

import msgspec
import psutil
from typing_extensions import override

from tailrace.errors import CorruptData, TransportError
from tailrace.guards import guarded
from tailrace.records import ModelStateDictRef
from tailrace.transport.segments import (
    Segment,
    SegmentFile,
    TensorBuffers,
    map_segment,
    read_safetensors,
    read_segment,
    verify_body,
)

if TYPE_CHECKING:
    import torch


PUBLISHED_FILE: Final = "model-state-dict-"
"""What names of published files begin with; the publisher's process id follows, and which of its lives that was."""


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

    keeps_tensors: ClassVar[bool] = False
    """Whether `publish` keeps the tensors, on their device, instead of copies: they must never change then."""

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
        """Release this end's files and memory. Closing twice does nothing."""
        ...


class FolderPublisher(Protocol):
    """A store that takes weights which somebody else wrote. Its calls block: keep them off the event loop."""

    def publish_folder(self, folder: Path, version: int) -> ModelStateDictRef:
        """Copy what a folder in Hugging Face layout holds into the store: all of its safetensors files.

        Raises `TransportError` for a folder without, one that cannot be read or has a tensor twice, and where the store
        has no room; `CorruptData` for files that are not what they say.
        """
        ...

    def close(self) -> None:
        """As `ModelStateDictStore.close`."""
        ...


class MemoryModelStateDictStore(ModelStateDictStore):
    """A store within one process, which keeps a copy of the newest state dict. Safe across threads."""

    def __init__(self) -> None:
        self._newest: ModelStateDict | None = None
        self._lock = threading.Lock()

    @override
    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> ModelStateDictRef:
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        with self._lock:
            self._newest = ModelStateDict(copies, version)
        num_bytes = sum(tensor.nbytes for tensor in copies.values())
        return ModelStateDictRef(version=version, uri="memory:newest", num_bytes=num_bytes)

    def publish_folder(self, folder: Path, version: int) -> ModelStateDictRef:
        """As `FolderPublisher` says."""
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        _read_folder(folder)  # says what is wrong with it
        for path in _weight_files(folder):
            tensors |= load_file(path)
        return self.publish(tensors, version)

    @contextmanager
    @override
    def open(self, ref: ModelStateDictRef) -> Iterator[ModelStateDict]:
        with self._lock:
            newest = self._newest
        if newest is None or newest.version < ref.version:
            raise TransportError(f"no model state dict of version {ref.version} in this store ({ref.uri})")
        yield newest

    @override
    def close(self) -> None:
        with self._lock:
            self._newest = None


class SharedMemoryModelStateDictStore(ModelStateDictStore):
    """A store across processes of one host: each state dict is one file of `folder`, and files are recycled.

    A reader holds a shared lock on the file it has open, so only files without readers are overwritten, and the newest
    one never; the kernel frees the locks of a process that dies. So there are at most two files more than readers at a
    time. One end publishes, and leaves the newest file when it closes, which goes with the folder, or by
    `remove_published`; the other ends open. Tensors that are not what was published, by their checksum, are not lent.
    """

    def __init__(self, folder: Path, life: int = 0) -> None:
        """`life` is how often the publisher was started before: on other machines its process ids come again."""
        self._folder, self._life = folder, life
        self._slots: list[SegmentFile] = []  # the newest content last
        self._sequences = itertools.count(1)

    @override
    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> ModelStateDictRef:
        """Waits for no reader."""
        return self._write({name: _buffers(name, tensor) for name, tensor in tensors.items()}, version)

    def publish_folder(self, folder: Path, version: int) -> ModelStateDictRef:
        """As `FolderPublisher` says. Never imports torch."""
        return self._write(_read_folder(folder), version)

    def _write(self, buffers: Mapping[str, TensorBuffers], version: int) -> ModelStateDictRef:
        slot = self._take_free_slot()
        try:
            slot.write(buffers, {"version": str(version)}, next(self._sequences))
        except TransportError:
            self._slots.insert(0, slot)
            raise
        else:
            self._slots.append(slot)
        finally:
            fcntl.flock(slot, fcntl.LOCK_UN)
        num_bytes = sum(tensor.num_bytes for tensor in buffers.values())
        return ModelStateDictRef(version=version, uri=slot.path.name, num_bytes=num_bytes)

    @contextmanager
    @override
    def open(self, ref: ModelStateDictRef) -> Iterator[ModelStateDict]:
        """Waits while the very file is being written (milliseconds); then reads it once, for its checksum."""
        with self._reading(ref, private=True) as (path, segment):
            verify_body(path, segment)
            with guarded(f"{path} holds no model state dict"):
                tensors = {name: _tensor(path, segment, name) for name in segment.tensors}
            yield ModelStateDict(tensors, _version(path, segment, ref))

    @contextmanager
    def lend_file(self, ref: ModelStateDictRef) -> Iterator[tuple[ModelStateDictRef, memoryview]]:
        """Lend the file that holds the tensors, as it is, to be sent to where this folder is not. Never imports torch.

        The reference beside it names the version that is lent. Raises as `open` does.
        """
        with self._reading(ref, private=False) as (path, segment):
            version = _version(path, segment, ref)
            with memoryview(segment.mapping) as content:
                yield ModelStateDictRef(version=version, uri=ref.uri, num_bytes=len(content)), content

    @override
    def close(self) -> None:
        """The newest stay in the folder: readers need them until a next life of the publisher has caught up.

        What a reader has open stays readable to it.
        """
        for slot in self._slots:
            slot.close()
        for slot in self._slots[:-1]:
            slot.path.unlink(missing_ok=True)
        self._slots.clear()

    @contextmanager
    def _reading(self, ref: ModelStateDictRef, *, private: bool) -> Iterator[tuple[Path, Segment]]:
        """The file's content, which is not overwritten for the length of the `with` block."""
        path = self._folder / ref.uri
        if path.parent != self._folder or not ref.uri.isprintable():
            raise CorruptData(f"a model state dict's reference names no file of its folder: {ref.uri[:200]!r}")
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"no model state dict of version {ref.version} at {path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield path, read_segment(path, map_segment(path, private=private))
        finally:
            os.close(file)

    def _take_free_slot(self) -> SegmentFile:
        """The oldest file without readers, or a new one, under an exclusive lock. Never the newest."""
        for slot in self._slots[:-1]:
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            self._slots.remove(slot)
            return slot
        name = f"{PUBLISHED_FILE}{os.getpid()}-{self._life}-{len(self._slots)}.safetensors"
        slot = SegmentFile(self._folder / name)
        fcntl.flock(slot, fcntl.LOCK_EX)
        return slot


class NodeModelStateDictStore(SharedMemoryModelStateDictStore):
    """The trainer's end on a node whose memory the other nodes do not see: references name that node."""

    def __init__(self, folder: Path, host: str, life: int = 0) -> None:
        super().__init__(folder, life)
        self._host = host

    @override
    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> ModelStateDictRef:
        """`uri` is `host/file`; readers are given a reference to a copy on their node."""
        ref = super().publish(tensors, version)
        return msgspec.structs.replace(ref, uri=f"{self._host}/{ref.uri}")


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _read_folder(folder: Path) -> dict[str, TensorBuffers]:
    """As `FolderPublisher.publish_folder` reads it: views of its files."""
    tensors: dict[str, TensorBuffers] = {}
    if (folder / _ADAPTER_FILE).exists():
        raise TransportError(
            f"{folder} holds an adapter (LoRA), and generators take whole weights: merge it into the model "
            "(peft: merge_and_unload on a copy), and save that"
        )
    for path in _weight_files(folder):
        found = read_safetensors(path)
        if twice := tensors.keys() & found.keys():
            raise TransportError(f"{folder} holds the tensor {min(twice)!r} twice: leave one set of weights there")
        tensors |= found
    if not tensors:
        raise TransportError(f"{folder} holds no weights (*.safetensors): save the model there first, then tell of it")
    if odd := next((name for name, tensor in tensors.items() if tensor.dtype not in _DTYPE_NAMES), None):
        raise TransportError(
            f"tensor {odd!r} in {folder} has the type {tensors[odd].dtype}; weights are of {', '.join(_DTYPE_NAMES)}"
        )
    return tensors


def remove_abandoned(folder: Path, but: str) -> None:
    """Remove the files of publishers on this host that have ended, except this one."""
    for path in folder.glob(f"{PUBLISHED_FILE}*"):
        pid = path.name.removeprefix(PUBLISHED_FILE).partition("-")[0]
        if path.name != but and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def remove_published(folder: Path, before_life: int) -> None:
    """Remove the files of a publisher's earlier lives. What a reader has open stays readable to it."""
    for path in folder.glob(f"{PUBLISHED_FILE}*-*-*"):
        life = path.name.removeprefix(PUBLISHED_FILE).split("-")[1]
        if life.isdecimal() and int(life) < before_life:
            path.unlink(missing_ok=True)


_ADAPTER_FILE = "adapter_model.safetensors"
"""Of peft."""

_VERSION_CHARS = 20
"""More than a policy version has."""

_DTYPE_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
}
"""torch's names of types, by the format's."""


def _torch_dtypes() -> dict[str, torch.dtype]:
    import torch

    return {code: getattr(torch, name) for code, name in _DTYPE_NAMES.items()}


def _buffers(name: str, tensor: torch.Tensor) -> TensorBuffers:
    import torch

    dtypes = {dtype: code for code, dtype in _torch_dtypes().items()}
    if tensor.dtype not in dtypes:
        raise TransportError(
            f"tensor {name!r} has dtype {tensor.dtype}; a model state dict takes {', '.join(map(str, dtypes))}"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorBuffers(dtypes[tensor.dtype], tuple(tensor.shape), [flat.numpy().data])


def _tensor(path: Path, segment: Segment, name: str) -> torch.Tensor:
    import torch

    entry = segment.tensors[name]
    dtype = _torch_dtypes().get(entry.dtype)
    if dtype is None:
        raise CorruptData(f"tensor {name!r} of {path} has the type {entry.dtype}, which no model state dict holds")
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(segment.mapping, dtype=dtype, count=count, offset=entry.data_offsets[0]).reshape(
        entry.shape
    )


def _version(path: Path, segment: Segment, ref: ModelStateDictRef) -> int:
    version = segment.metadata.get("version", "")
    if not (version.isdecimal() and len(version) < _VERSION_CHARS) or int(version) < ref.version:
        raise CorruptData(f"{path} holds version {version!r}; the reference means {ref.version}")
    return int(version)
