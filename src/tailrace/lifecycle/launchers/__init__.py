"""Who starts the roles of a run: `inline` as tasks of this process, `local` as processes of this machine.

In: role specs. Out: handles to wait for, stop and restart them by, and addresses where they meet. A launcher of another
kind is one module: a subclass of `Launcher` with a subclass of `RoleHandle`. As `LAUNCHER` of a module in this package
the setting `placement` takes it by the module's name, from elsewhere as `module:Class`. It never knows what roles do.
"""

from __future__ import annotations

import pkgutil

from tailrace.errors import SettingsError
from tailrace.lifecycle.launchers.base import Launcher, RoleHandle
from tailrace.user_code import import_attribute

__all__ = ["Launcher", "RoleHandle", "launcher_class"]


def launcher_class(placement: str) -> type[Launcher]:
    """The launcher that a setting names. Raises `SettingsError` for one that is not there."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    path = f"{__name__}.{placement}:LAUNCHER" if placement in names else placement
    found = import_attribute(path, setting="placement") if ":" in path else None
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise SettingsError(
            f"placement = {placement!r} names no launcher: write {' or '.join(names)}, or module:Class of your own"
        )
    return found
