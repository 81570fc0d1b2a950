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
tailrace simulate long-tail --sweep engines.slots=32,64
tailrace replay runs/quickstart --traffic 200
tailrace ui runs/quickstart
tailrace recipes
tailrace environments install verifiers==0.4.0
tailrace --version
"""

from __future__ import annotations

import io
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from tailrace import __version__
from tailrace.commands.arguments import printing, show, show_error
from tailrace.commands.catalogue import Environments, FetchSmollm2, Recipes, Settings
from tailrace.commands.clusters import Cluster
from tailrace.commands.generators import Join, Key, Leave, Serve
from tailrace.commands.offline import Replay, Simulate, Ui
from tailrace.commands.runs import Evaluate, Train, Try
from tailrace.errors import OutputLost, SettingsError, TailraceError
from tailrace.user_code import working_folder

__all__ = [
    "Cluster",
    "Environments",
    "Evaluate",
    "FetchSmollm2",
    "Join",
    "Key",
    "Leave",
    "Recipes",
    "Replay",
    "Serve",
    "Settings",
    "Simulate",
    "Train",
    "Try",
    "Ui",
    "parse",
    "status_of",
]

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
            show(f"tailrace {__version__}")
            return ExitCode.FINISHED
        _require_command(given)
        command, overrides = _parsed(given)
        working_folder()  # which much of what follows asks for
        return command(overrides)
    except OutputLost as lost:
        if not lost.reader_has_left:
            show_error(str(lost))
        return exit_code_of(lost)
    except TailraceError as error:
        show_error(str(error))
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


def _parsed(given: Sequence[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """`parse`, which may print help. Raises `OutputLost` where standard output does not take that.

    What standard error does not take, of an option that is wrong, is left out, and the status is its own.
    """
    said = io.StringIO()
    try:
        with printing(), redirect_stderr(said):
            return parse(given)
    finally:
        with suppress(OSError):
            sys.stderr.write(said.getvalue())


def parse(arguments: Sequence[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """The command that these arguments mean, and what of them are settings; exits for an option that it has not.

    tyro sees no setting: it gives an argument that may be left out the text "[]" where any option is unknown to it.
    """
    commands: Any = reduce(or_, (Annotated[one, tyro.conf.subcommand(name)] for name, one in _COMMANDS.items()))
    own, settings = _own_and_settings(arguments)
    command, left = tyro.cli(
        commands,
        prog="tailrace",
        description="Reinforcement learning of language models, asynchronous throughout. "
        "`tailrace --version` tells its version.",
        args=own or ["--help"],
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return _with_homes(command), [*left, *settings]


def _with_homes(command: Any) -> Any:
    """With the home of a user where one of its paths begins with `~`: a shell leaves it in quotes, and after a `=`."""
    given = {field.name: getattr(command, field.name) for field in fields(command)}
    paths = {name: Path(os.path.expanduser(path)) for name, path in given.items() if isinstance(path, Path)}
    return replace(command, **paths)


def _own_and_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own words, and those of settings: options that it does not have, with their values."""
    own, settings = list(arguments[:1]), list[str]()
    options = _options(_COMMANDS[own[0]]) if own and own[0] in _COMMANDS else None
    waiting = deque(arguments[1:])
    while waiting:
        word = waiting.popleft()
        name, equals, _ = word.partition("=")
        if options is None or not word.startswith("-") or name.replace("-", "_") in options:
            own.append(word)
            continue
        settings.append(word)
        if not equals and waiting and not waiting[0].startswith("--"):
            settings.append(waiting.popleft())
    return own, settings


def _options(command: type) -> frozenset[str]:
    """Those of a command, with an underscore for each dash."""
    hints = get_type_hints(command, include_extras=True)
    named = {name for name, hint in hints.items() if tyro.conf.Positional not in getattr(hint, "__metadata__", ())}
    return frozenset({"_h", "__help", *(f"__{name}" for name in named)})
