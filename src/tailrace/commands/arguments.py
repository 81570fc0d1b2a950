"""What commands take on the command line, and how they run and print."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import tyro
from rich.console import Console, RenderableType
from rich.markup import escape
from typing_extensions import override

from tailrace.errors import OutputLost, SettingsError
from tailrace.lifecycle.standard_streams import give_up
from tailrace.visible_text import visible

ResultT = TypeVar("ResultT")

TABLE_WIDTH = 100
"""Columns that a table of figures needs, wherever it is printed."""

# What several commands take alike.
Recipe: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
Name: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="NAME")]
KeyFile: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
RunName: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
PerNode: TypeAlias = Annotated[int, tyro.conf.arg(metavar="COUNT")]
Quantity: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="SIZE")]
Save: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


def run_to_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """On an event loop, until it ends or a signal stops it. Raises `Stopped` then."""
    from tailrace.lifecycle.event_loop import run_on_event_loop
    from tailrace.lifecycle.signals import until_stopped

    return run_on_event_loop(until_stopped(work))


class _Console(Console):
    """One for which a closed pipe is an error like others: rich's own ends the process."""

    @override
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextmanager
def printing() -> Iterator[None]:
    """Around what prints the result of a command. Raises `OutputLost` where standard output does not take it."""
    try:
        try:
            yield
        finally:  # who prints help exits
            sys.stdout.flush()
    except OSError as error:
        give_up(sys.stdout)
        raise OutputLost(error) from error


def show(text: str) -> None:
    """As it is: neither wrapped nor coloured. Raises `OutputLost`, as all that prints to standard output."""
    with printing():
        _Console().print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def tell(text: str) -> None:
    """What a command says beside its work: what standard output does not take is left out."""
    with suppress(OutputLost):
        show(text)


def show_rendered(what: RenderableType, *, width: int | None = None) -> None:
    """A table, as wide as the terminal unless told."""
    with printing():
        _Console(width=width).print(what)


def write_out(text: str) -> None:
    """To the byte: it becomes a file, or what a program reads."""
    with printing():
        sys.stdout.write(text)


def show_progress(text: str) -> None:
    """On standard error: standard output is for the result. What that does not take is left out."""
    with suppress(OSError):
        _Console(stderr=True).print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def show_error(text: str) -> None:
    """What ends the command with a status that is not 0, on standard error: perhaps a text of users' code."""
    with suppress(OSError):
        _Console(stderr=True).print(f"[bold red]error[/] {escape(visible(text))}", soft_wrap=True, highlight=False)


def terminal_columns() -> int | None:
    """Of standard output; None where that is no terminal, whose lines need not fit anything."""
    console = Console()
    return console.width if console.is_terminal else None


def refuse(overrides: list[str]) -> None:
    """Raise `SettingsError` where a command that takes no settings was given some."""
    if overrides:
        raise SettingsError(f"this command takes no {overrides[0]!r}")
