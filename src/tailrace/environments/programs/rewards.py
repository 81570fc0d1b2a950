"""What a program's rollout earned: a function of how it ended, or a file that it wrote."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from tailrace.environments.results import AgentResult
from tailrace.errors import InvalidReward
from tailrace.records import Json, Message, Reward, Task

REWARD_JSON, REWARD_TEXT = "reward.json", "reward.txt"
_MOST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """A program that ended by itself, for the function that scores it."""

    task: Task
    messages: list[Message]
    """The conversation of its latest request to the policy, the reply included."""
    folder_path: str
    status: int
    """Its exit status; negative for a signal, as in `subprocess`."""
    output: str
    """The end of what it printed: 64 KiB at most."""

    @property
    def folder(self) -> Path:
        """Its working folder, as it left it; removed after this."""
        return Path(self.folder_path)


ProgramReward: TypeAlias = Callable[
    [ProgramEnd], AgentResult | Reward | float | Awaitable[AgentResult | Reward | float]
]
"""Scores a program's rollout. A synchronous one runs in a worker process, unless its environment is `trusted`."""


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """`reward.json`, where it is more than a number."""

    reward: float
    metrics: dict[str, float] = {}
    info: dict[str, Json] = {}


_JSON: msgspec.json.Decoder[float | _Written] = msgspec.json.Decoder(float | _Written)


def read_reward(folder: Path) -> AgentResult | None:
    """What the program wrote into `reward.json` or, without it, `reward.txt`; None where there is neither.

    Raises `InvalidReward` for files that hold none.
    """
    if (written := _read(folder / REWARD_JSON)) is not None:
        try:
            decoded = _JSON.decode(written)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidReward(
                f"{REWARD_JSON}, which the program wrote, is neither a number nor an object with `reward`, `metrics` "
                f"and `info`: {error}"
            ) from error
        return (
            AgentResult(decoded.reward, decoded.metrics, decoded.info)
            if isinstance(decoded, _Written)
            else AgentResult(decoded)
        )
    if (written := _read(folder / REWARD_TEXT)) is not None:
        try:
            return AgentResult(float(written))
        except ValueError:
            raise InvalidReward(f"{REWARD_TEXT}, which the program wrote, is {written[:80]!r}, no number") from None
    return None


def _read(path: Path) -> bytes | None:
    """A plain file of bounded size: what else a program may have left there is not opened for long."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidReward(f"{path.name}, which the program wrote, cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise InvalidReward(f"{path.name}, which the program wrote, is no file of at most {_MOST_BYTES:,} bytes")
        return file.read(_MOST_BYTES)
