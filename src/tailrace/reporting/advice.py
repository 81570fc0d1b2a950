"""What is wrong with a run, by its figures, and the setting to change: for the page and the terminal. Pure.

    newest lines of metrics.jsonl ── rules, each a function ──► Advice: what was seen, the figures, what to change

Each rule is a row of docs/curves.md with its limits written down. It looks at the median of a few steps, so that one
odd step raises no alarm, and says nothing before there are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Literal, TypeAlias

import msgspec

from tailrace.reporting.formats import compact, seconds, share

Line: TypeAlias = Mapping[str, float]

WINDOW = 5
"""Steps that a rule looks at."""
HISTORY = 40
"""Steps that rules compare with: give them so many, whatever lines of evaluations lie between."""
_LATEST = 20
"""Steps back from which a drift is measured."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    rule: str
    severity: Literal["alarm", "hint"]
    seen: str
    """In a sentence, with its figures."""
    change: str
    """What to do about it; settings by their names."""
    metrics: tuple[str, ...]
    """The curves that show it."""


Rule: TypeAlias = Callable[[Sequence[Line]], Advice | None]


def advice(lines: Iterable[Line]) -> list[Advice]:
    """What is wrong by the newest lines of a run, oldest first; alarms before hints.

    >>> stuck = {"step": 9, "rollout/trained": 8.0, "rollout/filtered/zero_spread": 152.0, "reward/mean": 0.01}
    >>> [one.seen for one in advice([stuck] * 5)]
    ['95 % of rollouts were left out, in groups of equal rewards, at a mean reward of 0.010: they teach nothing']
    """
    steps = [line for line in lines if "policy/version" in line or "reward/mean" in line][-HISTORY:]
    if len(steps) < WINDOW:
        return []
    found = [made for rule in RULES if (made := rule(steps)) is not None]
    return sorted(found, key=lambda one: one.severity != "alarm")


def _values(lines: Sequence[Line], name: str) -> list[float]:
    return [line[name] for line in lines if name in line and math.isfinite(line[name])]


def _typical(lines: Sequence[Line], name: str) -> float | None:
    """The median of the newest steps; None where fewer than three of them have it."""
    values = _values(lines[-WINDOW:], name)
    return median(values) if len(values) >= 3 else None


def _before(lines: Sequence[Line], name: str) -> float | None:
    """That of as many steps, twenty before."""
    values = _values(lines[-_LATEST - WINDOW : -_LATEST], name)
    return median(values) if len(values) >= 3 else None


def _spent(lines: Sequence[Line], *names: str) -> tuple[float, float] | None:
    """Seconds of these waits in the newest steps, and the time that those took."""
    recent = lines[-WINDOW - 1 :]
    walls = _values(recent, "wall_s")
    if len(walls) < WINDOW or walls[-1] <= walls[0]:
        return None
    return sum(sum(_values(recent[1:], name)) for name in names), walls[-1] - walls[0]


_MOST = 0.7
_TEACHES = ("training/distillation", "training/cross_entropy")
"""Besides rewards."""


def no_spread(lines: Sequence[Line]) -> Advice | None:
    """Most groups have rewards that are all equal, and are left out, or are trained on where nothing else may teach."""
    left_out = _typical([_left_out(line) for line in lines[-WINDOW:]], "share") or 0.0
    equal, reward = _typical(lines, "group/zero_spread_share") or 0.0, _typical(lines, "reward/mean")
    is_taught = any(_values(lines[-WINDOW:], name) for name in _TEACHES)
    if reward is None or max(left_out, 0.0 if is_taught else equal) < _MOST:
        return None
    if left_out >= _MOST:
        seen, so = f"{share(left_out)} of rollouts were left out, in groups of equal rewards", "they teach nothing"
    else:
        seen = f"{share(equal)} of groups have equal rewards"
        so = "they teach nothing where advantages compare the rewards of a group"
    return Advice(
        rule="no_spread",
        severity="alarm" if left_out >= _MOST else "hint",
        seen=f"{seen}, at a mean reward of {reward:.3f}: {so}",
        change=_without_spread(lines, reward),
        metrics=("rollout/filtered/zero_spread", "group/zero_spread_share", "reward/mean"),
    )


def _left_out(line: Line) -> Line:
    """Of the rollouts that ended with a step, those of groups left out for equal rewards."""
    equal, trained = line.get("rollout/filtered/zero_spread", 0.0), line.get("rollout/trained", 0.0)
    return {"share": equal / (equal + trained)} if equal + trained else {}


def _without_spread(lines: Sequence[Line], reward: float) -> str:
    """Above the middle of the rewards that were seen, and above 0.5 as most end at 1, tasks are solved."""
    solved = "solved already: harder tasks"
    hard = (
        "too hard: easier tasks, a reward with steps between wrong and right, a larger rollouts.group_size or "
        "rollouts.temperature"
    )
    seen = _values(lines, "reward/min") + _values(lines, "reward/max")
    lowest, highest = min(seen, default=0.0), max(seen, default=1.0)
    if lowest < 0 and highest <= 0:  # 0 may be the best there is, or what a wrong answer in the right form gets
        return f"{solved}; or {hard}"
    return solved if reward > max(0.5, (lowest + highest) / 2) else hard


def entropy_collapse(lines: Sequence[Line]) -> Advice | None:
    """The policy settled on one answer."""
    now, then = _typical(lines, "training/entropy"), max(_values(lines, "training/entropy"), default=0.0)
    reward = _typical(lines, "reward/mean")
    if now is None or reward is None or now > 0.02 or now > 0.2 * then or reward > 0.9:
        return None
    return Advice(
        rule="entropy_collapse",
        severity="alarm",
        seen=f"entropy is {now:.3g} nats a token, from {then:.3g}, at a mean reward of {reward:.3f}",
        change="a lower trainer.learning_rate, a higher trainer.loss.clip_high, or trainer.loss.entropy 0.001",
        metrics=("training/entropy", "reward/mean"),
    )


def length_drift(lines: Sequence[Line]) -> Advice | None:
    """Rollouts get longer or shorter, and no better."""
    now, then = _typical(lines, "rollout/completion_tokens"), _before(lines, "rollout/completion_tokens")
    reward, reward_then = _typical(lines, "reward/mean"), _before(lines, "reward/mean")
    if now is None or then is None or reward is None or reward_then is None or then <= 0:
        return None
    if 0.67 < now / then < 1.5 or reward > reward_then + 0.02:
        return None
    grows = now > then
    change = (
        "length is rewarded by accident: look at the reward function, and at rollouts.max_tokens"
        if grows
        else "are long ones lost? scheduling.on_stale and scheduling.on_straggler other than drop, rollouts.timeout_s"
    )
    return Advice(
        rule="length_drift",
        severity="hint",
        seen=f"rollouts went from {compact(then)} to {compact(now)} sampled tokens in {_LATEST} steps, and the reward "
        f"from {reward_then:.3f} to {reward:.3f}",
        change=change,
        metrics=("rollout/completion_tokens", "reward/mean"),
    )


def truncated(lines: Sequence[Line]) -> Advice | None:
    """Answers are cut off."""
    cut = _typical(lines, "rollout/truncated_share")
    if cut is None or cut < 0.3:
        return None
    return Advice(
        rule="truncated",
        severity="hint",
        seen=f"{share(cut)} of rollouts have a turn that ended for length",
        change="rollouts.max_tokens, generator.max_cache_tokens where prompts are long, rollouts.max_turns, or a "
        "prompt that asks for less",
        metrics=("rollout/truncated_share",),
    )


def masked(lines: Sequence[Line]) -> Advice | None:
    """Tokens are too old to bear loss."""
    shares = [
        {"share": line["batch/masked_tokens"] / line["batch/tokens"]}
        for line in lines[-WINDOW:]
        if line.get("batch/tokens") and "batch/masked_tokens" in line
    ]
    masked_share = _typical(shares, "share")
    if masked_share is None or masked_share < 0.05:
        return None
    return Advice(
        rule="masked",
        severity="hint",
        seen=f"{share(masked_share)} of trained tokens were too old and bear no loss: long rollouts outlive the bound",
        change="a higher scheduling.max_staleness, or scheduling.group_release early",
        metrics=("batch/masked_tokens", "staleness/max"),
    )


def starved_trainer(lines: Sequence[Line]) -> Advice | None:
    """Generation is the slower side."""
    found = _spent(lines, "scheduler/trainer_wait_s")
    if found is None or found[0] < 0.5 * found[1]:
        return None
    return Advice(
        rule="starved_trainer",
        severity="hint",
        seen=f"the trainer waited for batches {share(min(1.0, found[0] / found[1]))} of the last {seconds(found[1])}",
        change="generation is the slower side: generator.replicas, generator.slots, generator.engine vllm, "
        "rollouts.max_tokens",
        metrics=("scheduler/trainer_wait_s",),
    )


def idle_engines(lines: Sequence[Line]) -> Advice | None:
    """The trainer is the slower side."""
    found = _spent(lines, "scheduler/buffer_wait_s", "scheduler/budget_wait_s", "scheduler/weights_wait_s")
    if found is None or found[0] < 0.5 * found[1]:
        return None
    return Advice(
        rule="idle_engines",
        severity="hint",
        seen=f"engines were given nothing new {share(min(1.0, found[0] / found[1]))} of the last {seconds(found[1])}: "
        "finished groups stood ready, or the staleness budget was spent",
        change="the trainer is the slower side: trainer.dtype bfloat16, scheduling.row_tokens, a device",
        metrics=("scheduler/buffer_wait_s", "scheduler/budget_wait_s"),
    )


def lag(lines: Sequence[Line]) -> Advice | None:
    """Something holds the event loop; not other programs, which have the core that it needs."""
    longest = [value for value in _values(lines[-WINDOW:], "lag/held_max_s") if value > 0.1]
    if len(longest) < 3:
        return None
    phase = max(
        (name for name in lines[-1] if name.startswith("phase/") and name.endswith("/lag_max_s")),
        key=lambda name: lines[-1][name],
        default="",
    )
    blamed = f", most of all in phase {phase.split('/')[1]!r}" if phase else ""
    return Advice(
        rule="lag",
        severity="hint",
        seen=f"the event loop was held for up to {seconds(max(longest))} at a time{blamed}",
        change="make that code async, or give it processes of its own (rollouts.workers)",
        metrics=("lag/held_max_s", "lag/max_s"),
    )


def engine_drift(lines: Sequence[Line]) -> Advice | None:
    """Trainer and generator compute different things."""
    apart = _typical(lines, "training/logprob_difference_fresh")
    if apart is None or apart < 0.05:
        return None
    return Advice(
        rule="engine_drift",
        severity="alarm",
        seen=f"trainer and generator differ by {apart:.3g} nats a token on the same weights",
        change="trainer.head_dtype and model.dtype float32, trainer.router_replay for mixtures of experts, or another "
        "generator.engine to compare with",
        metrics=("training/logprob_difference_fresh",),
    )


def weak_weights(lines: Sequence[Line]) -> Advice | None:
    """Few tokens carry a batch."""
    effective = _typical(lines, "training/effective_sample_share")
    if effective is None or effective > 0.5:
        return None
    return Advice(
        rule="weak_weights",
        severity="alarm",
        seen=f"importance weights are worth {share(effective)} of their tokens: batches are too old for this step size",
        change="a lower scheduling.max_staleness, or a lower trainer.learning_rate",
        metrics=("training/effective_sample_share", "training/ratio_max"),
    )


def failing_environment(lines: Sequence[Line]) -> Advice | None:
    """Rollouts end without a reward."""
    failed = _typical(lines, "rollout/failed_share")
    if failed is None or failed < 0.05:
        return None
    counts: dict[str, float] = {}
    for line in lines[-WINDOW:]:
        for name, count in line.items():
            if name.startswith("environment/") and "/failed/" in name and math.isfinite(count):
                environment, _, reason = name.removeprefix("environment/").rpartition("/failed/")
                counts[f"{environment}: {reason}"] = counts.get(f"{environment}: {reason}", 0) + count
    worst = max(counts, key=lambda name: counts[name], default="")
    named = f", most of them {worst}" if worst else ""
    return Advice(
        rule="failing_environment",
        severity="alarm",
        seen=f"{share(failed)} of rollouts ended without a reward{named}",
        change="mend the environment or its reward; for timeouts a higher rollouts.timeout_s",
        metrics=("rollout/failed_share",),
    )


RULES: Sequence[Rule] = (
    no_spread,
    entropy_collapse,
    engine_drift,
    weak_weights,
    failing_environment,
    length_drift,
    truncated,
    masked,
    starved_trainer,
    idle_engines,
    lag,
)
