"""Write `examples/cluster/` anew, by the commands that stand in docs/jobs.md.

python tools/render_cluster_examples.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^tailrace (cluster render (?:.*\\\n)*.*?) > (\S+)$", re.MULTILINE)

for command, file in COMMAND.findall((ROOT / "docs/jobs.md").read_text(encoding="utf-8")):
    arguments = [sys.executable, "-m", "tailrace", *shlex.split(command.replace("\\\n", " "))]
    rendered = subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (ROOT / file).write_text(rendered, encoding="utf-8")
