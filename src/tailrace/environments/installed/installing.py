"""Makes virtual environments: `tailrace environments install verifiers==0.4.0`.

    list of exact versions ─► python -m venv ─► pip install --no-deps ─► it can be imported ─► the marker, written last

A folder without the marker of this very list was never finished, or holds what another version of Tailrace installed:
it is made anew. Two commands at once: the second waits, and finds the work done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tailrace.cache_folder import cache_folder
from tailrace.errors import SettingsError

_LISTS = Path(__file__).parent
_MARKER = "tailrace.json"
_SHOWN_LINES = 12
"""Of what pip wrote, where it failed."""
_UNREACHABLE = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "Connection refused",
    "Network is unreachable",
    "ProxyError",
    "Read timed out",
)
"""In what pip writes where it reaches no index."""

ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pinned:
    """A package with all that it needs, in exact versions."""

    name: str
    version: str
    requirements: str
    """Lines of a requirements file."""
    proof: str
    """A module whose import shows that it is all there."""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def folder(self) -> Path:
        """Of its virtual environment, made or not."""
        return cache_folder() / "environments" / f"{self.name}-{self.version}"

    @property
    def python(self) -> Path:
        """Its interpreter, made or not."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> list[str]:
        """What is installed: one line each."""
        return [line for line in self.requirements.splitlines() if line.strip() and not line.startswith("#")]

    @property
    def is_installed(self) -> bool:
        """Whether it was finished, with this very list, and its interpreter is still there."""
        return self.python.exists() and _read_marker(self.folder) == self._digest

    def mark(self) -> None:
        """It is finished."""
        fresh = self.folder / f"{_MARKER}.new"
        fresh.write_text(json.dumps({"installed": str(self), "list": self._digest}))
        fresh.replace(self.folder / _MARKER)

    @property
    def _digest(self) -> str:
        return hashlib.sha256("\n".join(self.packages).encode()).hexdigest()


_PROOFS = {"verifiers==0.4.0": "verifiers.v1.serve"}


def pinned(requirement: str) -> Pinned:
    """What is installed for `NAME==VERSION`. Raises `SettingsError` for what Tailrace has no list for.

    >>> pinned("verifiers==0.4.0").python.parts[-3:]
    ('verifiers-0.4.0', 'bin', 'python')
    """
    name, _, version = (part.strip() for part in requirement.partition("=="))
    found = f"{name}=={version}"
    if found in _PROOFS:
        text = (_LISTS / f"{name}-{version}.txt").read_text()
        return Pinned(name, version, text, _PROOFS[found])
    have = ", ".join(_PROOFS)
    if name == "verifiers" and version.startswith("0.3"):
        raise SettingsError(
            f'{requirement}: environments of verifiers 0.3 run beside Tailrace: pip install "tailrace[verifiers]". '
            f"To be installed apart there is {have}"
        )
    same = [one for one in _PROOFS if one.startswith(f"{name}==")]
    close = same or get_close_matches(requirement, _PROOFS, n=1)
    hint = f"write {close[0]}" if close else f"there is {have}"
    raise SettingsError(f"{requirement} is not among the versions that Tailrace works with: {hint}")


def find_installed(requirement: str, *, needed_by: str) -> Path:
    """Its interpreter. Raises `SettingsError` with the command that installs it."""
    wanted = pinned(requirement)
    if wanted.is_installed:
        return wanted.python
    state = "is not finished, or of another version of Tailrace" if wanted.folder.exists() else "is not there"
    raise SettingsError(
        f"{needed_by} needs {wanted} in a virtual environment of its own, and {wanted.folder} {state}: "
        f"tailrace environments install {wanted}"
    )


def install(wanted: Pinned, packages: Sequence[str] = (), *, report_progress: ReportProgress) -> Path:
    """Make the virtual environment where it is not there, and put `packages` of the user's own into it.

    `packages` is what pip takes: names, folders, wheels; they may not change what the list names. `report_progress` is
    called with a line for each step. Returns the interpreter. Raises `SettingsError`.
    """
    with _locked(wanted.folder):
        if wanted.is_installed:
            report_progress(f"{wanted} is installed in {wanted.folder}")
        else:
            _make(wanted, report_progress)
        if packages:
            _install_packages(wanted, packages, report_progress)
    return wanted.python


def _make(wanted: Pinned, report_progress: ReportProgress) -> None:
    if wanted.folder.exists():
        report_progress(f"{wanted.folder} is half made, or of another version of Tailrace: it is made anew")
        shutil.rmtree(wanted.folder)
    report_progress(f"making {wanted.folder}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(wanted.folder)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise SettingsError(
            f"{sys.executable} cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv):\n"
            f"{(made.stdout + made.stderr).strip()}"
        )
    listed = wanted.folder / "requirements.txt"
    listed.write_text(wanted.requirements)
    _pip(wanted, ["--no-deps", "--requirement", str(listed)], report_progress)
    proof = subprocess.run(
        [wanted.python, "-P", "-c", f"import {wanted.proof}"],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if proof.returncode:
        raise SettingsError(f"{wanted} was installed and cannot be imported:\n{_end_of(proof.stderr.splitlines())}")
    wanted.mark()
    report_progress(f"{wanted} is installed in {wanted.folder}")


def _install_packages(wanted: Pinned, packages: Sequence[str], report_progress: ReportProgress) -> None:
    """The user's own, with what they need beside the list."""
    listed = wanted.folder / "requirements.txt"
    # The index may hold later ones of what is there already: none is taken
    _pip(wanted, ["--constraint", str(listed), *packages], report_progress)
    report_progress(f"installed {', '.join(packages)}")


def _pip(wanted: Pinned, arguments: Sequence[str], report_progress: ReportProgress) -> None:
    """Run pip in there; each package that it fetches is said."""
    command = [str(wanted.python), "-m", "pip", "install", "--no-input", "--progress-bar", "off", *arguments]
    written: deque[str] = deque(maxlen=400)
    fetched, size = 0, len(wanted.packages)
    with subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None  # it is a pipe
        for line in pip.stdout:
            written.append(line.rstrip())
            if line.startswith(("Collecting ", "Processing ")):
                fetched += 1
                name = line.split()[1].rpartition("/")[2]
                report_progress(f"  {fetched} of {size}: {name}" if fetched <= size else f"  {name}")
            elif line.startswith("Installing collected packages"):
                report_progress("  unpacking")
    if pip.returncode:
        raise _failure(wanted, written)


def _failure(wanted: Pinned, written: Sequence[str]) -> SettingsError:
    """What pip's failure comes to, and what to do."""
    text = "\n".join(written)
    if any(sign in text for sign in _UNREACHABLE):
        hint = "the package index cannot be reached: is there a network, and is pip's index right (pip config list)?"
    elif "No matching distribution found" in text:
        hint = (
            f"pip finds no such package for Python {sys.version_info.major}.{sys.version_info.minor} (pip config list)"
        )
    elif "No space left on device" in text:
        hint = f"there is no room left where {wanted.folder} is"
    else:
        hint = "pip failed"
    return SettingsError(
        f"{wanted} could not be installed; {hint}. The same command goes on with what pip has fetched.\n"
        f"{_end_of(written)}"
    )


def _end_of(lines: Sequence[str]) -> str:
    return "\n".join([line for line in lines if line.strip()][-_SHOWN_LINES:])


def _environment() -> dict[str, str]:
    """Of this process, without what would show the new interpreter this one's modules."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
    return {name: value for name, value in os.environ.items() if name not in hidden}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else makes it meanwhile."""
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise SettingsError(
            f"{folder.parent} cannot be written to ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from error
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _read_marker(folder: Path) -> str | None:
    try:
        read = json.loads((folder / _MARKER).read_text())
    except (OSError, ValueError):
        return None
    return str(read.get("list")) if isinstance(read, dict) else None
