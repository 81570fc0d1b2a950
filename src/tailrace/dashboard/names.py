"""Names of files as text: a system's are bytes, and pages are told in UTF-8."""

from __future__ import annotations

import os
from pathlib import Path


def as_text(name: str | Path) -> str:
    r"""A name or a path, with an escape for each byte that is no UTF-8.

    >>> as_text(Path(os.fsdecode(b"runs/caf\xe9"))), as_text("café")
    ('runs/caf\\xe9', 'café')
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")
