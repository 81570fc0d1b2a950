"""The trainer of a run, over all its lives: every rank, and what joins them to the orchestrator.

    ranks started ─► TrainerStarted ─► trains ─► one rank ends early ─► all are ended ─► started again, or the run fails
                     batches since the checkpoint: sent again

A life begins at the newest checkpoint, and has sockets of its own: nothing that an earlier one sent is taken for its.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.config import RunSettings
from tailrace.errors import LifecycleError, TailraceError, TrainingError, TransportError
from tailrace.lifecycle.exit_codes import is_from_outside
from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.restarts import EarlyEnd, RestartHistory
from tailrace.records import RunStatus
from tailrace.run.scheduler_states import SchedulerStates
from tailrace.run.trainer_ranks import launched_rank
from tailrace.transport.batches.channels import ChannelBatchSender
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.payloads.accounts import PayloadAccounts

if TYPE_CHECKING:
    from tailrace.run.started_roles import RoleStarter

_logger = logging.getLogger(__name__)


def describe_lives(settings: RunSettings) -> list[str]:
    """For people: why a trainer that ends early is not started again, or only at times, where restarts are granted."""
    if not settings.restarts.per_role or settings.trainer.feed == "stream":
        return []
    if launched_rank(settings.trainer) is not None:
        return ["A trainer that ends early ends the run: another launcher started its ranks."]
    if settings.generator.return_routed_experts:
        return [
            "A trainer that ends early is started again while its batches since the last checkpoint, with their routed "
            f"experts, come to restarts.retained_mb = {settings.restarts.retained_mb:g} at most."
        ]
    return []


class RunTrainer(ABC):
    """The trainer of a run, as its owner knows it: ours over all its lives, or one that is not ours."""

    restarts: int
    """How often it was started again."""
    has_answered = False
    """Whether it told how training ended, ahead of the terminal record, which then comes within a time of its own."""

    def __init__(self) -> None:
        self._gone: asyncio.Future[TailraceError] = asyncio.get_running_loop().create_future()

    @property
    def is_loading(self) -> bool:
        """Whether it hears no request to stop yet, and has nothing to save: a life of it loads, or is yet to come."""
        return False

    async def watch(self) -> NoReturn:
        """Wait until the trainer ended early and is not started again, and raise why."""
        raise await self.gone()

    async def gone(self) -> TailraceError:
        """Wait until there is no trainer any more, and none will come; why."""
        return await asyncio.shield(self._gone)

    def started(self, step: int) -> None:  # noqa: B027 - one that is not ours said so itself
        """A life of the trainer holds the weights of this step."""

    def step_ended(self, step: int, version: int) -> None:  # noqa: B027 - one that is not ours numbers its versions
        """After this step the policy has this version, for the first time: later lives number it alike."""

    @abstractmethod
    def saved(self, step: int) -> None:
        """A checkpoint contains this step."""

    @abstractmethod
    def earliest_step(self, step: int) -> int:
        """Of which a checkpoint may be begun once the trainer has done `step`: it may have to do later ones again."""

    def state_at(self, states: SchedulerStates, step: int) -> bytes:
        """The scheduler's, where the trainer goes on after `step`. Raises `CheckpointError`."""
        return states.read(step)

    def published(self) -> None:  # noqa: B027 - of one that is not ours, the store keeps the newest
        """The newest weights are those of the life that trains: nobody needs those of earlier ones."""

    @abstractmethod
    def let_end(self, status: RunStatus = RunStatus.FINISHED) -> None:
        """Training is about to end, so that the run has this status: the trainer is not started again.

        Where the run is cancelled or fails, nothing that comes after training is waited for.
        """

    @abstractmethod
    async def end_feed(self) -> None:
        """Hand over nothing more: whoever waits for it learns so. Twice does nothing."""

    async def leave(self) -> None:  # noqa: B027 - nobody here waits for one that is not ours
        """The event log has ended, and the trainer leaves by itself."""

    async def kill(self) -> None:  # noqa: B027 - of one that is not ours, nobody here holds a process
        """End every rank at once. Raises `LifecycleError` where the system holds one."""

    @abstractmethod
    async def close(self) -> None:
        """Watch no more. Closing twice does nothing."""


class TrainerLives(RunTrainer):
    """Make it on a running event loop; it starts the trainer."""

    def __init__(self, starter: RoleStarter, log: MemoryEventLog, restarts: RestartHistory) -> None:
        super().__init__()
        self.restarts = 0
        self._starter, self._log, self._history = starter, log, restarts
        self.batches = starter.transports.batch_sender()  # before there is a trainer that looks for them
        self._end_log = starter.transports.serve_log(log)
        self._ranks = starter.start_trainer()
        self._is_over = False
        self._newest_begun = -1
        """The newest life that told of its start; -1 before there is one."""
        self._saved_step = 0
        """Of the newest checkpoint that it told of."""
        self._first_kept_life = 0
        """Before which none has weights that are needed: what the last one published may be on its way through the log
        until the next one starts."""
        self._keeping = asyncio.create_task(self._keep(), name="lives of the trainer")

    # --- what its owner waits for ------------------------------------------------------------------------------------

    @property
    @override
    def is_loading(self) -> bool:
        """Ranks of another launcher are not killed with rank 0: they, too, need its word that training has ended."""
        return self._starter.launched is None and self._newest_begun < self.restarts

    def keep(self, payloads: PayloadAccounts) -> None:
        """What batches refer to stays with them, for as long as they may be trained again."""
        if isinstance(self.batches, ChannelBatchSender):
            self.batches.payloads = payloads

    # --- what its owner learns from the event log --------------------------------------------------------------------

    @override
    def started(self, step: int) -> None:
        """It is sent what is kept of later steps."""
        self._newest_begun = self.restarts
        self._saved_step = max(step, self._saved_step)
        if not self.restarts:
            return
        self._first_kept_life = self.restarts
        assert isinstance(self.batches, ChannelBatchSender)
        try:
            count = self.batches.resume_after(step)
        except TransportError as error:
            lost = f"the trainer ended, and cannot go on after step {step}: {error} (restarts.retained_mb)"
            self._give_up(LifecycleError(lost))
        else:
            _logger.info("the trainer goes on after step %d, with %d batches that are sent again", step, count)

    @override
    def step_ended(self, step: int, version: int) -> None:
        if isinstance(self.batches, ChannelBatchSender):
            self.batches.step_ended(step, version)

    @override
    def saved(self, step: int) -> None:
        self._saved_step = max(step, self._saved_step)
        if isinstance(self.batches, ChannelBatchSender):
            self.batches.saved(step)

    @override
    def earliest_step(self, step: int) -> int:
        """It writes one while steps go on, which another machine may not see before it is told."""
        return min(step, self._saved_step)

    @override
    def published(self) -> None:
        if self._first_kept_life:
            self._starter.forget_weights(self._first_kept_life)
            self._first_kept_life = 0

    @override
    def let_end(self, status: RunStatus = RunStatus.FINISHED) -> None:
        self._is_over = True

    # --- its end -----------------------------------------------------------------------------------------------------

    @override
    async def end_feed(self) -> None:
        await self.batches.close()

    @override
    async def leave(self) -> None:
        """The launcher ends it if it doesn't in time. One that loads would not hear that there is nothing to do."""
        self._is_over = True
        try:
            if self.is_loading and not self._log.has_ended:  # after its terminal record it leaves by itself
                await self.kill()
        finally:  # ranks that are there hear by it that they may leave
            for rank in self._ranks:
                rank.expect_exit()
            await self._end_log()
        await asyncio.gather(*(rank.left() for rank in self._ranks if rank.is_running))

    @override
    async def kill(self) -> None:
        self._is_over = True
        await asyncio.gather(*(rank.kill() for rank in self._ranks))

    @override
    async def close(self) -> None:
        await cancelled(self._keeping)

    # --- lives -------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Waits for a rank to end; ends when the trainer is not started again."""
        try:
            while (pause_s := self._pause_s(rank := await self._first_to_leave())) is not None:
                self.restarts += 1
                _logger.warning("the trainer is started again: %s", rank.early_exit())
                await self._end_life()
                await asyncio.sleep(pause_s)
                if self._is_over:
                    break
                self._end_log = self._starter.transports.serve_log(self._log)
                self._ranks = self._starter.start_trainer(self._ranks)
            self._give_up(self._failure or rank.early_exit())
        except LifecycleError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 - of any kind: without a keeper nobody would miss the trainer
            self._give_up(LifecycleError(f"the trainer cannot be started again: {error}"))

    async def _first_to_leave(self) -> RoleHandle:
        """A rank that was killed before others that it left without a peer."""
        leaving = {asyncio.ensure_future(rank.left()) for rank in self._ranks}
        try:
            await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in leaving:
                one.cancel()
        left = [rank for rank in self._ranks if not rank.is_running]
        return min(left, key=lambda rank: rank.status if rank.status is not None else 0)

    def _pause_s(self, rank: RoleHandle) -> float | None:
        """Before the next life; None where there is none: training is over, or the trainer ended too often."""
        if self._is_over or self._log.has_ended or self._failure is not None:
            return None
        by_itself = rank.status is not None and not is_from_outside(rank.status)
        end = EarlyEnd(asyncio.get_running_loop().time(), has_worked=self._newest_begun >= 0, by_itself=by_itself)
        return self._history.next_pause_s(end)

    @property
    def _failure(self) -> TrainingError | None:
        """What the run is to fail for; a rank may have asked for it, whose own error would come again."""
        if (stop := self._log.stop) is None or stop.status is not RunStatus.FAILED:
            return None
        return TrainingError(f"{stop.role}: {stop.reason}")

    async def _end_life(self) -> None:
        """End all ranks and their sockets, and make new ones."""
        await asyncio.gather(*(rank.kill() for rank in self._ranks))
        await self._end_log()
        await self._starter.end_trainer_life(self.batches)

    def _give_up(self, why: TailraceError) -> None:
        if not self._gone.done():
            self._gone.set_result(why)
