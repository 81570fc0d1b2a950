"""Virtual environments are made once, anew where they are not whole, and what goes wrong says what to do."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.environments.installed import Pinned, find_installed, install, pinned
from tailrace.errors import SettingsError

VERIFIERS = "verifiers==0.4.0"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def wheel(folder: Path, name: str) -> Path:
    """A package of one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}.py", "WORD = 'hush'\n")
        packed.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        packed.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{information}/RECORD", "")
    return path


def listing(folder: Path, *more: str, proof: str = "quiet") -> Pinned:
    lines = ["# what it needs", f"quiet @ {wheel(folder, 'quiet').as_uri()}", *more]
    return Pinned("quiet", "1.0", "\n".join(lines) + "\n", proof)


def test_it_is_made_once_and_anew_where_it_is_not_whole(tmp_path: Path) -> None:
    said: list[str] = []
    unreachable = listing(tmp_path, "absent==1.0")
    with pytest.raises(SettingsError, match="could not be installed; pip finds no such package for Python 3"):
        install(unreachable, report_progress=said.append)
    assert any("1 of 2: " in line and "quiet" in line for line in said)
    assert not unreachable.is_installed
    said.clear()

    whole = listing(tmp_path)
    python = install(whole, (str(wheel(tmp_path, "own")),), report_progress=said.append)
    assert said[0].endswith("is half made, or of another version of Tailrace: it is made anew")
    assert said[-1].startswith("installed ")
    printed = subprocess.run([python, "-c", "import own, quiet; print(quiet.WORD)"], capture_output=True, check=True)
    assert printed.stdout == b"hush\n"
    assert python == whole.python
    said.clear()

    before = python.stat().st_ino, (whole.folder / "tailrace.json").stat().st_mtime_ns
    install(whole, report_progress=said.append)
    assert (python.stat().st_ino, (whole.folder / "tailrace.json").stat().st_mtime_ns) == before
    assert said == [f"quiet==1.0 is installed in {whole.folder}"]
    assert not listing(tmp_path, "more==1.0").is_installed  # another list than it was made with
    python.unlink()
    assert not whole.is_installed


def test_what_was_installed_must_be_importable(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="was installed and cannot be imported"):
        install(listing(tmp_path, proof="loud"), report_progress=lambda _: None)


def test_an_index_that_cannot_be_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SettingsError, match=r"the package index cannot be reached: is there a network(.|\n)*goes on"):
        install(listing(tmp_path, "absent==1.0"), report_progress=lambda _: None)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SettingsError, match=r"cannot be written to .*set XDG_CACHE_HOME"):
        install(pinned(VERIFIERS), report_progress=lambda _: None)


@pytest.mark.parametrize(
    ("requirement", "says"),
    [
        ("verifiers==0.3.1", r'run beside Tailrace: pip install "tailrace\[verifiers\]"'),
        ("verifiers==0.4.1", "is not among the versions that Tailrace works with: write verifiers==0.4.0"),
        ("verifiers", "write verifiers==0.4.0"),
        ("prime-rl==1.0", "there is verifiers==0.4.0"),
    ],
)
def test_other_versions_and_packages_are_refused(
    requirement: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match=says):
        pinned(requirement)
    assert main(["environments", "install", requirement]) == 2
    assert requirement in capsys.readouterr().err


def test_what_needs_it_names_the_command() -> None:
    with pytest.raises(SettingsError, match=r"is not there: tailrace environments install verifiers==0\.4\.0"):
        find_installed(VERIFIERS, needed_by="verifiers-v1")
    pinned(VERIFIERS).folder.mkdir(parents=True)
    with pytest.raises(SettingsError, match="is not finished, or of another version of Tailrace"):
        find_installed(VERIFIERS, needed_by="verifiers-v1")


def test_the_list_names_exact_versions_once_each() -> None:
    lines = pinned(VERIFIERS).packages
    names = [line.partition("==")[0] for line in lines]
    assert VERIFIERS in lines
    assert names == sorted(set(names))
    assert all(line.partition("==")[2] for line in lines)
