"""What commands take on the command line, and how they run and print."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape

from tailrace.errors import SettingsError

ResultT = TypeVar("ResultT")

TABLE_WIDTH = 100
"""Columns that a table of figures needs, wherever it is printed."""

Recipe: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
EnvironmentName: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
Folder: TypeAlias = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
Name: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="NAME")]
Limit: TypeAlias = Annotated[int | None, tyro.conf.arg(metavar="TASKS")]
Model: TypeAlias = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
JoinedRun: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="RUN")]
GeneratorName: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GENERATOR")]
Address: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")]
HttpAddress: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")]
KeyFile: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
RunName: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
RedisUrl: TypeAlias = Annotated[str, tyro.conf.arg(metavar="URL")]
Runs: TypeAlias = Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
NewFile: TypeAlias = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
PerNode: TypeAlias = Annotated[int, tyro.conf.arg(metavar="COUNT")]
Image: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="IMAGE")]
Claim: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="NAME")]
Quantity: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="SIZE")]
SharedFolder: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="FOLDER")]
Lines: TypeAlias = Annotated[tuple[str, ...], tyro.conf.arg(metavar="LINE"), tyro.conf.UseAppendAction]
Options: TypeAlias = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE"), tyro.conf.UseAppendAction]
Plan: TypeAlias = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
Sweep: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="KEY=VALUES")]
Capture: TypeAlias = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="CAPTURE")]
Shape: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="64x20")]
Size: TypeAlias = Annotated[str, tyro.conf.arg(metavar="SIZE")]
Phase: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="PHASE")]
Steps: TypeAlias = Annotated[int | None, tyro.conf.arg(metavar="STEPS")]
ExportTokens: TypeAlias = Annotated[Literal["parquet", "jsonl"] | None, tyro.conf.arg(metavar="parquet|jsonl")]
Save: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


def run_to_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """On an event loop, until it ends or a signal stops it. Raises `Stopped` then."""
    from tailrace.lifecycle.event_loop import run_on_event_loop
    from tailrace.lifecycle.signals import until_stopped

    return run_on_event_loop(until_stopped(work))


def show(text: str) -> None:
    """As it is: neither wrapped nor coloured."""
    Console().print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def show_progress(text: str) -> None:
    """On standard error: standard output is for the result."""
    Console(stderr=True).print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def show_error(text: str) -> None:
    """What ends the command with a status that is not 0, on standard error."""
    Console(stderr=True).print(f"[bold red]error[/] {escape(text)}", soft_wrap=True, highlight=False)


def terminal_columns() -> int | None:
    """Of standard output; None where that is no terminal, whose lines need not fit anything."""
    console = Console()
    return console.width if console.is_terminal else None


def refuse(overrides: list[str]) -> None:
    """Raise `SettingsError` where a command that takes no settings was given some."""
    if overrides:
        raise SettingsError(f"this command takes no {overrides[0]!r}")
