"""`train`, `eval` and `try`: what plays an environment."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from tailrace.commands.arguments import (
    Name,
    Recipe,
    Save,
    run_to_end,
    show,
    show_error,
    show_progress,
    tell,
    terminal_columns,
)
from tailrace.errors import SettingsError


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
    capture: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None
    """Write what enters the pipeline in the first so many steps, for `tailrace replay`."""
    export_tokens: Annotated[Literal["parquet", "jsonl"] | None, tyro.conf.arg(metavar="parquet|jsonl")] = None
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

            resume_with = f"tailrace train {shlex.quote(self.recipe)} --name {settings.name} --resume"
            recipe = read_settings_file(self.recipe)
            summary = run_to_end(train(settings, recipe=recipe, resume_with=resume_with))
        stopped = (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.HUNG_UP, ExitCode.PREEMPTED)
        tell(summary_text(summary, terminal_columns()))  # which is in the run's folder; the status is the run's
        tell(f"  in          runs/{settings.name}")
        if summary.exit_code in stopped and summary.checkpoint_path:
            tell(f"  go on with  {resume_with}")
        return summary.exit_code


@dataclass(frozen=True)
class Evaluate:
    """Measure a model on a recipe's held-out tasks. Any setting can follow as --section.key VALUE."""

    recipe: Recipe
    """A packaged recipe (`tailrace recipes`), or a .toml file; --model.name names the model to measure."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="TASKS")] = None
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
        """Run the command; 1 where an environment could not be evaluated."""
        from tailrace.config import load_settings, placed
        from tailrace.run.evaluating import (
            evaluate_model,
            evaluation_json,
            evaluation_samples,
            evaluation_text,
            require_savable,
            save_rollouts,
            unevaluated,
        )

        if self.limit is not None and self.limit < 1:
            raise SettingsError(f"--limit is {self.limit}; it counts held-out tasks, so it must be 1 or above")
        require_savable(self.save, "--save")
        settings = load_settings(self.recipe, overrides)
        with placed(self.recipe, overrides):
            measured = evaluate_model(settings, limit=self.limit, greedy=self.greedy, report_progress=show_progress)
            found = run_to_end(measured)
        try:
            if self.show > 0:
                show(evaluation_samples(found, self.show) + "\n")
            show(evaluation_json(found) if self.json else evaluation_text(settings.model.name, found))
        finally:  # the one may fail where the other does not
            if self.save is not None:
                save_rollouts(found, self.save, "--save")
        failures = unevaluated(found)
        for failure in failures:
            show_error(failure)
        return int(bool(failures))


@dataclass(frozen=True)
class Try:
    """Play an environment without training, and tell what is wrong. Any setting can follow as --section.key VALUE."""

    environment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
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
            playing = try_environments(
                settings, tasks=self.tasks, group_size=self.each, tokens=self.tokens, report_progress=show_progress
            )
            tried = run_to_end(playing)
        show("\n\n".join(text for _, text in tried))
        return int(not all(trial.is_trainable for trial, _ in tried))


def _show_plan(settings: Any) -> int:
    from tailrace.config import RUNS, plan_run, settings_as_toml, with_scaled_deadlines
    from tailrace.reporting.masking import masked_text
    from tailrace.run.cluster import describe_cluster
    from tailrace.run.devices import describe_devices, role_devices
    from tailrace.run.folder import require_resumable
    from tailrace.run.memory import describe_memory
    from tailrace.run.model_checks import as_planned
    from tailrace.run.outside_trainer import require_own_process
    from tailrace.run.parts import describe_places
    from tailrace.run.training import checked_environments
    from tailrace.training.losses.registry import load_loss

    require_own_process(settings)
    environments = checked_environments(settings, given={})
    if settings.trainer.feed == "batch":
        load_loss(settings.trainer.loss, ranks_per_row=settings.trainer.sequence_parallel)
    if settings.resume:
        require_resumable(settings, RUNS)
    places = describe_places(settings, environments)
    planned = as_planned(settings)
    memory = describe_memory(planned)
    num_tasks = {name: len(loaded.spec.train_tasks) for name, loaded in environments.items()}
    plan = plan_run(with_scaled_deadlines(planned), num_tasks)
    show(masked_text(settings_as_toml(settings)))
    devices = [*describe_devices(role_devices(settings)), *describe_cluster(settings)]
    for sentence in [*plan.sentences, *devices, *places, *memory]:
        show(f"  {sentence}")
    return 0
