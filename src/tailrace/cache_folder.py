"""Where Tailrace keeps on this machine what is made once and used by every run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tailrace`, by default in the user's home. Not created."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tailrace"
