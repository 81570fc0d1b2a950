"""Files that are there whole or not at all; and those that a command writes when its work is done: whether they can be
written is found before it begins."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tailrace.errors import DataError, SettingsError


def replace_durably(path: Path, content: bytes) -> None:
    """Whatever interrupts this, a loss of power too, the file is the old one or the new one. Raises `OSError`."""
    with replacing_durably(path) as file:
        file.write(content)


@contextmanager
def replacing_durably(path: Path) -> Iterator[IO[bytes]]:
    """The same, of what is written within; meanwhile the old file may be read."""
    part = part_of(path)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    sync(path.parent)


def part_of(path: Path) -> Path:
    """Where `replace_durably` writes the new one, which is left there by a process that is killed meanwhile."""
    return path.with_name(f"{path.name}.part")


def sync(path: Path) -> None:
    """Have a file, or a folder's names, on the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(path: Path, setting: str, *, makes_folders: bool = False) -> None:
    """Raise `SettingsError`, which names `setting`, where no file can be written there. Nothing is left behind.

    What is there is not opened: it may be a pipe. `makes_folders`: those on the way will be made.

    >>> require_writable(Path("/dev/null"), "--save")
    >>> require_writable(Path("/dev"), "--save")
    Traceback (most recent call last):
        ...
    tailrace.errors.SettingsError: --save: cannot write /dev: Is a directory
    """
    try:
        _try(path, makes_folders)
    except OSError as error:
        raise SettingsError(f"{setting}: cannot write {path}: {error.strerror}") from error


def _try(path: Path, makes_folders: bool) -> None:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        folder = Path(os.path.realpath(path)).parent
        while makes_folders and not folder.exists():
            folder = folder.parent
        tempfile.TemporaryFile(dir=folder).close()
        return
    if is_folder or not os.access(path, os.W_OK):
        number = errno.EISDIR if is_folder else errno.EACCES
        raise OSError(number, os.strerror(number))


@contextmanager
def writing_to(path: Path, setting: str) -> Iterator[None]:
    """Raise `DataError`, which names `setting`, where what is done within cannot write the file after all."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{setting}: cannot write {path}: {error.strerror}") from error
