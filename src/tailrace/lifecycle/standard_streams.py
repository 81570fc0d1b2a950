"""Standard input, output and error, which may be closed when a process starts, or take nothing more. Imports next to
nothing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

_STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}
"""By their descriptors: 0, 1, 2."""


def open_missing_streams() -> None:
    """Have the null device stand in for each that was closed when this process started.

    What is opened next has the number of a closed one otherwise: an event loop's own descriptor, which libuv aborts the
    process for when it closes it, or a file that somebody's prints then go into. Where all are there it does nothing.
    """
    for number, (name, mode) in enumerate(_STREAMS.items()):
        try:
            os.fstat(number)
        except OSError:  # those before are there, so it gets this number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:  # its descriptor may be a file of the user's by now
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for good


def give_up_unwritable_streams() -> None:
    """Write what standard output and error still hold; where one takes it not, let it go.

    At the end of a command: the interpreter would try again, and have its own exit status where that fails.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the latter of one that users' code closed
            give_up(stream)


def give_up(stream: TextIO) -> None:
    """Have what this one holds, and whatever it is given from now on, go nowhere."""
    with suppress(OSError, ValueError):  # one that is no file holds nothing
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
