from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.simulation.engine_model import EngineModel
from tailrace.simulation.settings import EngineSettings

BASE_S, PER_RUNNING_S, PREFILL_S = 1.0, 0.25, 0.01


def engine_settings(slots: int = 4, kv_capacity_tokens: int = 10**6) -> EngineSettings:
    return EngineSettings(
        replicas=1,
        slots=slots,
        step_base_s=BASE_S,
        step_per_running_s=PER_RUNNING_S,
        prefill_s_per_token=PREFILL_S,
        kv_capacity_tokens=kv_capacity_tokens,
    )


def run_to_end(engine: EngineModel) -> dict[str, float]:
    """When each request finished."""
    ended: dict[str, float] = {}
    while (due_s := engine.next_event_s()) != math.inf:
        ended |= {sequence.request_id: due_s for sequence in engine.advance(due_s)}
    return ended


def test_a_request_alone_takes_a_step_per_token_after_its_prefill() -> None:
    engine = EngineModel(engine_settings())
    engine.add("a", context_tokens=10, length=8, now_s=5.0)
    assert run_to_end(engine) == {"a": pytest.approx(5.0 + 10 * PREFILL_S + 8 * 1.25)}


def test_requests_share_the_steps_and_the_shorter_one_leaves_first() -> None:
    engine = EngineModel(engine_settings())
    for name, length in (("short", 2), ("long", 6)):
        engine.add(name, context_tokens=0, length=length, now_s=0.0)
    assert run_to_end(engine) == {"short": pytest.approx(2 * 1.5), "long": pytest.approx(2 * 1.5 + 4 * 1.25)}


def test_a_request_waits_for_a_slot_in_the_order_of_arrival() -> None:
    engine = EngineModel(engine_settings(slots=1))
    for name in ("first", "second", "third"):
        engine.add(name, context_tokens=0, length=2, now_s=0.0)
    assert engine.waiting == 3
    assert run_to_end(engine) == {"first": 2.5, "second": 5.0, "third": 7.5}


def test_tokens_carry_the_version_of_their_step_when_weights_change_in_between() -> None:
    engine = EngineModel(engine_settings(), version=3)
    engine.add("a", context_tokens=0, length=5, now_s=0.0)
    assert engine.advance(2.0) == []
    engine.begin_load(4, stall_s=10.0, now_s=2.0)  # in the middle of the second step
    (finished,) = engine.advance(1000.0)
    assert engine.versions_of(finished).tolist() == [3, 3, 4, 4, 4]
    assert engine.loaded_s == pytest.approx(2 * 1.25 + 10.0)
    assert engine.next_event_s() == math.inf


def test_what_an_aborted_request_sampled_is_handed_back() -> None:
    engine = EngineModel(engine_settings())
    engine.add("a", context_tokens=0, length=100, now_s=0.0)
    engine.advance(6.3)
    aborted = engine.abort("a", 6.3)
    assert aborted is not None
    assert aborted.sampled == 5
    assert engine.versions_of(aborted).tolist() == [0] * 5
    assert engine.abort("a", 6.3) is None
    assert (engine.running, engine.running_tokens, engine.next_event_s()) == (0, 0, math.inf)


def test_a_full_cache_preempts_the_newest_request_which_loses_time_and_no_token() -> None:
    engine = EngineModel(engine_settings(kv_capacity_tokens=20))
    for name in ("old", "new"):
        engine.add(name, context_tokens=5, length=10, now_s=0.0)
    ended = run_to_end(engine)
    assert ended["old"] < ended["new"]
    assert engine.prefilled_tokens == 5 + 5 + (5 + 6)  # six tokens each were sampled as the cache was over-full


@dataclass
class TokenByToken:
    """The same engine, one loop per step: what `EngineModel` must come to."""

    slots: int
    capacity: int
    now_s: float = 0.0
    version: int = 0
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    loading: tuple[int, float] | None = None

    def until(self, now_s: float) -> None:
        """Run every step that ends by then."""
        while True:
            if not self.running:
                self.now_s = max(self.now_s, now_s if not (self.loading or self.waiting) else self.now_s)
                if self.now_s > now_s or not (self.loading or self.waiting):
                    return
                self.change()
                continue
            end_s = self.now_s + BASE_S + PER_RUNNING_S * len(self.running)
            if end_s > now_s:
                return
            self.now_s = end_s
            for name in self.running:
                self.left[name] -= 1
                self.held[name] += 1
                self.versions[name].append(self.version)
            for name in [name for name in self.running if self.left[name] == 0]:
                self.running.remove(name)
                self.ended[name] = end_s
            self.change()

    def change(self) -> None:
        if self.loading:
            self.version, stall_s = self.loading
            self.now_s, self.loading = self.now_s + stall_s, None
        while len(self.running) > 1 and sum(self.held[name] for name in self.running) > self.capacity:
            self.waiting.insert(0, self.running.pop())
        while self.waiting and len(self.running) < self.slots:
            tokens = sum(self.held[name] for name in (*self.running, self.waiting[0]))
            if self.running and tokens > self.capacity * 0.98:
                break
            self.running.append(self.waiting.pop(0))
            self.now_s += PREFILL_S * self.held[self.running[-1]]

    def add(self, name: str, context_tokens: int, length: int, now_s: float) -> None:
        if not self.running and not self.waiting and not self.loading:
            self.now_s = max(self.now_s, now_s)
        self.waiting.append(name)
        self.left[name], self.held[name], self.versions[name] = length, context_tokens, []


OPERATION = st.tuples(
    st.sampled_from(["add", "add", "add", "load", "abort"]), st.integers(0, 9), st.integers(0, 12), st.integers(1, 30)
)


@given(st.lists(OPERATION, max_size=25), st.integers(1, 4), st.sampled_from([40, 100, 10**6]))
@settings(max_examples=300, deadline=None)
def test_events_come_to_what_stepping_token_by_token_does(
    operations: list[tuple[str, int, int, int]], slots: int, capacity: int
) -> None:
    engine = EngineModel(engine_settings(slots, capacity))
    reference = TokenByToken(slots, capacity)
    now_s, ended, versions = 0.0, dict[str, float](), dict[str, list[int]]()

    def advance(now_s: float) -> None:
        while (due_s := engine.next_event_s()) <= now_s:
            for sequence in engine.advance(due_s):
                ended[sequence.request_id] = due_s
                versions[sequence.request_id] = engine.versions_of(sequence).tolist()

    for number, (kind, gap, context_tokens, length) in enumerate(operations):
        now_s += gap * 0.7713 + 0.00137  # falls on no step's end
        advance(now_s)
        reference.until(now_s)
        assert engine.running == len(reference.running)
        if kind == "add":
            engine.add(str(number), context_tokens=context_tokens, length=length, now_s=now_s)
            reference.add(str(number), context_tokens, length, now_s)
        elif kind == "load":
            engine.begin_load(number, stall_s=length * 0.1, now_s=now_s)
            reference.loading = (number, length * 0.1)
        elif reference.running:
            name = reference.running.pop(length % len(reference.running))
            aborted = engine.abort(name, now_s)
            assert aborted is not None
            assert aborted.sampled == len(reference.versions[name])
            assert engine.versions_of(aborted).tolist() == reference.versions[name]
            return  # an abort shortens the step in progress, which the reference does not
    advance(1e6)
    reference.until(1e6)
    assert ended == pytest.approx(reference.ended)
    assert versions == {name: reference.versions[name] for name in reference.ended}
    assert engine.sampled_tokens(1e6) == sum(map(len, reference.versions.values()))
