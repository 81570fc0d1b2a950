"""One run at a time in a run's folder.

    runs/<name>/owner.json    who runs in it; locked by that process, and gone once its run has ended
    runs/<name>/              locked by that process and all that inherit the lock: the roles that write in here

The locks (`flock`) are the kernel's: one goes with the last process that has it, however that ends, so what a crash
leaves holds nobody up. Roles outlive a killed owner by some seconds, and for them the next owner waits.
Not every shared file system tells one host of another's locks. So the owner renews the file's time stamp, and where the
lock proves nothing, the folder is taken to be in use until the file has not been renewed for a while. A start waits
until that can be told: the owner elsewhere may just have been killed. One that was only stopped for so long finds the
next one's name in the file, or no file, and knows that it lost the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tailrace.errors import DataError
from tailrace.guards import decoded

OWNER_FILE = "owner.json"
RENEWED_EVERY_S = 20.0
LAPSES_AFTER_S = 120.0
"""Above the minute for which a client of NFS may show an old time stamp."""
ORPHANS_END_S = 20.0
"""How long the next owner waits for what a killed one started, which ends by itself: `ShutdownSettings.terminate_s`."""

_LOOK_S = 1.0
"""Between two looks for what an owner elsewhere does."""

_logger = logging.getLogger(__name__)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs in a folder."""

    pid: int
    host: str
    kernel: str
    """Names the kernel that would know of its lock: containers of one machine share it."""
    started_at: str

    @classmethod
    def of_this_process(cls) -> Owner:
        """From now on."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(pid=os.getpid(), host=socket.gethostname(), kernel=_kernel(), started_at=now)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started_at}"


@dataclass(frozen=True, slots=True)
class Ownership:
    """A run's folder, as its owner has it."""

    descriptor: int
    """For the processes to inherit that write in it: nobody owns it after this one before they ended."""
    lost: Future[None] = field(default_factory=Future)
    """Done once another owner has it, or had, who took this one for gone."""
    before: Owner | None = None
    """Who had it before and is gone without a word: one that ends in order removes its file."""


async def wait_for_owner_elsewhere(folder: Path) -> None:
    """Wait until an owner on another host that may be alive renews its file, and so is, or has not for too long."""
    first = owner = await asyncio.to_thread(owner_in, folder)
    if first is not None and first[0].kernel != _kernel():
        said = "waiting for up to %g s, until it shows whether a run goes on in %s (%s)"
        _logger.warning(said, LAPSES_AFTER_S, folder, first[0])
        while owner is not None and owner == first:
            await asyncio.sleep(_LOOK_S)
            owner = await asyncio.to_thread(owner_in, folder)


def owner_in(folder: Path) -> tuple[Owner, int] | None:
    """An owner that may be alive as far as its file tells, and when that was renewed (ns since 1970)."""
    path = folder / OWNER_FILE
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        owner = _owner(file)
        if owner is None or not may_be_alive(owner, is_locked_by_us=False, silent_s=_silent_s(file, path)):
            return None
        return owner, os.fstat(file).st_mtime_ns
    except OSError:  # `own_folder` tells of it
        return None
    finally:
        os.close(file)


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Ownership]:
    """Make the folder, and be its only owner in here; what this made and is empty at the end is removed again.

    Raises `DataError` where another process owns it, or where it cannot be written.
    """
    path = folder / OWNER_FILE
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner = Owner.of_this_process()
        file, before = _take(path, owner)
    except OSError as error:
        raise DataError(f"cannot write the run folder {folder}: {error.strerror}") from error
    released, held = threading.Event(), None
    try:
        held = _hold(folder)
        owned = Ownership(held, before=before)
        renewing = (path, owner, released, owned.lost)
        threading.Thread(target=_renew, args=renewing, name="run-folder-owner", daemon=True).start()
        yield owned
    finally:
        released.set()
        with contextlib.suppress(OSError):  # a disk that fails now has told so before
            if _is_of(path, owner):
                path.unlink()
        with contextlib.suppress(OSError):  # it is not empty: the rule
            for parent in made:
                parent.rmdir()
        for descriptor in (file,) if held is None else (held, file):
            os.close(descriptor)


def _hold(folder: Path) -> int:
    """A descriptor of the folder, locked once nobody else has it locked. Raises `DataError` where that takes too long.

    A file system without locks leaves it unlocked.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _logger.warning("waiting for processes of a run in %s that was killed, which still end", folder)
        locking = threading.Thread(target=fcntl.flock, args=(held, fcntl.LOCK_EX), daemon=True)
        locking.start()
        locking.join(ORPHANS_END_S)
        if locking.is_alive():
            os.close(held)  # should the thread get the lock yet, it goes with its call
            raise DataError(
                f"a run in {folder} was killed, and {_holders(folder)} of it did not end within {ORPHANS_END_S:g} s, "
                "which would mix its files with those of another run: end them, and start again"
            ) from None
    except OSError:
        pass
    return held


def _holders(folder: Path) -> str:
    """The processes that have the folder open, as far as this system tells."""
    pids = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is closed by now, or another user's
            if link.samefile(folder):
                pids.add(int(link.parts[2]))
    return f"processes {', '.join(map(str, sorted(pids - {os.getpid()})))}" if pids else "processes"


def may_be_alive(owner: Owner, *, is_locked_by_us: bool, silent_s: float) -> bool:
    """Whether an owner that did not remove its file may still run. A pure decision.

    Where we hold the lock, an owner of this very kernel is gone. Of any other we only know when it renewed its file. A
    time that is still to come is of before a clock was set back, and nobody has renewed it since.
    """
    is_known = is_locked_by_us and owner.kernel == _kernel()
    return not is_known and abs(silent_s) < LAPSES_AFTER_S


def _take(path: Path, owner: Owner) -> tuple[int, Owner | None]:
    """The descriptor of the file, locked and with this owner in it; and who stood there, and is gone.

    Raises `DataError` and `OSError`.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            is_locked = _lock(file, path)
            if not _is_at(file, path):  # its owner removed it between our two calls
                os.close(file)
                continue
            before = _gone(file, path, is_locked=is_locked)
            os.ftruncate(file, 0)
            os.pwrite(file, msgspec.json.encode(owner) + b"\n", 0)
            os.fsync(file)
            return file, before
        except BaseException:
            os.close(file)
            raise


def _lock(file: int, path: Path) -> bool:
    """Lock it; False on a file system without locks. Raises `DataError` where another process has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(file)
        stop = f"wait until that run has ended, or stop it (kill {owner.pid})" if owner else "wait until it has ended"
        raise _in_use(path, owner, stop) from None
    except OSError:
        return False
    return True


def _gone(file: int, path: Path, *, is_locked: bool) -> Owner | None:
    """Who stands in the file, if anybody. Raises `DataError` where that one may be alive."""
    owner = _owner(file)
    if owner is not None and may_be_alive(owner, is_locked_by_us=is_locked, silent_s=_silent_s(file, path)):
        lapses = (
            f"if that process is gone, start again {LAPSES_AFTER_S:g} s after its end; else wait for it, or stop it"
        )
        raise _in_use(path, owner, lapses)
    return owner


def _silent_s(file: int, path: Path) -> float:
    """How long ago the file was renewed."""
    os.utime(path.parent)  # so that both times are of the file system's own clock
    return path.parent.stat().st_mtime - os.fstat(file).st_mtime


def _in_use(path: Path, owner: Owner | None, what_to_do: str) -> DataError:
    who = owner or "a process that has just begun"
    return DataError(f"a run is going on in {path.parent} ({who}), and two would mix their files: {what_to_do}")


def _owner(file: int) -> Owner | None:
    """Who stands in the file; None in one that is new, or was cut short. Raises `OSError`."""
    content = os.pread(file, 4096, 0)
    return decoded(lambda: msgspec.json.decode(content, type=Owner))


def _is_at(file: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _is_of(path: Path, owner: Owner) -> bool:
    """Whether that one stands in the file of this name. Raises `OSError` where that cannot be told."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return _owner(file) == owner
    finally:
        os.close(file)


def _renew(path: Path, owner: Owner, released: threading.Event, lost: Future[None]) -> None:
    """In a thread of its own: no stall of the event loop makes the owner look gone. Ends once it lost the folder."""
    while not released.wait(RENEWED_EVERY_S):
        with contextlib.suppress(OSError):  # a disk that fails for a while: the next one counts
            if not _is_of(path, owner):
                lost.set_result(None)
                return
            os.utime(path)


def _kernel() -> str:
    """Unique to this machine since it was started; its name where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
