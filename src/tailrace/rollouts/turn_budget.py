"""What the turns of one rollout may cost: turns, tokens of all their branches, and the context of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.errors import BudgetExceeded
from tailrace.generation.settings import CONTEXT_IS
from tailrace.records import Rollout
from tailrace.rollouts.chat.conversations import BranchConversation


class TurnBudget:
    """Turns may run at once: what those that are sampled may still add is reserved for them."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        max_turns: int,
        max_rollout_tokens: int | None,
        max_model_tokens: int | None,
        row_tokens: int | None,
    ) -> None:
        self._rollout, self._row_tokens = rollout, row_tokens
        self._max_turns, self._max_rollout_tokens = max_turns, max_rollout_tokens
        self.max_model_tokens = max_model_tokens
        self._reserved_tokens = self._demonstrated_tokens = 0
        self._released = asyncio.Event()
        """Some of them are free again."""

    def require_turn(self) -> None:
        """Raises `BudgetExceeded` where none is left."""
        if self._rollout.turns >= self._max_turns:
            raise self._exhausted(f"all of its {self._max_turns} turns are used (rollouts.max_turns)")

    def completion_limit(self, conversation: BranchConversation, context_tokens: int, asked: int | None) -> int | None:
        """Tokens that a completion may have; None while it would have fewer for what others may still take.

        It follows `context_tokens` more of its branch, for at most `asked` tokens. Raises `BudgetExceeded`.
        """
        prompt = conversation.branch.num_tokens + context_tokens
        limits = [self._rollout.sampling.max_tokens]
        if asked is not None:
            limits.append(asked)
        if (context := self.max_model_tokens) is not None:
            if prompt >= context:
                raise self._exhausted(
                    f"a prompt of {prompt} tokens leaves no room in the context of {context} ({CONTEXT_IS})"
                )
            limits.append(context - prompt)
        if (most := self._max_rollout_tokens) is not None:
            used = self._rollout.num_tokens - self._demonstrated_tokens + context_tokens
            if used >= most:
                raise self._exhausted(f"its {used} tokens use up rollouts.max_rollout_tokens = {most}")
            limits.append(most - used)
            if self._reserved_tokens and most - used - self._reserved_tokens < min(limits):
                return None
        return min(limits)

    def demonstrate(self, num_tokens: int) -> None:
        """A demonstration is added to the rollout, beside what its turns may cost.

        Raises `ValueError` for one that the model, or a row of the trainer's, cannot hold.
        """
        if self.max_model_tokens is not None and num_tokens > self.max_model_tokens:
            raise ValueError(
                f"a demonstration of {num_tokens} tokens is longer than the context of {self.max_model_tokens} "
                f"({CONTEXT_IS})"
            )
        if self._row_tokens is not None and num_tokens > self._row_tokens:
            raise ValueError(
                f"a demonstration of {num_tokens} tokens does not fit a row of scheduling.row_tokens = "
                f"{self._row_tokens}"
            )
        self._demonstrated_tokens += num_tokens

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Keep what a completion may add from other turns while it is sampled."""
        self._reserved_tokens += tokens
        try:
            yield
        finally:
            self._reserved_tokens -= tokens
            self._released.set()

    async def release(self) -> None:
        """Wait until something that was reserved is free again."""
        self._released.clear()
        await self._released.wait()

    def _exhausted(self, why: str) -> BudgetExceeded:
        return BudgetExceeded(f"task {self._rollout.task.task_id}: no budget for another turn: {why}")
