"""`docs/metrics.md`, generated from the table: `python -m tailrace.reporting.metric_docs docs/metrics.md`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from tailrace.reporting.metrics import METRICS, MetricSpec

_INTRODUCTION = """\
# Metrics

Generated from `METRICS` in `tailrace.reporting.metrics`; a test keeps this page in step with it.

`metrics.jsonl` holds one line a step: `step`, `wall_s` (seconds since the first rollout, without what lies between two
starts of the run) and metrics by name. A metric without a value in a step is absent from its line, never 0; a value
that is not finite is `null`. An evaluation writes a line of its own, with the step it was made at.

The rewards of a step are those of the rollouts in its file, `rollouts/step_000012.jsonl`, that were trained or
filtered: each rollout counts once, in the step that it ended in, and every step has some. Groups that were left out
because their rewards are all equal belong to them: without those a task that is nearly solved would look half solved.
While a run's last batches are trained nothing is sampled any more and no such group ends, so `reward/mean` reads low
there: the summary and the report tell the reward over the last quarter of the steps, 8 at most.

*Reduction* says how the values of one step become one number: `mean` and `std` are weighted (a value that stands for n
tokens has weight n), `last` is the newest value, `total` that of a count over all starts of the run. Names with
`{placeholders}` are families. The unit `1` is a plain number or a share of 0 to 1.
"""


def metrics_page() -> str:
    """The text of `docs/metrics.md`."""
    sections = [
        f"\n## {section}\n\n| name | unit | reduction | meaning |\n| --- | --- | --- | --- |\n"
        + "".join(map(_row, specs))
        for section, specs in groupby(METRICS.values(), key=lambda spec: spec.name.partition("/")[0])
    ]
    return _INTRODUCTION + "".join(sections)


def _row(spec: MetricSpec) -> str:
    description = spec.description.replace("|", "\\|")
    return f"| `{spec.name}` | {spec.unit} | {spec.reduction} | {description} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(metrics_page(), encoding="utf-8")
