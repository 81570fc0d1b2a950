"""The `tailrace` command: it hears signals to stop first, and imports all the rest (`commands`) then."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tailrace.lifecycle.early_signals import end_at_once_when_asked
from tailrace.lifecycle.standard_streams import give_up_unwritable_streams, open_missing_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status. Without `arguments`, those of the process, which it may end."""
    if arguments is None:
        open_missing_streams()
        end_at_once_when_asked()
    from tailrace.commands import status_of
    from tailrace.lifecycle.event_loop import force_exit_if_threads_hang

    try:
        status = status_of(sys.argv[1:] if arguments is None else arguments)
    finally:
        if arguments is None:
            give_up_unwritable_streams()
    if arguments is None:
        force_exit_if_threads_hang(status)
    return status
