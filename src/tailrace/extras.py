"""Packages that only some runs need: whether they are installed, and what is said where one is not."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from tailrace.errors import SettingsError


def extra_needed(what: str, package: str | None, extra: str) -> str:
    """What to do about a package that `what` lacks.

    >>> extra_needed("the dashboard", "uvicorn", "ui")
    'the dashboard needs uvicorn: pip install "tailrace[ui]"'
    """
    return f'{what} needs {package or "a package"}: pip install "tailrace[{extra}]"'


def require_extra(package: str, *, extra: str, what: str, key: tuple[str | int, ...] = ()) -> None:
    """Raise `SettingsError` where the package is not installed; imports nothing. `what` is the setting that asks."""
    if importlib.util.find_spec(package) is None:
        raise SettingsError(f"{extra_needed(what, package, extra)}, or leave it out", key=key)


def import_extra(module: str, *, extra: str, what: str, key: tuple[str | int, ...] = ()) -> Any:
    """The module. Raises `SettingsError`, naming the extra where it, or a module that it needs, is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SettingsError(extra_needed(what, error.name, extra), key=key) from error
    except ImportError as error:
        raise SettingsError(f"{what} needs {module}, which cannot be imported: {error}", key=key) from error
