"""Model state dicts received in pieces, by a generator that shares no memory with the trainer."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tailrace.errors import CorruptData, TransportError
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore

PIECE_BYTES = 4 << 20
PIECES_IN_FLIGHT = 4  # a whole model never waits in a socket's queue

_TRAILER_BYTES = 16


class UploadedModelStateDicts(SharedMemoryModelStateDictStore):
    """Files of `folder`, written by pieces and recycled once nobody reads them. Not for two uploads at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._uploads_folder = folder
        self._file = -1
        self._name = ""
        self._received = self._expected = 0

    def write(self, num_bytes: int, offset: int, piece: bytes) -> str:
        """Write the next piece of a file of `num_bytes`, or the first of another; returns the file's name. Blocks.

        Raises `CorruptData` for a piece out of order and `TransportError` where there is no room.
        """
        if offset == 0:
            self._begin(num_bytes)
        if self._file < 0 or offset != self._received or offset + len(piece) > self._expected:
            raise CorruptData(f"a piece of weights at {offset:,} came where one at {self._received:,} was due")
        os.pwrite(self._file, piece, offset)
        self._received += len(piece)
        name = self._name
        if self._received == self._expected:
            self._let_go()
        return name

    def close(self) -> None:
        """Remove the files. Closing twice does nothing."""
        self._let_go()
        for path in self._uploads_folder.glob("upload-*.safetensors"):
            path.unlink(missing_ok=True)
        super().close()

    def _begin(self, num_bytes: int) -> None:
        """Take a file that nobody reads; it holds nothing valid until its last piece is written."""
        self._let_go()
        for number in range(64):
            self._name = f"upload-{number}.safetensors"
            self._file = os.open(self._uploads_folder / self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._let_go()
                continue
            break
        else:
            raise TransportError("64 model state dicts are being read at once; no more are taken")
        try:
            os.ftruncate(self._file, num_bytes)
            os.posix_fallocate(self._file, 0, num_bytes)
            os.pwrite(self._file, bytes(_TRAILER_BYTES), max(0, num_bytes - _TRAILER_BYTES))
        except (OSError, OverflowError) as error:
            self._let_go()
            raise TransportError(f"{self._uploads_folder} has no room for {num_bytes:,} bytes: {error}") from error
        self._received, self._expected = 0, num_bytes

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
