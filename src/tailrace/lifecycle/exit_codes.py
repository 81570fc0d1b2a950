"""How a command or a role's process ends, as its exit status says it."""

from __future__ import annotations

import enum

from tailrace.errors import DataError, HubNotAnswering, ModelError, NotAnswering, SettingsError

_OF_BAD_SETTINGS = (SettingsError, DataError, ModelError)
_MAY_PASS = (NotAnswering, HubNotAnswering)


class ExitCode(enum.IntEnum):
    """Exit statuses of the `tailrace` command and of its processes."""

    FINISHED = 0
    FAILED = 1
    BAD_SETTINGS = 2
    PREEMPTED = 75
    """By SIGUSR1 or a file: to be started again elsewhere, with --resume."""
    HUNG_UP = 129
    """By SIGHUP: the terminal is gone."""
    INTERRUPTED = 130
    """By Ctrl-C."""
    TERMINATED = 143
    """By SIGTERM."""


def exit_code_of(error: Exception) -> ExitCode:
    """What to exit with when this error ended the work.

    >>> exit_code_of(SettingsError("unknown setting"))
    <ExitCode.BAD_SETTINGS: 2>
    >>> exit_code_of(NotAnswering("no Redis answers"))
    <ExitCode.FAILED: 1>
    """
    is_wrong = isinstance(error, _OF_BAD_SETTINGS) and not isinstance(error, _MAY_PASS)
    return ExitCode.BAD_SETTINGS if is_wrong else ExitCode.FAILED


def exit_code_named(kind: str) -> ExitCode:
    """Of another process's error, by the name of its class.

    >>> exit_code_named("ModelError"), exit_code_named("")
    (<ExitCode.BAD_SETTINGS: 2>, <ExitCode.FAILED: 1>)
    """
    return ExitCode.BAD_SETTINGS if kind in {one.__name__ for one in _OF_BAD_SETTINGS} else ExitCode.FAILED


def is_from_outside(status: int) -> bool:
    """Whether a role that left early with this status was made to, or left without a word: it told of no error.

    >>> is_from_outside(-9), is_from_outside(0), is_from_outside(ExitCode.FAILED)
    (True, True, False)
    """
    return status < 0 or status in (ExitCode.FINISHED, ExitCode.TERMINATED)
