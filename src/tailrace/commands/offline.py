"""`simulate`, `replay` and `ui`: without a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from tailrace.commands.arguments import (
    TABLE_WIDTH,
    KeyFile,
    Save,
    refuse,
    run_to_end,
    show,
    show_progress,
    show_rendered,
    tell,
    write_out,
)
from tailrace.errors import SettingsError
from tailrace.extras import extra_needed
from tailrace.user_code import modules_in


@dataclass(frozen=True)
class Simulate:
    """Ask what a cluster will do with a load, per policy. Any setting of the plan can follow as --section.key VALUE."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """A packaged plan (long-tail, stragglers), or a .toml file. Takes a minute or two."""
    sweep: Annotated[str | None, tyro.conf.arg(metavar="KEY=VALUES")] = None
    """Run it once for each value of a setting: max_staleness=0,1,2,4,8, engines.slots=32,64, ..."""
    png: Save = None
    """Draw the timelines into this file."""
    json: bool = False
    """Print the figures as one line of JSON."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        import logging

        from tailrace.config.simulating import load_plans
        from tailrace.output_files import require_writable, writing_to
        from tailrace.simulation import simulate
        from tailrace.simulation.report import comparison, record

        logging.getLogger("tailrace").setLevel(logging.ERROR)  # the table says what a run would warn of
        if self.png is not None:
            require_writable(self.png, "--png")
        runs = []
        for plan in load_plans(self.plan, overrides, sweep=self.sweep, tell_left_out=show_progress):
            runs.append(simulate(plan))
            show_progress(f"  {plan.name}: {runs[-1].duration_s / 3600:.1f} h simulated")
        try:
            if self.json:
                write_out(json.dumps([record(run) for run in runs]) + "\n")
            else:
                show_rendered(comparison(runs))
        finally:  # the one may fail where the other does not
            if self.png is not None:
                from tailrace.simulation.charts import timeline_png

                with writing_to(self.png, "--png"):
                    self.png.write_bytes(timeline_png(runs))
        return 0


@dataclass(frozen=True)
class Replay:
    """Run a captured step's pipeline again, offline, and measure what each phase costs and does to the event loop."""

    capture: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="CAPTURE")] = None
    """A run's folder with a capture in it (`tailrace train RECIPE --capture 2`); or none, with --synthetic."""
    synthetic: Annotated[str | None, tyro.conf.arg(metavar="64x20")] = None
    """Made-up groups instead: rollouts x turns, of 2,032 tokens a turn."""
    routed_experts: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "0"
    """Bytes of routed experts of the made-up groups."""
    phase: Annotated[str | None, tyro.conf.arg(metavar="PHASE")] = None
    """Only this one, after those before it."""
    traffic: int = 0
    """Tasks of synthetic traffic on the event loop beside it."""
    repeat: int = 3
    """How often each phase runs."""
    json: bool = False
    """End with a line of JSON, an array of rows."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import CONFIG_FILE, module_folders
        from tailrace.replay.command import captured, made_up, replay, run_of
        from tailrace.replay.measuring import HEADINGS, as_json, rows

        refuse(overrides)
        if (self.capture is None) == (self.synthetic is None):
            raise SettingsError("replay needs the folder of a run that captured something, or --synthetic 64x20")
        if self.repeat < 1 or self.traffic < 0:
            raise SettingsError(f"--repeat is {self.repeat} and --traffic {self.traffic}; at least 1 and 0")
        plan = captured(self.capture) if self.capture else made_up(self.synthetic or "", self.routed_experts)
        with modules_in(*(module_folders(run_of(self.capture) / CONFIG_FILE) if self.capture else ())):
            costs = run_to_end(replay(plan, only=self.phase, traffic=self.traffic, repeat=self.repeat))
        table = Table(box=None, pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, no_wrap=True, justify="left" if heading == HEADINGS[0] else "right")
        for row in rows(costs):
            table.add_row(*row)
        show_rendered(table, width=max(TABLE_WIDTH, Console().width))
        if self.json:
            show(as_json(costs))
        return 0


@dataclass(frozen=True)
class Ui:
    """Look at runs in a browser: curves, schedules, groups, conversations, tokens. It only reads files."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """A run's folder, or the one that many are in; or traces of verifiers', or completions of TRL's."""
    address: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "127.0.0.1:8420"
    """Where to listen. The link of one that other machines can reach has a token in it."""
    chat: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Where `tailrace serve MODEL --http` answers: the page then talks to that model."""
    chat_key: KeyFile = None
    """File with the key of that, as `tailrace serve --http-key` wrote it."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        try:
            from tailrace.dashboard.serving import serve_dashboard
        except ModuleNotFoundError as error:
            if error.name not in ("starlette", "uvicorn", "anyio"):
                raise
            raise SettingsError(extra_needed("the dashboard", error.name, "ui")) from error
        from tailrace.dashboard.chat import chat_place

        refuse(overrides)
        return run_to_end(serve_dashboard(self.folder, self.address, tell, chat=chat_place(self.chat, self.chat_key)))
