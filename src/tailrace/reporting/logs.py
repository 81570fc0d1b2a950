"""Logging of one process: a file of its own; on the terminal lines, or the last few in the live view, or nothing."""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from tailrace.tracing.log_files import LogFile, StderrHandler
from tailrace.visible_text import visible

_FILE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
_LINE_FORMAT = "%(asctime)s  %(message)s"
_OURS = "tailrace"
_MAX_BYTES = 50_000_000
"""Of a log file; one more of this size is kept."""
_RECENT_LINES = 4
FILE_ONLY = "tailrace.phases"
"""Logger of what would crowd a terminal: a line per step."""


class Terminal(enum.StrEnum):
    """What this process does with the terminal."""

    LIVE = "live"
    """The live view owns it and shows the last few lines."""
    LINES = "lines"
    """One line a message, on standard error."""
    NONE = "none"
    """It belongs to another process."""


class _LineHandler(logging.Handler, ABC):
    """Takes messages as text. One that cannot be made into text never fails who logs it."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - a message that does not fit its arguments: where it was written is shown
            self.handleError(record)
        else:
            self.keep(text)

    @abstractmethod
    def keep(self, text: str) -> None:
        """One message, without the end of its last line."""


class RecentLines(_LineHandler):
    """Keeps the last few log lines for the live view."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=_RECENT_LINES)

    @property
    def lines(self) -> Sequence[str]:
        """Oldest first, one line each."""
        return tuple(self._lines)

    @override
    def keep(self, text: str) -> None:
        """The first line of the message, its controls written out: users' code and models write into messages."""
        self._lines.append(visible(text.partition("\n")[0]))


class _FileHandler(_LineHandler):
    """Lines of a file. What users' code prints in a process of its own goes into the same one."""

    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self._file = file

    @override
    def keep(self, text: str) -> None:
        self._file.append((text + "\n").encode(errors="backslashreplace"))

    def keep_within_size(self) -> None:
        """Whatever else writes into the file."""
        self._file.keep_within_size()

    @override
    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """On leaving, gives the process its own logging back, whatever was set up meanwhile."""
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    handlers, level, our_level = [*root.handlers], root.level, ours.level
    try:
        yield
    finally:
        for handler in [*root.handlers]:
            if handler not in handlers:
                root.removeHandler(handler)
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        ours.setLevel(our_level)
        logging.captureWarnings(False)


def setup_logging(
    role: str, folder: Path, terminal: Terminal = Terminal.NONE, *, level: str = "info", max_bytes: int = _MAX_BYTES
) -> RecentLines | None:
    """Send this process's log to `folder/<role>.log`, and to the terminal as asked.

    The file keeps messages from `level` on, the terminal those from info on; other packages' are logged from warnings
    on, Python warnings too. Called again, it replaces what an earlier call set up. Returns the lines for the live view
    with `Terminal.LIVE`, else None. Raises `OSError` when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = LogFile(folder / f"{role}.log", f"the log of {role}", max_bytes=max_bytes, is_shared=True)
    file.open()
    to_file = _FileHandler(file)
    to_file.setLevel(level.upper())
    to_file.setFormatter(logging.Formatter(_FILE_FORMAT, "%Y-%m-%d %H:%M:%S"))
    handlers: list[logging.Handler] = [to_file]
    recent = RecentLines() if terminal is Terminal.LIVE else None
    shown = StderrHandler() if terminal is Terminal.LINES else recent
    if shown is not None:
        shown.setLevel(logging.INFO)
        shown.addFilter(lambda record: record.name != FILE_ONLY)
        shown.setFormatter(logging.Formatter(_LINE_FORMAT, "%H:%M:%S"))
        handlers.append(shown)
    logging.basicConfig(handlers=handlers, level=logging.WARNING, force=True)
    logging.getLogger(_OURS).setLevel(min(to_file.level, logging.INFO))
    logging.captureWarnings(True)
    return recent


def keep_log_within_size() -> None:
    """Bound the file that `setup_logging` has chosen, where this process, or one that it started, writes into it by
    itself: prints, libraries with handlers of their own, native code. To be called now and then, in any thread.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _FileHandler):
            handler.keep_within_size()
