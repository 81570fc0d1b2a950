"""`asyncio.timeout` as Python 3.11.3 and newer have it, in every 3.11.

Before, one that ran out in a task that had been cancelled earlier, as in the clean-up after that, raised
`CancelledError` in place of `TimeoutError`, so that what had to follow, a kill or a last message, did not.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class _Timeout(asyncio.Timeout):  # type: ignore[misc]  # which is final
    async def __aenter__(self) -> _Timeout:
        task = asyncio.current_task()
        self._cancelled_before = task.cancelling() if task else 0
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        task = asyncio.current_task()
        if task and self.expired() and kind is asyncio.CancelledError and task.cancelling() <= self._cancelled_before:
            raise TimeoutError from error


def timeout(delay_s: float | None) -> asyncio.Timeout:
    """For so many seconds; None: for ever. Raises `TimeoutError` from its block."""
    return _Timeout(None if delay_s is None else asyncio.get_running_loop().time() + delay_s)


def timeout_at(when_s: float | None) -> asyncio.Timeout:
    """The same, until the event loop's clock says so."""
    return _Timeout(when_s)
