"""What a run stands on gives way: disks, folders, shared memory, sockets and segments, at one moment of the run.

Files of a limited size stand for a full disk (the system refuses both alike), so that the machine's own stays as it is;
shared memory, and a disk that really is full, are small file systems of the run's own: they need a namespace of mounts.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import psutil


@dataclass(frozen=True)
class Ground:
    """Where a run stands, seen from outside."""

    folder: Path
    """The run's."""
    orchestrator: int
    """Its process id; of the role that is at the place, `role`."""
    role: int

    @property
    def shared_memory(self) -> Path:
        """As the run sees it."""
        [folder] = Path(f"/proc/{self.orchestrator}/root/dev/shm").glob(f"tailrace-run-{self.orchestrator}-*")
        return folder

    @property
    def disk(self) -> Path:
        """The run's folder, as the run sees it."""
        return Path(f"/proc/{self.orchestrator}/root") / self.folder.relative_to("/")

    @property
    def sockets(self) -> list[Path]:
        """Files of them."""
        parents = (Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")), Path("/tmp"))
        found = {path for parent in parents for path in parent.glob(f"tailrace-run-{self.orchestrator}-*/*")}
        return sorted(path for path in found if path.is_socket())


# --- while it runs ----------------------------------------------------------------------------------------------------


def fill_disk(ground: Ground) -> None:
    """Nobody writes anything."""
    for pid in (ground.orchestrator, ground.role):
        _limit_files(pid, 0)


def fill_disk_of_role(ground: Ground) -> None:
    """The role that is there writes nothing."""
    _limit_files(ground.role, 0)


def fill_real_disk(ground: Ground) -> None:
    """To its last byte."""
    _fill(ground.disk)


def forbid_checkpoints(ground: Ground) -> None:
    """Their folder takes no new ones."""
    folder = ground.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o555)


def forbid_run_folder(ground: Ground) -> None:
    """It takes nothing new."""
    ground.folder.chmod(0o555)


def fill_shared_memory(ground: Ground) -> None:
    """To its last byte."""
    _fill(ground.shared_memory.parent)


def delete_sockets(ground: Ground) -> None:
    """All of them."""
    for path in ground.sockets:
        path.unlink()


def truncate_segments(ground: Ground) -> None:
    """Batches lose their bytes, mapped or not."""
    for path in _segments(ground):
        os.truncate(path, 0)


def overwrite_segments(ground: Ground) -> None:
    """Batches keep their header and their end; what they hold becomes something else."""
    for path in _segments(ground):
        with path.open("r+b") as file:
            file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)  # beyond the header, as safetensors has it
            file.write(b"\x55" * 256)


def overwrite_segments_and_kill(ground: Ground) -> None:
    """As well; and who comes in the role's place reads them again."""
    overwrite_segments(ground)
    os.kill(ground.role, signal.SIGKILL)


def truncate_segments_and_kill(ground: Ground) -> None:
    """As well; and who comes in the role's place reads them again."""
    truncate_segments(ground)
    os.kill(ground.role, signal.SIGKILL)


def _segments(ground: Ground) -> list[Path]:
    return sorted(ground.shared_memory.glob("batch-*.safetensors"))


def _fill(folder: Path) -> None:
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def _limit_files(pid: int, size: int) -> None:
    """The process, and what it starts, writes no file beyond this size."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


DAMAGES: Mapping[str, Callable[[Ground], None]] = MappingProxyType(
    {
        damage.__name__: damage
        for damage in (
            *(fill_disk, fill_disk_of_role, fill_real_disk, forbid_checkpoints, forbid_run_folder),
            *(fill_shared_memory, delete_sockets, truncate_segments, overwrite_segments),
            *(truncate_segments_and_kill, overwrite_segments_and_kill),
        )
    }
)


# --- before it starts -------------------------------------------------------------------------------------------------


class Within(Enum):
    """What a run is started in."""

    ANYTHING = "anything"
    FULL_DISK = "a disk that takes no byte"
    PERMISSIONS = "no privilege to write where permissions forbid it"
    FORBIDDEN_FOLDER = "the same, with a folder for runs that nobody may write"
    SMALL_DISK = "a disk of a few megabytes"
    SMALL_MEMORY = "shared memory of a megabyte"
    NO_MEMORY = "shared memory of a page"

    def command(self) -> Sequence[str] | None:
        """That becomes the run's; None where this system permits none of it."""
        match self:
            case Within.ANYTHING:
                return ()
            case Within.FULL_DISK:
                return _if_it_works("prlimit", "--fsize=0")
            case Within.PERMISSIONS | Within.FORBIDDEN_FOLDER if os.geteuid() != 0:
                return ()
            case Within.PERMISSIONS | Within.FORBIDDEN_FOLDER:
                return _if_it_works("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--")
        where, size = {
            Within.SMALL_DISK: ("runs", "8m"),
            Within.SMALL_MEMORY: ("/dev/shm", "1m"),
            Within.NO_MEMORY: ("/dev/shm", "4k"),
        }[self]
        mount = f'mkdir -p {where} && mount -t tmpfs -o size={size},mode=1777 tmpfs {where} && exec "$@"'
        return _if_it_works("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")


def _if_it_works(*prefix: str) -> Sequence[str] | None:
    if shutil.which(prefix[0]) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([*prefix, "true"], cwd=folder, capture_output=True, check=False)
    return prefix if tried.returncode == 0 else None
