"""Users' functions, which may be coroutine functions or not."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import TypeVar

ValueT = TypeVar("ValueT")


async def settled(value: ValueT | Awaitable[ValueT]) -> ValueT:
    """The value, awaited where it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def is_async(function: object) -> bool:
    """Whether calling it gives a coroutine; an object with an async `__call__` counts."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def is_async_environment(factory: object) -> bool:
    """Whether both methods are coroutines, read from the class without making an environment."""
    made = getattr(factory, "func", factory)  # of a functools.partial
    return all(inspect.iscoroutinefunction(getattr(made, method, None)) for method in ("reset", "step"))
