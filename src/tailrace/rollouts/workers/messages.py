"""Messages between the orchestrator and its rollout workers: length-prefixed msgpack over pipes, never pickle.

orchestrator ── Hello, then one call at a time ──► worker        stdin
orchestrator ◄── one Answer per call, in order ─── worker        stdout
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from tailrace.environments import ProgramEnd
from tailrace.environments.named_rewards import ScoredRollout, TrainerState
from tailrace.guards import guarded
from tailrace.records import DEEPEST, Message, Task, is_too_deep

LENGTH_BYTES = 4
"""Of the length, little-endian, in front of every message."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message: where modules are found, and the settings (JSON) of every environment by name."""

    module_path: list[str]
    environments: dict[str, str]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load an environment from its settings."""

    environment: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """Make an environment, reset it, and step it through `replies` that it has answered before; answers the last."""

    instance: int
    task: Task
    replies: list[Message]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Step an open environment."""

    instance: int
    reply: Message


class EndEarly(msgspec.Struct, frozen=True, tag=True):
    """Tell an open environment that turns or tokens ran out."""

    instance: int


class ReadAttributes(msgspec.Struct, frozen=True, tag=True):
    """Attributes of an open environment; of the `optional` ones those that it has."""

    instance: int
    names: list[str]
    optional: list[str]


class Score(msgspec.Struct, frozen=True, tag=True):
    """Call the environment's reward function."""

    task: Task
    messages: list[Message]


class ScoreProgram(msgspec.Struct, frozen=True, tag=True):
    """Call the reward function of the environment's program."""

    end: ProgramEnd


class ScoreNamed(msgspec.Struct, frozen=True, tag=True):
    """Call some of the environment's named reward functions with rollouts of one task; answers what each returned."""

    task: Task
    rollouts: list[ScoredRollout]
    names: list[str]
    state: TrainerState


Call: TypeAlias = Load | Open | Step | EndEarly | ReadAttributes | Score | ScoreProgram | ScoreNamed


class Request(msgspec.Struct, frozen=True):
    """A call, and the environments that have been closed since the last one."""

    call: Call
    closed: list[int]


class Answer(msgspec.Struct, frozen=True):
    """What a call returned, or what user code raised, with its traceback."""

    value: Any = None
    failure: str | None = None
    is_mistake: bool = False
    """Of the failure: see `RolloutError`."""


def pack(message: Hello | Request | Answer) -> bytes:
    """A message with its length in front. Raises `TypeError` for a value that is not JSON-friendly."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def plain_value(value: Any) -> Any:
    """NumPy numbers and arrays, numbers of other classes, and mappings that are not dicts, as what msgpack knows."""
    if isinstance(value, Mapping):
        return dict(value)
    for convert in ("tolist", "item"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a {type(value).__name__} cannot leave a worker process; use numbers, text, lists and dicts")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain_value)

_MessageT = TypeVar("_MessageT", bound=msgspec.Struct)


class MessageDecoder(Generic[_MessageT]):
    """Of one kind of message."""

    def __init__(self, kind: type[_MessageT]) -> None:
        self._decoder: msgspec.msgpack.Decoder[_MessageT] = msgspec.msgpack.Decoder(kind)

    def decode(self, body: bytes) -> _MessageT:
        """Raises `CorruptData` for what is none, or has a value nested too deep to be passed on."""
        with guarded("what came through a worker's pipe is no message"):
            message = self._decoder.decode(body)
            if isinstance(message, Answer) and is_too_deep(message.value):
                raise ValueError(f"its value nests deeper than {DEEPEST} levels")
            return message


hello_decoder = MessageDecoder(Hello)
request_decoder = MessageDecoder(Request)
answer_decoder = MessageDecoder(Answer)
