"""What a run's trace and rollouts say of its engines and its trainer: who held a slot when, and how long steps took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.reporting.sinks import read_jsonl, read_rollouts

FloatArray = NDArray[np.float64]

MICROSECONDS = 1e-6
LEAST_TOKENS = 20
"""Of a completion whose time per token says something."""


class Level:
    """How many of some intervals hold at each time: a step function that is 0 before the first of them."""

    def __init__(self, begins_s: FloatArray, ends_s: FloatArray) -> None:
        times_s = np.concatenate([begins_s, ends_s])
        order = np.argsort(times_s, kind="stable")
        changes = np.concatenate([np.ones(len(begins_s)), -np.ones(len(ends_s))])
        self._times_s, self._values = times_s[order], np.cumsum(changes[order])
        self._sums = np.concatenate([[0.0], np.cumsum(self._values[:-1] * np.diff(self._times_s))])

    def mean(self, begins_s: FloatArray, ends_s: FloatArray) -> FloatArray:
        """Over each of the times given: [times]."""
        mean: FloatArray = (self._sum_until(ends_s) - self._sum_until(begins_s)) / (ends_s - begins_s)
        return mean

    def _sum_until(self, times_s: FloatArray) -> FloatArray:
        index = np.searchsorted(self._times_s, times_s, side="right") - 1
        last = np.maximum(index, 0)
        sums = self._sums[last] + self._values[last] * (times_s - self._times_s[last])
        return np.where(index < 0, 0.0, sums)


@dataclass(frozen=True)
class Requests:
    """Completions of one replica; arrays are [completions], times of the clock that all processes share."""

    begins_s: FloatArray
    """When they got a slot."""
    first_tokens_s: FloatArray
    ends_s: FloatArray
    tokens: FloatArray

    @property
    def running(self) -> Level:
        """How many held a slot."""
        return Level(self.begins_s, self.ends_s)


@dataclass(frozen=True)
class RunTimes:
    """Of one run that finished."""

    replicas: list[Requests]
    trained_s: FloatArray  # [steps, 2]
    """Begin and end of each optimizer step."""
    asked_s: FloatArray  # [steps]
    """When the trainer began to wait for each batch."""
    sent_s: FloatArray  # [steps]
    """When each batch was there."""
    installed_s: FloatArray
    """When new weights took over, on any replica, sorted."""
    metrics: list[dict[str, Any]]
    """Of each step."""
    folder: Path

    def slots_used(self, begin_s: float, end_s: float) -> float:
        """Mean of the slots taken, of all replicas."""
        times = np.array([begin_s]), np.array([end_s])
        return float(sum(one.running.mean(*times)[0] for one in self.replicas))

    @property
    def between_steps_s(self) -> float:
        """Mean time from the end of an optimizer step to the next one's begin, less the wait for its batch."""
        at_hand_s = np.maximum(self.asked_s, self.sent_s)[1:]
        return float((self.asked_s[1:] - self.trained_s[:-1, 1] + self.trained_s[1:, 0] - at_hand_s).mean())

    @property
    def install_s(self) -> float:
        """Mean time from the end of an optimizer step until a replica goes on with its weights."""
        step = np.searchsorted(self.trained_s[:, 1], self.installed_s) - 1
        return float((self.installed_s - self.trained_s[step, 1]).mean())

    def steps_of_engines(self, begin_s: float, end_s: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of completions between the two times: seconds per token, mean number of running requests, tokens."""
        parts = []
        for one in self.replicas:
            kept = (one.tokens >= LEAST_TOKENS) & (one.first_tokens_s >= begin_s) & (one.ends_s <= end_s)
            begins_s, ends_s, tokens = one.first_tokens_s[kept], one.ends_s[kept], one.tokens[kept]
            parts.append(((ends_s - begins_s) / (tokens - 1), one.running.mean(begins_s, ends_s), tokens))
        step_s, running, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
        return step_s, running, tokens


def read_times(folder: Path) -> RunTimes:
    """From a run's folder. Exits where a reply was not as long as drawn."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    names = sorted(name for name in processes.values() if name.startswith("generator"))
    asked = [(processes[span["pid"]], span) for span in spans if span["name"] == "request"]
    columns = _columns(folder)
    return RunTimes(
        replicas=[_requests([span for process, span in asked if process == name], columns) for name in names],
        trained_s=np.array(_times_of("train", spans)),
        asked_s=np.array(_times_of("wait_for_batch", spans))[:, 0],
        sent_s=np.array(_times_of("send_batch", spans))[:, 1],
        installed_s=np.array(_times_of("change_weights", spans))[:, 1],
        metrics=[*read_jsonl(folder / "metrics.jsonl")],
        folder=folder,
    )


def _columns(folder: Path) -> dict[str, dict[str, Any]]:
    """What the agent saved of each rollout."""
    found = {}
    for rollout in read_rollouts(folder / "rollouts"):
        if rollout.completion_tokens != rollout.columns["drawn"]:
            raise SystemExit(f"{rollout.rollout_id} sampled {rollout.completion_tokens} tokens: {rollout.columns}")
        found[rollout.rollout_id] = dict(rollout.columns)
    return found


def _times_of(name: str, spans: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    return sorted(_times(span) for span in spans if span["name"] == name)


def _times(span: dict[str, Any]) -> tuple[float, float]:
    return span["ts"] * MICROSECONDS, (span["ts"] + span["dur"]) * MICROSECONDS


def _requests(spans: Sequence[dict[str, Any]], columns: dict[str, dict[str, Any]]) -> Requests:
    rows = []
    for span in spans:
        about = columns[span["args"]["request"].partition("/0/")[0]]
        end_s = _times(span)[1]
        first_s = end_s - about["decode_s"]
        rows.append((first_s - about["time_to_first_token_s"] + about["queue_s"], first_s, end_s, about["drawn"]))
    return Requests(*np.array(rows, float).T)
