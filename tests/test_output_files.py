from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tailrace.errors import DataError, SettingsError
from tailrace.output_files import replace_durably, require_writable, writing_to


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "file", []
    path.write_text("old")

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, path.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    replace_durably(path, b"new")
    assert synced == [(path.stat().st_ino, "old"), (tmp_path.stat().st_ino, "new")]
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_cannot_be_written_is_the_old_one_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        replace_durably(path, b"new")
    assert ([*tmp_path.iterdir()], path.read_text()) == ([path], "old")


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("kept")
    link.symlink_to(tmp_path / "not-there-yet")
    os.mkfifo(tmp_path / "pipe")
    names = sorted(path.name for path in tmp_path.iterdir())
    for path in (there, link, tmp_path / "pipe", tmp_path / "new"):
        require_writable(path, "--save")  # a pipe that nobody reads would block whoever opened it
    require_writable(tmp_path / "a" / "b" / "new", "--save", makes_folders=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert there.read_text() == "kept"


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "new", "Not a directory"),
        (tmp_path / "a" / "new", "No such file or directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(SettingsError, match=f"^--save: cannot write {path}: {why}$"):
            require_writable(path, "--save")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_what_is_not_ours_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o400)
    tmp_path.chmod(0o500)
    for path in (tmp_path / "file", tmp_path / "new"):
        with pytest.raises(SettingsError, match="Permission denied"):
            require_writable(path, "--save")


def test_what_fails_after_all_is_told(tmp_path: Path) -> None:
    full = Path("/dev/full")
    with pytest.raises(DataError, match=r"^--save: cannot write /dev/full: No space"), writing_to(full, "--save"):
        full.write_text("text")
