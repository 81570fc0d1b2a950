"""What settings name as `module:attribute`: environments, rewards, losses and launchers of one's own.

Modules are looked for in the folder that the command runs in, beside the settings' file, and among what is installed.
Everything that can be wrong is a `SettingsError` of one sentence.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path, PurePath

from tailrace.errors import SettingsError, TailraceError


def working_folder() -> str:
    """The folder that the command runs in. Raises `SettingsError` where somebody removed it."""
    try:
        return os.getcwd()
    except OSError as error:
        raise SettingsError(f"the folder that this runs in is gone ({error.strerror}): change to another") from error


@contextmanager
def modules_in(*folders: Path) -> Iterator[None]:
    """Modules in these folders are found too, here and in processes that are started meanwhile."""
    added = [folder for folder in dict.fromkeys(map(str, folders)) if folder not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def import_attribute(path: str, *, setting: str) -> object:
    """The object that `module:attribute` names. `setting` is the one that names it, for messages.

    >>> import_attribute("math:pie", setting="environment.name")
    Traceback (most recent call last):
        ...
    tailrace.errors.SettingsError: environment.name is 'math:pie': math has no 'pie'; did you mean math:pi?
    """
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        raise SettingsError(f"{setting} is {path!r}; what is your own is written as module:attribute")
    module = _import_module(module_name, f"{setting} is {path!r}")
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [key for key in vars(module) if not key.startswith("_")]
        close = get_close_matches(attribute, public, n=1)
        hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
        raise SettingsError(f"{setting} is {path!r}: {module_name} has no {attribute!r}{hint}") from None


def describe_failure(error: BaseException) -> str:
    """What users' code raised, and in which of its lines.

    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError as error:
    ...     describe_failure(error).partition(" (")[0]
    'ZeroDivisionError: division by zero'
    """
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"


def _as_a_file(module_name: str) -> str:
    """What to write where a file was named in place of a module.

    >>> _as_a_file("games/own.py")
    '; a module is named with dots and without .py, as in games.own:ATTRIBUTE'
    """
    path = PurePath(module_name)
    if path.suffix != ".py" and len(path.parts) < 2:
        return ""
    parts = (path.name,) if path.is_absolute() or ".." in path.parts else path.parts
    module = ".".join(parts).removesuffix(".py")
    return f"; a module is named with dots and without .py, as in {module}:ATTRIBUTE"


def _import_module(module_name: str, what: str) -> object:
    """Import, also from the folder the command runs in, which a console script does not look into by itself."""
    if (here := working_folder()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    if "/" in module_name or module_name.startswith("."):
        raise SettingsError(f"{what}: no module has such a name{_as_a_file(module_name)}")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise SettingsError(
                f"{what}: there is no module {error.name!r} here ({here}), beside the settings' file or among the "
                f"installed packages{_as_a_file(module_name)}"
            ) from error
        raise SettingsError(f"{what}: importing {module_name} needs {error.name!r}") from error
    except TailraceError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"{what}: importing {module_name} raised {describe_failure(error)}") from error
