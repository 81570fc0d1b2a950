"""Packages that adapters need, imported when one is used."""

from __future__ import annotations

import importlib
from typing import Any

from tailrace.errors import SettingsError


def import_extra(module: str, *, extra: str, what: str) -> Any:
    """The module. Raises `SettingsError` naming the extra where it, or a module that it needs, is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = f" ({error.name} is not installed)" if error.name else ""
        raise SettingsError(f'{what} needs a package: pip install "tailrace[{extra}]"{missing}') from error
