"""What the engine's thread does next: one decision per iteration, a pure function of the inbox and the engine's state.

    close  before  reset, load  before  step  before  wait

Only under `drain` do new weights wait for running requests. A reset comes right before the load that calls for it: if
the engine refuses, the old weights keep serving over their own cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

WeightUpdate = Literal["hot_swap", "drain"]
KvCache = Literal["keep", "recompute", "reset_prefix"]


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """How new weights take over. See `GeneratorSettings`, which refuses what contradicts itself."""

    update: WeightUpdate = "hot_swap"
    kv_cache: KvCache = "keep"
    attempts: int = 4
    """Times that one version is tried before it counts as not installed; it is tried on, later each time."""
    backoff_s: float = 0.1
    """Pause before the second attempt; every further one is twice as long."""


DEFAULT_WEIGHT_POLICY = WeightPolicy()


@dataclass(frozen=True, slots=True)
class InboxState:
    """What waits for the engine's thread."""

    closing: bool = False
    staged_version: int | None = None
    """Version of the model state dict that lies ready to be copied."""
    arrivals: int = 0
    """Requests that the engine has not been given."""
    aborts: int = 0
    """With what else is passed on at once: interruptions, a seed."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the decision needs to know of the engine."""

    has_work: bool = False
    """Whether a step would do or return anything: requests wait or run, or chunks lie ready."""
    is_reset: bool = False
    """Whether its cache was reset since its last step."""


@dataclass(frozen=True, slots=True)
class Close:
    """End."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget cached keys and values; running requests, where there are any, are computed again."""


@dataclass(frozen=True, slots=True)
class Load:
    """Install the model state dict of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Step:
    """Pass on what arrived, unless it has to wait, then advance the engine by one iteration."""

    admit: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do until the inbox changes."""


Decision: TypeAlias = Close | Reset | Load | Step | Wait


def decide(inbox: InboxState, engine: EngineState, policy: WeightPolicy) -> Decision:
    """The one thing to do now.

    >>> decide(InboxState(staged_version=3, arrivals=9), EngineState(has_work=True), WeightPolicy())
    Load(version=3)
    >>> decide(InboxState(staged_version=3), EngineState(has_work=True), WeightPolicy("drain", "reset_prefix"))
    Step(admit=False)
    """
    if inbox.closing:
        return Close()
    if inbox.staged_version is not None:
        if policy.update == "drain" and engine.has_work:
            return Step(admit=False)
        if resets_before_load(policy, engine) and not engine.is_reset:
            return Reset()
        return Load(inbox.staged_version)
    return Step() if engine.has_work or inbox.aborts or inbox.arrivals else Wait()


def resets_before_load(policy: WeightPolicy, engine: EngineState) -> bool:
    """Whether the cache has to be forgotten before new weights come.

    Under `reset_prefix` running requests keep theirs; the engines' rule of reuse makes all that is older unreachable.
    """
    return policy.kv_cache == "recompute" or (policy.kv_cache == "reset_prefix" and not engine.has_work)
