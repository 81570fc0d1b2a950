"""How a run went: `summary.json` for programs, and a few lines for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.output_files import replace_durably
from tailrace.records import RunStatus, TerminalState
from tailrace.reporting.formats import clock, compact, num_bytes, plural, seconds, share
from tailrace.scheduling import Ledger
from tailrace.visible_text import visible

SUMMARY_FILE = "summary.json"
_LEAST_COLUMNS = 16


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How many rollouts ended in which state."""

    admitted: int = 0
    in_flight: int = 0
    by_state: dict[str, int] = {}
    """Rollouts by terminal state: `trained`, `filtered`, `failed`, `cancelled`."""
    by_reason: dict[str, dict[str, int]] = {}
    """For every state but `trained`, rollouts by reason."""

    @classmethod
    def of(cls, ledger: Ledger) -> LedgerSummary:
        """Of one start of a run."""
        return cls(
            admitted=ledger.admitted,
            in_flight=ledger.in_flight,
            by_state={str(state): ledger.total(state) for state in TerminalState},
            by_reason={str(state): ledger.reasons(state) for state in TerminalState if state != TerminalState.TRAINED},
        )

    def __add__(self, other: LedgerSummary) -> LedgerSummary:
        """Both together: what came before a run was resumed, and what came after."""
        states = self.by_reason.keys() | other.by_reason.keys()
        return LedgerSummary(
            admitted=self.admitted + other.admitted,
            in_flight=self.in_flight + other.in_flight,
            by_state=_sum(self.by_state, other.by_state),
            by_reason={state: _sum(self.by_reason.get(state, {}), other.by_reason.get(state, {})) for state in states},
        )

    @property
    def balances(self) -> bool:
        """The invariant of the ledger."""
        return self.admitted == sum(self.by_state.values()) + self.in_flight

    def invariant_line(self) -> str:
        """The invariant with its numbers.

        >>> LedgerSummary(admitted=70, in_flight=6, by_state={"trained": 64}).invariant_line()
        'admitted 70 = terminal 64 + in flight 6'
        """
        terminal, sign = sum(self.by_state.values()), "=" if self.balances else "≠"
        return f"admitted {self.admitted:,} {sign} terminal {terminal:,} + in flight {self.in_flight:,}"


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in sorted(one.keys() | other.keys())}


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations beside training, on one environment's held-out tasks."""

    evaluations: int
    reward_first: float
    """Mean reward of the first evaluation; `reward_last` of the last."""
    reward_last: float
    reward_best: float
    step_last: int
    """The step that the last one was due at."""
    tasks: int
    """Scored in the last one."""
    policy_version_min: int
    """Oldest version that sampled a token of the last one."""
    policy_version_max: int

    def line(self) -> str:
        """For people.

        >>> EvaluationSummary(evaluations=3, reward_first=0.2, reward_last=0.9, reward_best=0.9, step_last=40, tasks=64,
        ...     policy_version_min=40, policy_version_max=42).line()
        '0.200 at first, 0.900 at last (best 0.900); step 40, 64 tasks, versions 40 to 42'
        """
        rewards = f"{self.reward_first:.3f} at first, {self.reward_last:.3f} at last (best {self.reward_best:.3f})"
        versions = f"versions {self.policy_version_min:,} to {self.policy_version_max:,}"
        return f"{rewards}; step {self.step_last:,}, {plural(self.tasks, 'task')}, {versions}"


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run went. None: not known, or nothing of the kind happened."""

    name: str
    status: RunStatus
    reason: str = ""
    exit_code: int = 0
    model: str = ""
    environments: list[str] = []
    steps: int = 0
    policy_version: int = 0
    starts: int = 1
    """How often the run was started. All figures are of all starts, as far as their steps survive."""
    wall_s: float = 0.0
    """From each start to its end. Of one that was killed, and so wrote no summary, only what it trained counts: from
    its first rollout to its last step."""
    cpu_s: float | None = None
    """User and system CPU time of all processes. None where one of a role ran elsewhere, in any start (concepts.md)."""
    started_at: str = ""
    """When the newest start began, not the first one: ISO 8601, in UTC."""

    ledger: LedgerSummary = LedgerSummary()
    reward_first: float | None = None
    """Mean reward of the first step; `reward_last` over the rollouts of the last `reward_last_steps`."""
    reward_last: float | None = None
    reward_last_steps: int = 1
    reward_best: float | None = None
    """Of one step."""
    evaluations: dict[str, EvaluationSummary] = {}
    """On held-out tasks, beside training, by environment."""

    tokens_generated: int = 0
    """Completion tokens sampled for training rollouts."""
    tokens_trained: int = 0
    """Completion tokens that bore loss."""
    generation_tokens_per_s: float | None = None
    """`tokens_generated` over `wall_s` from the first rollout to the last step; so is the next one."""
    training_tokens_per_s: float | None = None
    tokens_per_cpu_s: float | None = None

    length_ratio: float | None = None
    loss_length_ratio: float | None = None
    wasted_tokens: int = 0
    masked_tokens: int = 0
    masked_share: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None

    skipped_steps: int = 0
    """Of `steps`, those that changed no weight."""
    mismatched_steps: int = 0
    """Steps in which trainer and generator disagreed about the log-probabilities of fresh tokens: the alarm's."""

    trainer_wait_s: float | None = None
    """Seconds that the trainer waited for a batch until the last step, the first one included."""
    admission_waits_s: dict[str, float] = {}
    """Seconds that no group was admitted until the last step, by cause. While `engines_full` nothing was idle."""

    loop_lag_max_s: float | None = None
    peak_rss_bytes: dict[str, int] = {}
    """By role."""
    dropped_records: int = 0
    """Metrics and rollout files that the disk did not take."""
    checkpoint_path: str = ""
    """The newest checkpoint."""
    versions: dict[str, str] = {}
    """Of the packages that matter for the figures."""


def write_summary(run_folder: Path, summary: RunSummary) -> Path:
    """Write `summary.json` so that a reader sees the old file or the new one, never half. Raises `OSError`."""
    path = run_folder / SUMMARY_FILE
    replace_durably(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return path


def read_summary(run_folder: Path) -> RunSummary | None:
    """The summary of a run folder; None where there is none. Raises `DataError` for a file that is not one."""
    path = run_folder / SUMMARY_FILE
    if not path.is_file():
        return None
    with guarded(f"{path} is not a run's summary", DataError):
        return msgspec.json.decode(path.read_bytes(), type=RunSummary)


def summed_up_s(run_folder: Path) -> float:
    """What the starts of a run took by the summary of the newest one that wrote any; 0 where none can be read."""
    with suppress(DataError):
        if (summary := read_summary(run_folder)) is not None:
            return summary.wall_s
    return 0.0


def summary_text(summary: RunSummary, width: int | None = None) -> str:
    """The end of a run in a few lines, for a terminal of so many columns: between words it goes on below.

    Controls are written out: why a run ended may be a text of users' code.
    """
    labelled = summary_lines(summary)
    margin = max(len(label) for label, _ in labelled) + 4
    lines = []
    for label, text in labelled:
        columns = None if width is None else max(_LEAST_COLUMNS, width - margin)
        first, *more = _broken(visible(text), columns)
        lines += [f"  {label}".ljust(margin) + first, *(" " * margin + line for line in more)]
    return "\n".join(lines)


def _broken(text: str, columns: int | None) -> list[str]:
    lines = text.split("\n")
    if columns is None:
        return lines
    wrapped = (textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False) for line in lines)
    return [line for parts in wrapped for line in parts or [""]]


def summary_lines(summary: RunSummary) -> list[tuple[str, str]]:
    """Labels and texts, most important first; lines about nothing are left out."""
    reason = f": {summary.reason}" if summary.reason else ""
    lines = [
        ("run", f"{summary.name}, {summary.status}{reason}"),
        ("steps", _steps(summary)),
        ("reward", _rewards(summary)),
        *(("held-out", f"{environment}: {found.line()}") for environment, found in summary.evaluations.items()),
        ("rollouts", _rollouts(summary.ledger)),
        ("ledger", summary.ledger.invariant_line()),
        ("tokens", _tokens(summary)),
        ("bias", _bias(summary)),
        ("staleness", _staleness(summary)),
        ("ALARM", _mismatch(summary.mismatched_steps)),
        ("waits", _waits(summary)),
        ("memory", _memory(summary.peak_rss_bytes)),
        ("not saved", plural(summary.dropped_records, "record") if summary.dropped_records else ""),
        ("checkpoint", summary.checkpoint_path),
    ]
    return [(label, text) for label, text in lines if text]


def _steps(summary: RunSummary) -> str:
    starts = f" ({summary.starts:,} starts)" if summary.starts > 1 else ""
    skipped = f", {summary.skipped_steps:,} skipped" if summary.skipped_steps else ""
    return f"{summary.steps:,} in {clock(summary.wall_s)}{starts}{skipped}, policy version {summary.policy_version:,}"


def _rewards(summary: RunSummary) -> str:
    if summary.reward_first is None or summary.reward_last is None:
        return ""
    best = "" if summary.reward_best is None else f" (best {summary.reward_best:.3f})"
    last = "at last" if summary.reward_last_steps <= 1 else f"over the last {summary.reward_last_steps} steps"
    return f"{summary.reward_first:.3f} at first, {summary.reward_last:.3f} {last}{best}"


def _rollouts(ledger: LedgerSummary) -> str:
    return ", ".join(
        f"{ledger.by_state[state]:,} {state}{_reasons(ledger.by_reason.get(state, {}))}"
        for state in TerminalState
        if ledger.by_state.get(state)
    )


def _reasons(counts: Mapping[str, int]) -> str:
    named = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f" ({named})" if named else ""


def _tokens(summary: RunSummary) -> str:
    parts = [f"{compact(summary.tokens_generated)} generated", f"{compact(summary.tokens_trained)} trained"]
    if summary.training_tokens_per_s is not None:
        parts.append(f"{compact(summary.training_tokens_per_s)} trained/s")
    if summary.tokens_per_cpu_s is not None:
        parts.append(f"{compact(summary.tokens_per_cpu_s)} per CPU-second")
    return " · ".join(parts)


def _bias(summary: RunSummary) -> str:
    parts = [f"{compact(summary.wasted_tokens)} tokens wasted", f"{compact(summary.masked_tokens)} masked"]
    if summary.masked_share is not None:
        parts[1] += f" ({share(summary.masked_share)})"
    ratios = (("length ratio", summary.length_ratio), ("loss length ratio", summary.loss_length_ratio))
    return " · ".join([*(f"{name} {ratio:.3f}" for name, ratio in ratios if ratio is not None), *parts])


def _mismatch(steps: int) -> str:
    return f"trainer and generator disagreed in {plural(steps, 'step')}, see the log" if steps else ""


def _waits(summary: RunSummary) -> str:
    """Longest first."""
    longest_first = sorted(summary.admission_waits_s.items(), key=lambda wait: -wait[1])
    causes = [f"{seconds(waited_s)} {cause.replace('_', ' ')}" for cause, waited_s in longest_first if waited_s >= 0.05]
    trainer = [] if summary.trainer_wait_s is None else [f"trainer {seconds(summary.trainer_wait_s)} for a batch"]
    return " · ".join([*trainer, *([f"admission {', '.join(causes)}"] if causes else [])])


def _staleness(summary: RunSummary) -> str:
    if summary.staleness_mean is None or summary.staleness_max is None:
        return ""
    return f"{summary.staleness_mean:.2f} versions mean, {summary.staleness_max} max"


def _memory(peak_rss_bytes: Mapping[str, int]) -> str:
    return " · ".join(f"{role} {num_bytes(size)}" for role, size in peak_rss_bytes.items())
