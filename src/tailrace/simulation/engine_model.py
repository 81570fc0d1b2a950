"""An engine as arithmetic: every running request gains one token per step, and nothing happens between events.

    add, abort ──→ EngineModel ──→ next_event_s: when to call `advance`, which says what finished
                        ↑
                   begin_load

A step takes `step_base_s + step_per_running_s * running`. Requests run in the order of arrival, while a slot and the
cache have room; one that starts, or starts again after it was preempted, prefills all that it holds, and the others
wait for that. Steps are counted in integers, so a request of n tokens takes n steps whatever happens around it, and the
cost of an event does not depend on the tokens between two of them. Pure: times are arguments.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tailrace.generation.engines.protocol import EngineStatistics
from tailrace.records import Int32Array
from tailrace.simulation.settings import EngineSettings

_ROUNDING = 1e-9
"""How far below a whole number of steps the quotient of two times may fall."""
_SPARE_SHARE = 0.02
"""Of the cache that admission leaves free, so that what starts is not preempted at once."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on the engine."""

    request_id: str
    context_tokens: int
    """Prompt and prefix."""
    length: int
    """Tokens that it will sample here."""
    sampled: int = 0
    """Tokens sampled before it was preempted."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """First step (exclusive) and last step (inclusive) of each time in a slot."""
    number: int = 0
    """In order of admission."""
    started_step: int = 0
    finish_step: int = 0

    @property
    def tokens(self) -> int:
        """Held when it (re)starts."""
        return self.context_tokens + self.sampled


class EngineModel:
    """One engine. Every method that takes `now_s` first needs `advance(now_s)` to have handled what is due."""

    def __init__(self, settings: EngineSettings, *, version: int = 0) -> None:
        self._settings = settings
        self._capacity = settings.kv_capacity_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._finishing: list[tuple[int, int, Sequence]] = []  # a heap; its entries may be outdated
        self._admitted = 0
        self._step = 0
        self._step_ended_s = 0.0
        """When step `_step` ended, and the prefill or load after it."""
        self._step_s = 0.0
        self._held_tokens = 0
        """Of running requests at step 0, extrapolated: at step n they hold `_held_tokens + n * running`."""
        self._started_steps = 0
        """Sum of the steps at which running requests started."""
        self._sampled_before = 0
        self._version_steps, self._versions = [0], [version]
        self._load: tuple[int, float] | None = None
        self.prefilled_tokens = 0
        self.loaded_s = 0.0
        """When the stall for the last weights ended."""

    # --- requests and weights ------------------------------------------------------------------------------------

    def add(self, request_id: str, *, context_tokens: int, length: int, now_s: float) -> None:
        """Accept a request that will sample `length` tokens, at least one."""
        self._catch_up(now_s)
        self._waiting.append(Sequence(request_id, context_tokens, length))

    def abort(self, request_id: str, now_s: float) -> Sequence | None:
        """Remove a request, with what it sampled; None where it is unknown (it may just have finished)."""
        self._catch_up(now_s)
        if (sequence := self._running.get(request_id)) is not None:
            self._stop(sequence)
            self._set_pace()
            return sequence
        for sequence in self._waiting:
            if sequence.request_id == request_id:
                self._waiting.remove(sequence)
                return sequence
        return None

    def begin_load(self, version: int, stall_s: float, now_s: float) -> None:
        """Install weights after the step in progress; then nothing runs for `stall_s`."""
        self._catch_up(now_s)
        self._load = (version, stall_s)

    # --- time ----------------------------------------------------------------------------------------------------

    def next_event_s(self) -> float:
        """When `advance` has something to do; infinite for never."""
        step = self._next_event_step()
        if step is None:
            return math.inf
        return self._step_ended_s + (step - self._step) * self._step_s

    def advance(self, now_s: float) -> list[Sequence]:
        """Handle every event up to `now_s`; the requests that finished, in order."""
        finished: list[Sequence] = []
        while (due_s := self.next_event_s()) <= now_s:
            step = self._next_event_step()
            assert step is not None
            self._step, self._step_ended_s = step, due_s
            finished += self._pop_finished()
            self._install()
            self._preempt()
            self._admit()
            self._set_pace()
        return finished

    def _next_event_step(self) -> int | None:
        """The step after which something changes; the one that ended last means now."""
        if not self._running:
            return self._step if self._load is not None or self._may_admit() else None
        if self._load is not None or self._may_admit():
            return self._step + 1
        while self._is_outdated(self._finishing[0]):
            heapq.heappop(self._finishing)
        step = self._finishing[0][0]
        if len(self._running) > 1:
            full = (self._capacity - self._held_tokens) // len(self._running) + 1
            step = min(step, max(full, self._step + 1))
        return step

    def _is_outdated(self, entry: tuple[int, int, Sequence]) -> bool:
        running = self._running.get(entry[2].request_id)
        return running is None or running.number != entry[1]

    def _catch_up(self, now_s: float) -> None:
        """Count the whole steps until now; the steps of an idle engine begin now."""
        if self._running:
            steps = self._whole_steps(now_s)
            self._step += steps
            self._step_ended_s += steps * self._step_s
        else:
            self._step_ended_s = max(now_s, self._step_ended_s)

    def _whole_steps(self, now_s: float) -> int:
        if not self._running or now_s <= self._step_ended_s:
            return 0
        return int((now_s - self._step_ended_s) / self._step_s + _ROUNDING)

    def _set_pace(self) -> None:
        self._step_s = self._settings.step_base_s + self._settings.step_per_running_s * len(self._running)

    # --- what changes after a step -------------------------------------------------------------------------------

    def _pop_finished(self) -> list[Sequence]:
        finished = []
        while self._finishing and self._finishing[0][0] <= self._step:
            entry = heapq.heappop(self._finishing)
            if not self._is_outdated(entry):
                self._stop(entry[2])
                finished.append(entry[2])
        return finished

    def _install(self) -> None:
        if self._load is None:
            return
        (version, stall_s), self._load = self._load, None
        self._version_steps.append(self._step)
        self._versions.append(version)
        self._step_ended_s += stall_s
        self.loaded_s = self._step_ended_s

    def _preempt(self) -> None:
        """While the cache is too full, the newest request loses its slot; it starts again first."""
        while len(self._running) > 1 and self.running_tokens > self._capacity:
            last = next(reversed(self._running.values()))
            self._stop(last)
            self._waiting.appendleft(last)

    def _may_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self._settings.slots:
            return False
        most = self._capacity * (1 - _SPARE_SHARE)
        return not self._running or self.running_tokens + self._waiting[0].tokens <= most

    def _admit(self) -> None:
        prefilled = 0
        while self._may_admit():
            sequence = self._waiting.popleft()
            prefilled += sequence.tokens
            self._admitted += 1
            sequence.number, sequence.started_step = self._admitted, self._step
            sequence.finish_step = self._step + sequence.length - sequence.sampled
            self._running[sequence.request_id] = sequence
            self._held_tokens += sequence.tokens - self._step
            self._started_steps += self._step
            heapq.heappush(self._finishing, (sequence.finish_step, sequence.number, sequence))
        self.prefilled_tokens += prefilled
        self._step_ended_s += prefilled * self._settings.prefill_s_per_token

    def _stop(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        self._held_tokens -= sequence.tokens - sequence.started_step
        self._started_steps -= sequence.started_step
        sampled = self._step - sequence.started_step
        sequence.sampled += sampled
        self._sampled_before += sampled
        if sampled:
            sequence.runs.append((sequence.started_step, self._step))

    # --- figures -------------------------------------------------------------------------------------------------

    def versions_of(self, sequence: Sequence) -> Int32Array:
        """The policy version of each token that a request sampled, installed at its step: [sampled]."""
        values: list[int] = []
        counts: list[int] = []
        for first, last in sequence.runs:
            index = bisect_right(self._version_steps, first) - 1
            changes = [step for step in self._version_steps[index + 1 :] if step < last]
            bounds = [first, *changes, last]
            values += self._versions[index : index + len(bounds) - 1]
            counts += [end - start for start, end in pairwise(bounds)]
        return np.repeat(np.asarray(values, np.int32), np.asarray(counts, np.int64))

    @property
    def is_loading(self) -> bool:
        """Whether weights wait for the step in progress to end."""
        return self._load is not None

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests without one."""
        return len(self._waiting)

    @property
    def running_tokens(self) -> int:
        """Tokens that running requests hold, prompts included."""
        return self._held_tokens + self._step * len(self._running)

    def statistics(self, now_s: float) -> EngineStatistics:
        """A snapshot."""
        return EngineStatistics(
            policy_version=self._versions[-1],
            running=self.running,
            waiting=self.waiting,
            running_tokens=self.running_tokens,
            kv_tokens=self.running_tokens,
            kv_capacity_tokens=self._capacity,
            steps_total=self._step,
            sampled_tokens_total=self.sampled_tokens(now_s),
            prefilled_tokens_total=self.prefilled_tokens,
        )

    def sampled_tokens(self, now_s: float) -> int:
        """Sampled since the start, by running requests too."""
        step = self._step + self._whole_steps(now_s)
        return self._sampled_before + step * len(self._running) - self._started_steps

    def open_tokens(self, now_s: float) -> int:
        """Those of requests that did not finish."""
        step = self._step + self._whole_steps(now_s)
        running = sum(sequence.sampled + step - sequence.started_step for sequence in self._running.values())
        return running + sum(sequence.sampled for sequence in self._waiting)
