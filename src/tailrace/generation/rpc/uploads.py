"""Model state dicts received in pieces, by a generator that shares no memory with the trainer.

    whole    pieces ──► file
    delta    pieces ──► another file ──► applied, in place, to the file that it is a delta of

A file is what its sender said that it is, by digest, or nobody can open it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from typing_extensions import override

from tailrace.errors import CorruptData, TransportError
from tailrace.guards import guarded
from tailrace.transport.segments import TRAILER_BYTES
from tailrace.transport.weights.deltas import apply_delta, digest_of
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore

PIECE_BYTES = 4 << 20
PIECES_IN_FLIGHT = 4  # a whole model never waits in a socket's queue


class Upload(msgspec.Struct, frozen=True):
    """What the pieces of one upload come to."""

    num_bytes: int
    """Of all pieces."""
    digest: str
    """Of the model state dict's file that there will be."""
    base: str = ""
    """Digest of the file that the pieces are a delta of; none where they are the file."""


class UploadedModelStateDicts(SharedMemoryModelStateDictStore):
    """Files of `folder`, written by pieces and recycled once nobody reads them. Not for two uploads at once.

    Safe across threads: of a caller that went away, the last piece may still be on its way into a file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._uploads_folder = folder
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self._file = -1
        self._name = ""
        self._received = 0
        self._digests: dict[str, str] = {}
        """Of the files that are whole, by their names."""

    def write(self, upload: Upload, offset: int, piece: bytes | memoryview) -> str:
        """Write the next piece, or the first one of another upload; returns the model state dict's name. Blocks.

        Raises `CorruptData` for a piece out of order and a digest that differs at the end, and `TransportError` where
        there is no room, or no base (any more): then the whole file is to be sent.
        """
        with self._lock, guarded("what was sent are no weights"):
            if offset == 0:
                self._begin(upload)
            end = offset + len(piece)
            if self._file < 0 or upload != self._upload or offset != self._received or end > upload.num_bytes:
                raise CorruptData(f"a piece of weights at {offset:,} came where one at {self._received:,} was due")
            self._reserve(offset, len(piece))
            os.pwrite(self._file, piece, offset)
            self._received = end
            if end < upload.num_bytes:
                return self._name
            try:
                return self._complete(upload)
            finally:
                self._let_go()

    @override
    def close(self) -> None:
        """Remove the files. Closing twice does nothing."""
        with self._lock:
            self._let_go()
            for path in self._uploads_folder.glob("upload-*.safetensors"):
                path.unlink(missing_ok=True)
            self._digests.clear()
        super().close()

    def _begin(self, upload: Upload) -> None:
        """Take a file that nobody reads; it holds nothing valid until its last piece is written."""
        self._let_go()
        base = self._name_of(upload.base)
        for number in range(64):
            name = f"upload-{number}.safetensors"
            if name != base and self._take(name):
                break
        else:
            raise TransportError("64 model state dicts are being read at once; no more are taken")
        try:
            os.ftruncate(self._file, upload.num_bytes)
            held_bytes = 512 * os.fstat(self._file).st_blocks
            if upload.num_bytes - held_bytes > shutil.disk_usage(self._uploads_folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _make_void(self._file)
        except (OSError, OverflowError) as error:
            self._let_go()
            raise self._no_room(upload, error) from error
        self._upload, self._received = upload, 0

    def _reserve(self, offset: int, num_bytes: int) -> None:
        """For a piece that is there: what a sender only claims takes no memory."""
        assert self._upload is not None
        try:
            if num_bytes:
                os.posix_fallocate(self._file, offset, num_bytes)
        except OSError as error:
            raise self._no_room(self._upload, error) from error

    def _no_room(self, upload: Upload, error: Exception) -> TransportError:
        return TransportError(f"{self._uploads_folder} has no room for {upload.num_bytes:,} bytes: {error}")

    def _take(self, name: str) -> bool:
        """Open a file that nobody else has open; its content is void from now on."""
        self._file = os.open(self._uploads_folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _is_locked(self._file):
            self._let_go()
            return False
        self._name = name
        self._digests.pop(name, None)
        return True

    def _complete(self, upload: Upload) -> str:
        """All pieces are there: the name of the file that they make."""
        if upload.base:
            return self._apply(upload)
        with _void_unless_done(self._file), _mapped(self._file) as content:
            _require_digest(content, upload.digest)
        self._digests[self._name] = upload.digest
        return self._name

    def _apply(self, upload: Upload) -> str:
        """Make of the base, in place, what the delta says; the delta's own file is emptied."""
        name = self._name_of(upload.base)
        assert name is not None
        file = os.open(self._uploads_folder / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not _is_locked(file):
                raise TransportError("the weights that a delta is to be applied to are being read")
            del self._digests[name]
            with _void_unless_done(file), _mapped(file) as content, _mapped(self._file) as delta:
                apply_delta(content, delta)
                _require_digest(content, upload.digest)
        finally:
            os.close(file)
        os.ftruncate(self._file, 0)
        self._digests[name] = upload.digest
        return name

    def _name_of(self, digest: str) -> str | None:
        """The file of a delta's base; None where none is needed. Raises `TransportError` where there is none."""
        if not digest:
            return None
        name = next((name for name, known in self._digests.items() if known == digest), None)
        if name is None:
            raise TransportError(f"a delta of the weights {digest} came, and they are not here (any more)")
        return name

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file, self._upload = -1, None


def _is_locked(file: int) -> bool:
    """Whether nobody else has it open, who will wait from now on until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _mapped(file: int) -> Iterator[memoryview]:
    """A file's content, to be read and changed."""
    with mmap.mmap(file, 0) as mapping, memoryview(mapping) as content:
        try:
            yield content
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # arrays there would keep the mapping, and with it the lock
            raise


@contextmanager
def _void_unless_done(file: int) -> Iterator[None]:
    """Around changes: a file that was changed in part is none that anybody opens."""
    try:
        yield
    except BaseException:
        _make_void(file)
        raise


def _make_void(file: int) -> None:
    os.pwrite(file, bytes(TRAILER_BYTES), max(0, os.fstat(file).st_size - TRAILER_BYTES))


def _require_digest(content: memoryview, digest: str) -> None:
    found = digest_of(content)
    if found != digest:
        raise CorruptData(f"weights have the digest {found} where {digest} was sent: they are not what was published")
