"""Which rollout an agent worker ran when it ended: a number in a file's memory, which outlives the process.

The worker writes it at every turn of a task; the orchestrator finds it in front of the process's exit report. So what
one rollout does to the process is that rollout's alone, whatever ended it: a signal, `os._exit`, a loop that is held.
"""

from __future__ import annotations

import contextvars
import mmap
import os

from tailrace.tracing.watched_tasks import Turns

MARK_BYTES = 8
"""At the file's beginning."""
UNATTRIBUTED = 0

_number: contextvars.ContextVar[int] = contextvars.ContextVar("tailrace_played", default=UNATTRIBUTED)


class BlameMark:
    """Marks, in the worker, whose task has its turn now; tasks inherit whose they are from those that made them."""

    def __init__(self, file: int, turns: Turns) -> None:
        """In the first bytes of `file`, which are there; turns are passed on to `turns`."""
        self._mark = memoryview(mmap.mmap(file, MARK_BYTES)).cast("q")
        self._turns = turns
        os.register_at_fork(after_in_child=self._let_go)

    def begin_turn(self) -> None:
        """A task runs."""
        self._turns.begin_turn()
        self._mark[0] = _number.get()

    def end_turn(self) -> None:
        """It waits, or has ended."""
        self._mark[0] = UNATTRIBUTED
        self._turns.end_turn()

    def _let_go(self) -> None:
        """What users' code forked marks nothing."""
        self._mark = memoryview(bytearray(MARK_BYTES)).cast("q")


def context_of(number: int, context: contextvars.Context) -> contextvars.Context:
    """A copy of `context` for what this rollout, or score, runs."""
    own = context.copy()
    own.run(_number.set, number)
    return own


def blamed(file: bytes) -> int:
    """The number of the rollout or score that ran last and had not ended its turn; `UNATTRIBUTED` where none had.

    >>> blamed((7).to_bytes(8, "little") + b"Fatal Python error: ...")
    7
    """
    return int.from_bytes(file[:MARK_BYTES], "little")
