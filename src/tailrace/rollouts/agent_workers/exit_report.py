"""What `faulthandler` wrote before an agent worker ended: which function held its event loop, or crashed."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_THREAD = re.compile(
    r"^(?P<current>Current )?[Tt]hread 0x(?P<id>[0-9a-f]+)[^\n]*\n(?P<frames>(?:  (?:File|<|\.\.\.)[^\n]*\n?)*)", re.M
)
_FRAME = re.compile(r'  File "(?P<file>[^\n]*)", line (?P<line>\d+) in (?P<function>[^\n]*)')
_FOREIGN = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
"""Python's own modules (installed packages lie below them) and ours."""
_SHOWN_FRAMES = 12


@dataclass(frozen=True, slots=True)
class ExitReport:
    """Of a process that ended by itself."""

    was_held: bool
    """Its event loop had not run for too long."""
    where: str
    """The innermost line of users' code of the thread that ran the event loop, or that crashed."""
    stack: str
    """Innermost frame first."""

    @classmethod
    def read(cls, text: str, thread_id: int) -> ExitReport | None:
        """Of what was written; None where that is nothing. `thread_id` is that of the event loop's thread.

        >>> text = 'Timeout (0:00:02)!\\nThread 0x0a (most recent call first):\\n  File "/a/shop.py", line 3 in buy\\n'
        >>> ExitReport.read(text, 10).where
        'buy (/a/shop.py:3)'
        """
        threads = list(_THREAD.finditer(text))
        own = [thread for thread in threads if int(thread["id"], 16) == thread_id]
        chosen = [thread for thread in threads if thread["current"]] or own or threads
        if not chosen:
            return None
        frames = list(_FRAME.finditer(chosen[0]["frames"]))
        stack = "\n".join(frame[0] for frame in frames[:_SHOWN_FRAMES])
        return cls(text.lstrip().startswith("Timeout"), _innermost(frames), stack)


def _innermost(frames: Sequence[re.Match[str]]) -> str:
    own = [frame for frame in frames if not frame["file"].startswith((*_FOREIGN, "<frozen"))]
    return next((f"{frame['function']} ({frame['file']}:{frame['line']})" for frame in [*own, *frames]), "")
