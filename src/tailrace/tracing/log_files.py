"""Where lines of logs go, on a disk that may be full: what it does not take is counted, and told once.

line, or what a process printed ──► LogFile.append ──► NAME, and once that is full NAME.1
                                      └─ counted; a line says what is missing, where the disk takes bytes again
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import ClassVar, TextIO

from typing_extensions import override

from tailrace.visible_text import visible

_logger = logging.getLogger(__name__)


class LogFile:
    """The file at `path` and the one before it, of about `max_bytes` each. Any thread may append."""

    lost_bytes: ClassVar[int] = 0
    """That no file of this process took, so far."""

    def __init__(self, path: Path, what: str, *, max_bytes: int, is_shared: bool = False) -> None:
        """`what` is lost where it cannot be written, for people.

        `is_shared`: others write into the same open file, which is therefore copied and emptied, not renamed. They do
        not look at its size, which `keep_within_size` does.
        """
        self._path, self._what, self._max_bytes, self._is_shared = path, what, max_bytes, is_shared
        self._writing = threading.Lock()
        self._file: FileIO | None = None
        self._first_error: OSError | None = None
        self._has_warned = False
        self._missing_bytes = 0
        """That the next line tells of."""

    def open(self) -> None:
        """Raises `OSError` where it cannot be written at all."""
        with self._writing:
            self._opened()

    def append(self, data: bytes) -> None:
        """Never raises; waits for nothing but the disk."""
        with self._writing:
            self._append(data)
        if self._first_error is not None and not self._has_warned:
            self._has_warned = True  # before, since the warning may come here
            text = "%s is lost where the disk takes none, and only counted: %s cannot be written: %s"
            _logger.warning(text, self._what, self._path, self._first_error.strerror)

    def keep_within_size(self) -> None:
        """Turn it over if what others wrote has filled it. As `append`."""
        self.append(b"")

    def close(self) -> None:
        """Something appended later opens it again."""
        with self._writing:
            self._close()

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            file = self._opened()
            if 0 < os.fstat(file.fileno()).st_size > self._max_bytes - len(data):
                file = self._turned_over(file)
            if self._missing_bytes:
                file.write(f"[{self._missing_bytes:,} bytes are missing here: the disk took none]\n".encode())
                self._missing_bytes = 0
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            self._close()  # the next one tries the path anew
            self._lose(len(rest), error)

    def _turned_over(self, file: FileIO) -> FileIO:
        """An empty one; this one is the file before, or its end is, where others wrote more than that may hold. Where
        that fails it is emptied all the same: it must not grow.

        Raises `OSError` where it has become the file before, and no new one can be opened.
        """
        before = self._path.with_name(f"{self._path.name}.1")
        try:
            if self._is_shared:
                with self._path.open("rb") as full, before.open("wb") as kept:
                    full.seek(max(0, full.seek(0, os.SEEK_END) - self._max_bytes))
                    shutil.copyfileobj(full, kept)
            else:
                self._path.replace(before)
        except OSError as error:
            self._lose(os.fstat(file.fileno()).st_size, error)
        else:
            if not self._is_shared:
                self._close()
                return self._opened()
        file.truncate(0)
        return file

    def _lose(self, num_bytes: int, error: OSError) -> None:
        self._missing_bytes += num_bytes
        LogFile.lost_bytes += num_bytes
        self._first_error = self._first_error or error

    def _opened(self) -> FileIO:
        if self._file is None:
            self._file = FileIO(self._path, "ab")
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class StderrHandler(logging.StreamHandler[TextIO]):
    """Lines on standard error, whose own failure (a file on a full disk, a pipe that closed) goes unsaid.

    Controls are written out: what a model or users' code wrote into a message must not steer the terminal.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @override
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def log_to_stderr() -> None:
    """All messages of this process from info on, where its standard error goes.

    HTTP clients' from warnings on: of each request they tell the URL, which may hold a password.
    """
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, handlers=[StderrHandler()])
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)
