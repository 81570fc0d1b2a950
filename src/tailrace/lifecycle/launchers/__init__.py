"""Who starts the roles of a run: `inline` as tasks of this process, `local` as processes of this machine.

In: role specs. Out: handles to wait for, stop and restart them by, and addresses where they meet. A launcher of another
kind is one module: a subclass of `Launcher` with a subclass of `RoleHandle`. As `LAUNCHER` of a module in this package
the setting `placement` takes it by the module's name, from elsewhere as `module:Class`. It never knows what roles do.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tailrace.errors import SettingsError
from tailrace.lifecycle.launchers.base import Launcher, RoleHandle

__all__ = ["Launcher", "RoleHandle", "launcher_class"]


def launcher_class(placement: str) -> type[Launcher]:
    """The launcher that a setting names. Raises `SettingsError` for one that is not there."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    module, _, attribute = placement.partition(":")
    if not attribute:
        module, attribute = (f"{__name__}.{placement}", "LAUNCHER") if placement in names else ("", "")
    try:
        found = getattr(import_module(module), attribute) if module else None
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"placement = {placement!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise SettingsError(
            f"placement = {placement!r} names no launcher: write {' or '.join(names)}, or module:Class of your own"
        )
    return found
