"""What every benchmark shares: options, one thread, a description of the machine, a table and a line of JSON.

Import this before NumPy or torch: it sets the number of threads, which both read once.
"""

from __future__ import annotations

import os

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
for _variable in THREAD_VARIABLES:
    os.environ.setdefault(_variable, "1")

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Options:
    """How a benchmark was called."""

    json: bool
    quick: bool
    cases: tuple[str, ...]

    def choose(self, names: Sequence[str]) -> list[str]:
        """The chosen ones of `names`; all when none was chosen. Exits with a message for an unknown one."""
        unknown = sorted(set(self.cases) - set(names))
        if unknown:
            sys.exit(f"no such case: {', '.join(unknown)}; there are: {', '.join(names)}")
        return [name for name in names if not self.cases or name in self.cases]


def parse_options(description: str | None) -> Options:
    """The options that every benchmark takes."""
    return common_options(common_parser(description).parse_args())


def common_parser(description: str | None) -> argparse.ArgumentParser:
    """Reads the options that every benchmark takes; one that takes more adds them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with a line of JSON, an array of rows")
    parser.add_argument("--quick", action="store_true", help="less than 50 s")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    return parser


def common_options(arguments: argparse.Namespace) -> Options:
    """What `common_parser` read."""
    return Options(arguments.json, arguments.quick, tuple(arguments.case))


def machine() -> str:
    """Processor, cores, memory, versions and date, in one line."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"{_processor()}, {cores} cores, {memory_bytes / 2**30:.0f} GiB; Python {platform.python_version()}, "
        f"{libraries}; {today}"
    )


def report(title: str, rows: Sequence[Any], options: Options) -> None:
    """A table of the rows, which are dataclasses, for people; then, where asked for, a line of JSON."""
    from rich.console import Console
    from rich.table import Table

    records = [asdict(row) for row in rows]
    console = Console(width=None if sys.stdout.isatty() else 160)
    for kind in dict.fromkeys(tuple(record) for record in records):
        table = Table(title=title, caption=machine())
        for heading in kind:
            table.add_column(heading, justify="left" if heading in {"case", "precision"} else "right", overflow="fold")
        for record in records:
            if tuple(record) == kind:
                table.add_row(*(_cell(value) for value in record.values()))
        console.print(table)
    if options.json:
        print(json.dumps(records))


def progress(message: str) -> None:
    """A line for whoever waits."""
    print(message, file=sys.stderr, flush=True)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
