from __future__ import annotations

import errno
import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.reporting.logs import Terminal, logging_as_it_was, setup_logging
from tailrace.tracing import log_files
from tailrace.tracing.log_files import LogFile, StderrHandler
from tailrace.tracing.output_log import OutputLog

FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="a device that is always full")


def no_room(path: Path) -> None:
    """Whatever writes there finds the disk full."""
    path.unlink(missing_ok=True)
    path.symlink_to(FULL)


@needs_full_device
def test_a_full_disk_is_told_once_and_what_is_missing_where_it_takes_bytes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, before = tmp_path / "workers.log", LogFile.lost_bytes
    no_room(path)
    log = LogFile(path, "what rollout workers print", max_bytes=1000)
    for _ in range(3):
        log.append(b"12345\n")
    assert LogFile.lost_bytes - before == 18
    [warning] = caplog.messages
    assert "what rollout workers print is lost" in warning
    assert f"{path} cannot be written: No space left on device" in warning
    path.unlink()
    log.append(b"again\n")
    log.append(b"and on\n")
    assert path.read_text() == "[18 bytes are missing here: the disk took none]\nagain\nand on\n"
    assert len(caplog.messages) == 1


@needs_full_device
def test_a_process_that_prints_onto_a_full_disk_is_not_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_room(tmp_path / "workers.log")
    before = LogFile.lost_bytes
    output = OutputLog(tmp_path / "workers.log")
    with output.writer() as log:
        process = subprocess.Popen([sys.executable, "-c", "print('x' * 300_000)"], stdout=log)
    assert process.wait(60) == 0
    output.close()
    assert LogFile.lost_bytes - before == 300_001
    assert len(caplog.messages) == 1


@needs_full_device
def test_a_log_on_a_full_disk_goes_on_without_tracebacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    no_room(tmp_path / "orchestrator.log")
    with logging_as_it_was():
        recent = setup_logging("orchestrator", tmp_path, Terminal.LIVE)
        for number in range(3):
            logging.getLogger("tailrace.run").info("step %d", number)
    assert recent is not None
    told, *others = [line.split("  ")[1] for line in recent.lines]
    assert others == ["step 0", "step 1", "step 2"]
    assert "the log of orchestrator is lost" in told
    captured = capfd.readouterr()
    assert "Logging error" not in captured.out + captured.err


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_file_that_cannot_be_turned_over_is_emptied_and_what_it_held_is_counted(
    is_shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, before = tmp_path / "trainer.log", LogFile.lost_bytes
    (tmp_path / "trainer.log.1").mkdir()  # which no file can become
    log = LogFile(path, "the log of trainer", max_bytes=100, is_shared=is_shared)
    log.append(b"a" * 90)
    log.append(b"more\n" * 4)
    assert path.read_text() == "[90 bytes are missing here: the disk took none]\n" + "more\n" * 4
    assert LogFile.lost_bytes - before == 90
    assert len(caplog.messages) == 1


def test_a_file_that_was_turned_over_and_cannot_be_opened_anew_costs_what_was_to_go_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, lost_before, is_out = tmp_path / "workers.log", LogFile.lost_bytes, False

    def open_within_limit(path: Path, mode: str) -> io.FileIO:
        if is_out:
            raise OSError(errno.EMFILE, "Too many open files")
        return io.FileIO(path, mode)

    monkeypatch.setattr(log_files, "FileIO", open_within_limit)
    log = LogFile(path, "what rollout workers print", max_bytes=100)
    log.append(b"a" * 90)
    is_out = True
    log.append(b"lost\n" * 4)
    assert LogFile.lost_bytes - lost_before == 20
    is_out = False
    log.append(b"again\n")
    assert path.read_text() == "[20 bytes are missing here: the disk took none]\nagain\n"
    assert (tmp_path / "workers.log.1").read_text() == "a" * 90
    assert len(caplog.messages) == 1


class _Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(("error", "is_shown"), [(BrokenPipeError(), False), (TypeError("a mistake"), True)])
def test_a_terminal_that_takes_no_line_goes_unsaid_and_a_mistake_does_not(
    error: Exception, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = StderrHandler()
    handler.setStream(_Broken(error))
    handler.handle(logging.LogRecord("tailrace", logging.INFO, __file__, 1, "a line", (), None))
    assert ("a mistake" in capsys.readouterr().err) == is_shown


def test_requests_of_http_clients_whose_urls_may_hold_passwords_are_not_logged() -> None:
    program = """
import logging
from tailrace.tracing.log_files import log_to_stderr
log_to_stderr()
for name in ("httpx", "httpx2"):
    logging.getLogger(name).info("HTTP Request: POST https://me:sesame@host/v1")
    logging.getLogger(name).warning("a warning of %s", name)
logging.getLogger("other").info("still told")
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert "sesame" not in told
    assert [line in told for line in ("a warning of httpx\n", "a warning of httpx2\n", "still told")] == [True] * 3
