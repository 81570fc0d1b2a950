"""Packages of environments in virtual environments of their own, where they do not go beside Tailrace's needs.

In: a name and a version (`verifiers==0.4.0`), for which this package has a list of exact versions. Out: the interpreter
of a virtual environment in the user's cache folder, made once. Nothing is installed but by the user's own command.
"""

from tailrace.environments.installed.installing import Pinned, find_installed, install, pinned

__all__ = ["Pinned", "find_installed", "install", "pinned"]
