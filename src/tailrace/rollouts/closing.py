"""Ends what rollouts were played with, each part by itself: some of it is users' code, which may fail or never end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

from tailrace.rollouts.attribution import text_of
from tailrace.rollouts.environment import LoadedEnvironment

Closing: TypeAlias = Callable[[], Awaitable[object]]

_logger = logging.getLogger(__name__)


class _Closable(Protocol):
    async def close(self) -> None: ...


def played_with(
    workers: _Closable,
    judges: Mapping[str, _Closable],
    environments: Mapping[str, LoadedEnvironment],
    gateway: _Closable | None,
) -> dict[str, Closing]:
    """What every process that plays and scores has to close, by its name."""
    parts: dict[str, Closing] = {"the rollout workers": workers.close}
    for name, judge in judges.items():
        parts[f"the judge of environment {name!r}"] = judge.close
    for name, environment in environments.items():
        if environment.spec.close is not None:
            parts[f"environment {name!r}"] = environment.spec.close
    if gateway is not None:
        parts["the gateway"] = gateway.close
    return parts


async def close_all(parts: Mapping[str, Closing]) -> None:
    """Close them all at once, by their names. What one raises is logged, and raised nowhere.

    Cancelling this cancels those that have not ended, and names them in the log with the line that they wait in.
    """
    async with asyncio.TaskGroup() as closing:
        for name, close in parts.items():
            closing.create_task(_close(name, close), name=f"close of {name}")


async def _close(name: str, close: Closing) -> None:
    try:
        await close()
    except asyncio.CancelledError as cancelled:
        own = asyncio.current_task()
        if own is None or not own.cancelling():  # nobody has cancelled this: what it awaits was
            _logger.error("%s could not be closed: it raised CancelledError", name, exc_info=cancelled)
            return
        _logger.error("the close of %s was given up before it had ended", name, exc_info=cancelled)
        raise
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # users' code may exit as well
        _logger.error("%s could not be closed: %s", name, text_of(error), exc_info=error)
