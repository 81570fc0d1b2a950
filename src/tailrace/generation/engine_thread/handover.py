"""What the threads around an engine pass to each other: results for an event loop, and prepared weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Waiter(Generic[ResultT]):
    """A future of some event loop, to be resolved from another thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[ResultT]

    @classmethod
    def on_current_loop(cls) -> Waiter[ResultT]:
        """On the running event loop."""
        loop = asyncio.get_running_loop()
        return cls(loop, loop.create_future())

    def resolve(self, result: ResultT) -> None:
        """Give the result, unless the caller went away."""
        post(self.loop, _set_result, self.future, result)

    def fail(self, error: Exception) -> None:
        """Raise the error in the caller, unless it went away."""
        post(self.loop, _set_error, self.future, error)


class Staged:
    """A model state dict that is ready. The engine's thread installs it and reports how that went."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self.tensors, self.version = tensors, version
        self.error: Exception | None = None
        self._settled = threading.Event()

    def settle(self, error: Exception | None = None) -> None:
        """The tensors are not needed any more: installed, or not, and why."""
        self.error, self.tensors = error, {}
        self._settled.set()

    def wait(self) -> None:
        """Until it is settled."""
        self._settled.wait()


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    """Run `callback` on the loop; a closed loop is ignored."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _set_result(future: asyncio.Future[ResultT], result: ResultT) -> None:
    """Set it, unless the future is done."""
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[ResultT], error: Exception) -> None:
    """Set it, unless the future is done."""
    if not future.done():
        future.set_exception(error)
