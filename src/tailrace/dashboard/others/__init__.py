"""Files of other libraries as runs: verifiers' traces and results, TRL's tables of completions.

    traces.jsonl, results.jsonl ─┐
    completions_00005.parquet ───┴─► `RolloutRecord` ─► a folder laid out as a run's ─► every view, and every search

The folders are temporary, and those of the dashboard's process; what was appended to a file is converted when somebody
looks. Nothing of the other libraries is imported, and what a file does not tell is said, not made up.
"""

from tailrace.dashboard.others.converted import OthersFiles, about
from tailrace.dashboard.others.sources import find_sources, source_at

__all__ = ["OthersFiles", "about", "find_sources", "source_at"]
