"""`python -m tailrace`, as launchers start it that take a module: the `tailrace` command."""

from __future__ import annotations

import sys

from tailrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
