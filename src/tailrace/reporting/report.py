"""`report.html` and `reward.png`: what a run did, in files that open without a network.

Made from the run's folder alone (`metrics.jsonl`, `rollouts/*.jsonl`, `summary.json`, the settings file), so that a
report can be made again, for a run that was killed too. Everything a model or a task wrote is hostile text: the
template escapes it, and the page's own policy forbids requests, and every script but the one that it was written with.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jinja2

from tailrace.output_files import replace_durably
from tailrace.reporting.charts import Chart, Line, line_chart, reward_chart, reward_png
from tailrace.reporting.conversations import conversation, pretty, readable
from tailrace.reporting.formats import NOTHING, clock, compact, num_bytes, seconds, share
from tailrace.reporting.metrics import metric_spec
from tailrace.reporting.phase_report import ROW_HEADINGS, total_costs
from tailrace.reporting.run_folder import ChosenRollout, RunFolder, read_run_folder
from tailrace.reporting.summary import RunSummary, summary_lines

REPORT_FILE = "report.html"
REWARD_FILE = "reward.png"
_PHASES = 5


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the top of the page."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Views:
    """Further pages of the chosen rollouts, which a script of the page's own draws in its place."""

    style: str
    script: str
    kept: str
    """JSON: what the script knows of the rollouts."""
    links: Mapping[str, Sequence[tuple[str, str]]]
    """By rollout: what its pages are called, and their addresses, which begin with `#/`."""

    @property
    def script_digest(self) -> str:
        """Of SHA-256, as a page's policy names the script that may run."""
        return base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode()


ViewsOf: TypeAlias = Callable[[Path, Sequence[ChosenRollout]], Views | None]


def write_report(run_folder: Path, views_of: ViewsOf | None = None) -> None:
    """Write `report.html` and, where there is a reward, `reward.png` into the run's folder.

    `views_of` makes further pages of the rollouts in it. Takes a second or two, most of it matplotlib's: call it
    off the event loop. Raises `DataError` for a folder without a run and `OSError` where the files cannot be written.
    """
    run = read_run_folder(run_folder)
    rewards = (run.series("reward/mean"), run.series("reward/std"))
    views = None if views_of is None else views_of(run_folder, run.rollouts)
    replace_durably(run_folder / REPORT_FILE, _page(run, reward_chart(*rewards), views).encode("utf-8", "replace"))
    if (picture := reward_png(*rewards, f"{readable(run.name)}: reward")) is not None:
        replace_durably(run_folder / REWARD_FILE, picture)


def _page(run: RunFolder, reward: Chart | None, views: Views | None) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tailrace.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"readable": readable, "pretty": pretty, "clock": clock, "seconds": seconds}
    return environment.get_template("report.html.j2").render(
        run=run,
        summary=run.summary,
        status=_status(run.summary),
        tiles=_tiles(run),
        reward=reward,
        charts=_charts(run),
        conversations=[conversation(chosen) for chosen in run.rollouts],
        lines=[] if run.summary is None else summary_lines(run.summary),
        metrics=_metric_rows(run),
        phase_headings=ROW_HEADINGS,
        phases=[cost.row() for cost in total_costs({name: one.values for name, one in run.columns.items()})],
        views=views,
    )


def _status(summary: RunSummary | None) -> str:
    return "unfinished" if summary is None else str(summary.status)


def _tiles(run: RunFolder) -> list[Tile]:
    summary = run.summary
    reward, version = run.series("reward/mean"), run.series("policy/version")
    trained, stalest = run.series("training/tokens_per_s"), run.series("staleness/max")
    steps = len(reward.steps) if summary is None else summary.steps
    newest = reward.last if summary is None or summary.reward_last is None else summary.reward_last
    tiles = [
        Tile("Reward", _fixed(newest), f"from {_fixed(reward.values[0])}" if reward.values else ""),
        *_held_out_tiles(summary),
        Tile("Steps", compact(steps), f"policy version {compact(version.last or 0)}"),
        Tile("Generated", _or_nothing(_generated_per_s(run), compact), "tokens/s, mean"),
        Tile("Trained", _or_nothing(_mean(trained.values), compact), "tokens/s of compute"),
        Tile(
            "Staleness",
            _or_nothing(_mean_staleness(run), "{:.2f}".format),
            f"at most {compact(max(stalest.values, default=0))} versions",
        ),
    ]
    if summary is not None and summary.length_ratio is not None:
        tiles.append(Tile("Length ratio", _fixed(summary.length_ratio), "trained to finished; 1 is unbiased"))
    if summary is not None and summary.peak_rss_bytes:
        whose = "all processes" if summary.cpu_s is not None else "processes that it started here"
        tiles.append(Tile("Memory", num_bytes(sum(summary.peak_rss_bytes.values())), f"peak, {whose}"))
    return [tile for tile in tiles if tile.value != NOTHING]


def _generated_per_s(run: RunFolder) -> float | None:
    """Over the run, as its summary says; without one, up to its newest line."""
    if run.summary is not None:
        return run.summary.generation_tokens_per_s
    tokens, wall_s = sum(run.series("rollout/generated_tokens").values), run.series("wall_s").last
    return tokens / wall_s if tokens and wall_s else None


def _mean_staleness(run: RunFolder) -> float | None:
    """Over the tokens that bore loss, as its summary says; without one, of its lines."""
    if run.summary is not None:
        return run.summary.staleness_mean
    loss_tokens, is_skipped = _by_step(run, "batch/loss_tokens"), _by_step(run, "policy/skipped_steps")
    means = {step: mean for step, mean in _by_step(run, "staleness/mean").items() if not is_skipped.get(step)}
    tokens = sum(loss_tokens.get(step, 0.0) for step in means)
    return sum(mean * loss_tokens.get(step, 0.0) for step, mean in means.items()) / tokens if tokens else None


def _by_step(run: RunFolder, name: str) -> dict[float, float]:
    series = run.series(name)
    return dict(zip(series.steps, series.values, strict=True))


def _held_out_tiles(summary: RunSummary | None) -> list[Tile]:
    """One for each environment that was evaluated beside training."""
    found = summary.evaluations if summary is not None else {}
    return [
        Tile(
            "Held-out reward" if len(found) == 1 else f"Held-out {environment}",
            _fixed(course.reward_last),
            f"from {_fixed(course.reward_first)}; versions {course.policy_version_min} to {course.policy_version_max}",
        )
        for environment, course in found.items()
    ]


def _fixed(value: float | None) -> str:
    return _or_nothing(value, "{:.3f}".format)


def _or_nothing(value: float | None, show: Callable[[float], str]) -> str:
    return NOTHING if value is None else show(value)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _short(value: float) -> str:
    return f"{value:.3g}"


def _charts(run: RunFolder) -> list[Chart]:
    def chart(
        title: str, unit: str, names: Mapping[str, str], show: Callable[[float], str] = _short, *, log: bool = False
    ) -> Chart | None:
        lines = [Line(label, run.series(name)) for label, name in names.items()]
        return line_chart(title, unit, lines, show=show, logarithmic=log)

    lengths = {"sampled": "rollout/completion_tokens", "with context": "rollout/tokens"}
    rates = {"generated": "generation/tokens_per_s", "trained": "training/tokens_per_s"}
    shares = {
        "zero-spread groups": "group/zero_spread_share",
        "truncated": "rollout/truncated_share",
        "failed": "rollout/failed_share",
    }
    differences = {
        "all tokens": "training/logprob_difference",
        "fresh": "training/logprob_difference_fresh",
        "over older caches": "training/logprob_difference_mixed",
    }
    lags = {"median": "lag/p50_s", "p99": "lag/p99_s", "max": "lag/max_s"}
    phase_unit = "per step, logarithmic; rollouts overlap"
    charts = [
        line_chart("Held-out reward", "evaluations beside training", _held_out_lines(run), show=_short),
        line_chart("Reward by environment", "mean per step", _environment_lines(run), show=_short),
        chart("Loss", "of the optimizer step", {"loss": "training/loss"}),
        chart("Gradient norm", "before clipping", {"gradient norm": "training/grad_norm"}),
        chart("KL", "trained policy from the one that sampled, nats per token", {"KL": "training/kl"}),
        chart("Entropy", "nats per token", {"entropy": "training/entropy"}),
        chart("Rollout length", "tokens", lengths, compact),
        chart("Turns, branches", "per rollout", {"turns": "rollout/turns", "branches": "rollout/branches"}),
        chart("Throughput", "tokens/s", rates, compact),
        chart("Staleness", "policy versions", {"mean": "staleness/mean", "max": "staleness/max"}),
        line_chart("Phases", phase_unit, _phase_lines(run), show=seconds, logarithmic=True),
        chart("Event-loop lag", "logarithmic", lags, seconds, log=True),
        chart("Shares", "", shares, share),
        chart("Trainer and generator", "|log-prob difference|, nats", differences),
    ]
    return [made for made in charts if made is not None]


def _environment_lines(run: RunFolder) -> list[Line]:
    """None where there is one environment: the big chart is its own."""
    names = [name for name in run.names("reward/", "/mean") if name != "reward/mean"]
    lines = [Line(name.removeprefix("reward/").removesuffix("/mean"), run.series(name)) for name in names]
    return lines if len(lines) > 1 else []


def _held_out_lines(run: RunFolder) -> list[Line]:
    names = run.names("eval/", "/reward/mean")
    return [Line(name.removeprefix("eval/").removesuffix("/reward/mean"), run.series(name)) for name in names]


def _phase_lines(run: RunFolder) -> list[Line]:
    """The longest phases first."""
    names = run.names("phase/", "/wall_s")
    lines = [Line(name.removeprefix("phase/").removesuffix("/wall_s"), run.series(name)) for name in names]
    return sorted(lines, key=lambda line: -sum(line.series.values))[:_PHASES]


def _metric_rows(run: RunFolder) -> list[tuple[str, str, str, str]]:
    """Name, newest value, unit and description of every metric of the table that the run recorded."""
    rows = []
    for name, value in run.latest().items():
        try:
            spec = metric_spec(name)
        except ValueError:
            continue
        rows.append((name, f"{value:,.6g}", "" if spec.unit == "1" else spec.unit, spec.description))
    return rows
