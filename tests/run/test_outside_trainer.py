"""Whole runs that feed a trainer which is not ours: what it tells is what the run's files say.

All is in this process, the trainer and its stream of samples, too, which settings would refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typing_extensions import override

import tailrace
from tailrace.config import RunSettings
from tailrace.errors import PeerGone, SettingsError
from tailrace.records import (
    CheckpointSaved,
    CheckpointWritten,
    FeedReport,
    FeedSample,
    ModelStateDictPublished,
    ModelStateDictRef,
    RunStatus,
    SamplesWanted,
    StepDone,
    StopRequested,
    TerminalState,
    TrainerEnded,
    TrainingBegan,
    TrainingOver,
    WeightsOffered,
    WeightsWritten,
)
from tailrace.reporting.summary import RunSummary
from tailrace.run import started_roles
from tailrace.run.generators import Generators
from tailrace.run.memory_transports import MemoryTransports
from tailrace.run.outside_trainer import OutsideTrainer
from tailrace.run.training import train
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.run.runs import records, rollouts, trained_tasks
from tests.support.event_files import read_events
from tests.support.memory_samples import MemorySampleReceiver, MemorySampleStream

QUICKSTART = Path(tailrace.__file__).parent / "recipes" / "models" / "quickstart"
VOCABULARY = 640
SIZES = [4, 6, 2, 8]
"""Samples of each step, where 4 were configured."""
PATIENCE_S = 60.0


def settings(name: str = "run", **changes: object) -> RunSettings:
    table: dict[str, object] = {
        "name": name,
        "placement": "inline",
        "model": {"name": "bundled:quickstart"},
        "environments": [
            {"name": "tests.support.run_environments:words", "args": {"count": 20, "held_out": 0}},
        ],
        "rollouts": {"group_size": 2, "max_tokens": 6, "max_turns": 1},
        "scheduling": {"batch_size": 4, "filter_zero_spread": False, "max_staleness": 10},
        "generator": {"max_cache_tokens": 512, "slots": 8},
        "trainer": {"feed": "stream"},
        "observability": {"live": "off", "report": False},
    }
    return RunSettings.model_validate({**table, **changes})


class Trainer:
    """A trainer of one rank: its steps change nothing, but that the head of its weights is 0 from the first on."""

    def __init__(self, samples: MemorySampleStream, folder: Path) -> None:
        self.rank: MemorySampleReceiver = samples.join("rank-0")
        self.folder = folder
        self.taken: list[list[FeedSample]] = []
        self.stop: StopRequested | None = None

    async def begin(self, step: int = 0) -> None:
        await self.rank.report(TrainingBegan(consumer="rank-0", step=step, version=step))
        if step:
            await self.write_weights(step)

    async def pull(self, count: int) -> list[FeedSample]:
        samples: list[FeedSample] = []
        await self.rank.report(SamplesWanted(consumer="rank-0", samples=count))
        while len(samples) < count:
            pulled = await self.rank.pull(count - len(samples))
            if isinstance(pulled, StopRequested):
                self.stop = pulled
                break
            samples += pulled
        return samples

    async def step(self, number: int, samples: list[FeedSample], version: int | None = None) -> None:
        """It made the weights of its number, or left those of `version`."""
        self.taken.append(samples)
        ids = tuple(one.sample_id for one in samples)
        metrics = {"training/loss": 0.5, "mine": float(number), "broken": math.nan}
        told = number if version is None else version
        await self.rank.report(StepDone(consumer="rank-0", step=number, version=told, sample_ids=ids, metrics=metrics))
        if version is None:
            await self.write_weights(number)

    async def write_weights(self, version: int) -> None:
        folder = self.folder / f"version_{version}"
        await asyncio.to_thread(write_uniform, folder)
        await self.rank.report(WeightsWritten(consumer="rank-0", version=version, folder=str(folder)))

    async def end(self, status: RunStatus = RunStatus.FINISHED, reason: str = "enough") -> None:
        await self.rank.report(TrainingOver(consumer="rank-0", status=status, reason=reason))


def write_uniform(folder: Path) -> None:
    """Weights under which every token is as likely as any other, in two files as large models have them."""
    tensors = load_file(QUICKSTART / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in tensors:
            tensors[name] = tensors[name] * 0
    names = sorted(tensors)
    folder.mkdir(parents=True)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number:05d}-of-00002.safetensors")


async def run_with(
    parent: Path, program: Callable[[MemorySampleStream], Awaitable[None]], **changes: object
) -> RunSummary:
    samples = MemorySampleStream()

    async def play() -> None:
        with contextlib.suppress(PeerGone):  # the run ended first
            await program(samples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tailrace.run.training.require_own_process", lambda settings: None)
        patch.setattr(MemoryTransports, "sample_sender", lambda transports: samples)
        async with asyncio.timeout(240), asyncio.TaskGroup() as playing:
            trainer = playing.create_task(play())
            summary = await train(settings(**changes), parent)
            trainer.cancel()
    return summary


class Fed:
    """A run of some steps, and what its trainer saw."""

    def __init__(self, parent: Path) -> None:
        self.folder = parent / "run"
        self.trainer: Trainer
        # of steps after the second one every token is of weights that the trainer wrote
        scheduling = {"batch_size": 4, "filter_zero_spread": False, "max_staleness": 1}
        self.summary = asyncio.run(run_with(parent, self._train, scheduling=scheduling, observability={"live": "off"}))

    async def _train(self, samples: MemorySampleStream) -> None:
        self.trainer = trainer = Trainer(samples, self.folder / "weights")
        await trainer.begin()
        for number, size in enumerate(SIZES, 1):
            await trainer.step(number, await trainer.pull(size))
        await trainer.rank.report(CheckpointSaved(consumer="rank-0", step=4, path="elsewhere/step_4"))
        await trainer.end()


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Fed:
    return Fed(tmp_path_factory.mktemp("fed"))


def test_the_run_ends_as_its_trainer_says(fed: Fed) -> None:
    assert (fed.summary.status, fed.summary.exit_code, fed.summary.reason) == (RunStatus.FINISHED, 0, "enough")
    assert (fed.summary.steps, fed.summary.policy_version) == (4, 4)
    assert fed.summary.checkpoint_path == "elsewhere/step_4"
    assert (fed.summary.cpu_s, fed.summary.tokens_per_cpu_s) == (None, None)  # its trainer's is not known here
    assert (fed.folder / "report.html").is_file()
    events = read_events(fed.folder / "events.jsonl")
    assert [event.step for event in events if isinstance(event, CheckpointWritten)] == [4]


def test_every_rollout_has_one_end_and_the_figures_are_those_of_the_steps(fed: Fed) -> None:
    ledger = fed.summary.ledger
    assert ledger.in_flight == 0
    assert ledger.admitted == sum(ledger.by_state.values())
    assert ledger.by_state[TerminalState.TRAINED] == sum(SIZES)
    lines = records(fed.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["batch/samples"] for line in lines] == SIZES
    assert [line["batch/rollouts"] for line in lines] == SIZES
    assert [line["training/loss"] for line in lines] == [0.5] * 4
    assert [line["outside/mine"] for line in lines] == [1, 2, 3, 4]
    assert "outside/broken" not in lines[0]
    assert "batch/rows" not in lines[0]  # its rows are its own
    assert {line["feed/consumers"] for line in lines} == {1}
    taken = fed.trainer.taken
    tokens = [sum(one.num_tokens for one in samples) for samples in taken]
    assert [line["batch/tokens"] for line in lines] == tokens
    for line, samples in zip(lines, taken, strict=True):
        ages = [
            line["step"] - 1 - version
            for one in samples
            for version, count in one.sample.loss_versions().items()
            for _ in range(count)
        ]
        assert line["staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        assert line["staleness/max"] == max(ages)
    written = {record["rollout_id"] for record in rollouts(fed.folder) if record["outcome"]["state"] == "trained"}
    assert written == {one.sample.rollout_id for samples in taken for one in samples}


def test_what_is_handed_over_says_where_it_comes_from(fed: Fed) -> None:
    one = fed.trainer.taken[0][0]
    assert one.task_id.startswith("words/train/")
    assert one.sample_id.startswith(one.sample.rollout_id)
    assert 0 <= one.reward <= 1
    assert (one.trainer_version, one.group_rollouts, one.sampling.max_tokens) == (0, 2, 6)


def test_its_weights_reach_the_generators(fed: Fed) -> None:
    samples = [one.sample for taken in fed.trainer.taken for one in taken]
    assert max(int(one.branch.policy_versions.max()) for one in samples) > 0
    for one in samples:
        branch = one.branch
        is_new = branch.loss_mask & (branch.policy_versions > 0)
        uniform = branch.logprobs[is_new]
        assert uniform == pytest.approx([-math.log(VOCABULARY)] * len(uniform), abs=1e-3)


def test_a_resumed_run_goes_on_where_its_trainer_does(tmp_path: Path) -> None:
    """Tasks of steps that the trainer kept are done; all others come again, until there are no more."""

    async def first(samples: MemorySampleStream) -> None:
        trainer = Trainer(samples, tmp_path / "weights")
        await trainer.begin()
        for number in (1, 2, 3):
            await trainer.step(number, await trainer.pull(4))
        await trainer.end(RunStatus.FAILED, "crashed")

    async def second(samples: MemorySampleStream) -> None:
        trainer = Trainer(samples, tmp_path / "more_weights")
        await trainer.begin(2)  # its checkpoint: step 3 is lost
        number = 2
        while len(pulled := await trainer.pull(4)) == 4:
            number += 1
            await trainer.step(number, pulled)
        assert trainer.stop is not None
        await trainer.end(trainer.stop.status, trainer.stop.reason)

    before = asyncio.run(run_with(tmp_path, first, max_epochs=1))
    assert (before.status, before.exit_code, before.reason) == (RunStatus.FAILED, 1, "crashed")
    after = asyncio.run(run_with(tmp_path, second, max_epochs=1, resume=True))
    assert (after.status, after.steps) == (RunStatus.FINISHED, 10)
    assert Counter(trained_tasks(tmp_path / "run")) == {f"words/train/{index}": 2 for index in range(20)}
    assert [line["step"] for line in records(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 11))


def test_a_trainer_goes_back_to_its_checkpoint_though_the_run_was_resumed_at_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run alone was killed, and its trainer came back where it was; then all of it was."""
    monkeypatch.setattr("tailrace.run.outside_trainer._MOST_UNSAVED_STEPS", 1)

    def program(steps: range, saves: int | None = None) -> Callable[[MemorySampleStream], Awaitable[None]]:
        async def run(samples: MemorySampleStream) -> None:
            trainer = Trainer(samples, tmp_path / f"weights_{steps.start}")
            await trainer.begin(steps.start - 1)
            for number in steps:
                await trainer.step(number, await trainer.pull(4))
                if number == saves:
                    await trainer.rank.report(CheckpointSaved(consumer="rank-0", step=number, path="elsewhere"))
            await trainer.end(RunStatus.FAILED, "crashed")

        return run

    asyncio.run(run_with(tmp_path, program(range(1, 4), saves=2)))
    asyncio.run(run_with(tmp_path, program(range(4, 6)), resume=True))
    after = asyncio.run(run_with(tmp_path, program(range(3, 6)), resume=True))
    assert (after.steps, after.reason) == (5, "crashed")
    assert max(Counter(trained_tasks(tmp_path / "run")).values()) == 2
    assert [line["step"] for line in records(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 6))


def test_a_trainer_that_goes_on_before_every_state_ends_the_run_and_its_history_stays(tmp_path: Path) -> None:
    async def program(samples: MemorySampleStream) -> None:
        trainer = Trainer(samples, tmp_path / "weights")
        await trainer.begin()
        for number in (1, 2, 3):
            await trainer.step(number, await trainer.pull(4))
        await trainer.end(RunStatus.FAILED, "crashed")

    async def too_early(samples: MemorySampleStream) -> None:
        trainer = Trainer(samples, tmp_path / "more_weights")
        await trainer.begin(1)
        await trainer.pull(4)
        await trainer.end(RunStatus.FAILED, "told to stop")

    before = asyncio.run(run_with(tmp_path, program))
    (tmp_path / "run" / "scheduler" / "step_000001.json").unlink()
    after = asyncio.run(run_with(tmp_path, too_early, resume=True))
    assert after.status is RunStatus.FAILED
    assert (after.steps, after.policy_version, after.starts) == (3, 3, 2)
    assert (after.tokens_trained, after.reward_first) == (before.tokens_trained, before.reward_first)
    assert (after.reward_best, after.ledger.by_state) == (before.reward_best, before.ledger.by_state)
    assert after.tokens_trained > 0
    assert after.wall_s > before.wall_s
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    assert "the trainer goes on after step 1, and the oldest state in " in log
    assert [line["step"] for line in records(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


async def test_states_stay_back_to_the_checkpoint_that_was_told_of() -> None:
    """However far back that is: it never goes back to an earlier one. Without any they stay for 1,000 steps."""
    trainer = OutsideTrainer(MemorySampleStream(), None, MemoryEventLog("epoch"), last_read_s=PATIENCE_S)
    assert [trainer.earliest_step(step) for step in (3, 1_000, 4_000)] == [0, 0, 3_000]
    trainer.saved(400)
    assert [trainer.earliest_step(step) for step in (400, 401, 4_000)] == [400, 400, 400]
    await trainer.close()


def test_steps_that_leave_the_version_as_it_was_are_counted_as_trained_across_a_resume(tmp_path: Path) -> None:
    """Its versions are 0, 2, 2, 4: it publishes every second step."""

    def program(steps: range, end: RunStatus) -> Callable[[MemorySampleStream], Awaitable[None]]:
        async def run(samples: MemorySampleStream) -> None:
            trainer = Trainer(samples, tmp_path / f"weights_{steps.start}")
            await trainer.begin(steps.start - 1)
            for number in steps:
                await trainer.step(number, await trainer.pull(4), version=number - 1 if number % 2 else None)
            await trainer.end(end)

        return run

    before = asyncio.run(run_with(tmp_path, program(range(1, 3), RunStatus.FAILED)))
    assert before.ledger.by_state[TerminalState.TRAINED] == 8
    after = asyncio.run(run_with(tmp_path, program(range(3, 5), RunStatus.FINISHED), resume=True))
    lines = records(tmp_path / "run" / "metrics.jsonl")
    assert [line["policy/version"] for line in lines] == [0, 2, 2, 4]
    assert after.tokens_trained == sum(line["batch/loss_tokens"] for line in lines)
    assert after.ledger.by_state[TerminalState.TRAINED] == 16
    states = Counter(record["outcome"]["state"] for record in rollouts(tmp_path / "run"))
    assert states["trained"] == 16
    assert after.ledger.balances


def _evaluated(parent: Path, *, last_weights: bool) -> RunSummary:
    """A run of two steps whose trainer ends at once after the second one, with the weights of that or without."""

    async def program(samples: MemorySampleStream) -> None:
        trainer = Trainer(samples, parent / "weights")
        await trainer.begin()
        await trainer.step(1, await trainer.pull(4))
        await trainer.step(2, await trainer.pull(4), version=None if last_weights else 2)
        await trainer.end()

    held_out = [{"name": "tests.support.run_environments:words", "args": {"count": 20, "held_out": 4}}]
    evaluation = {"every_steps": 2, "tasks": 2, "finish_s": 20.0}
    return asyncio.run(run_with(parent, program, environments=held_out, evaluation=evaluation))


def test_the_last_weights_are_evaluated_though_the_trainer_is_gone(tmp_path: Path) -> None:
    summary = _evaluated(tmp_path, last_weights=True)
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 2)
    course = summary.evaluations["words"]
    assert (course.step_last, course.policy_version_min, course.policy_version_max) == (2, 2, 2)


def test_a_last_step_without_weights_is_not_waited_for_to_be_evaluated(tmp_path: Path) -> None:
    summary = _evaluated(tmp_path, last_weights=False)
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 2)
    assert summary.evaluations["words"].step_last == 0
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    assert "no evaluation of version 2: the trainer published no weights of it" in log
    assert "the end of the run cancels" not in log


class SlowStore(MemoryModelStateDictStore):
    """Reads a folder no sooner than it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read = threading.Event()

    @override
    def publish_folder(self, folder: Path, version: int) -> ModelStateDictRef:
        assert self.may_read.wait(PATIENCE_S)
        return super().publish_folder(folder, version)


class Believing:
    """A scheduler that takes in whatever a trainer tells."""

    num_consumers = 1

    async def tell(self, report: FeedReport) -> None: ...

    def saved(self, step: int) -> None: ...


@pytest.mark.parametrize(
    ("last_read_s", "case", "warning"),
    [
        (PATIENCE_S, "removed", "the trainer's last weights, of version 1, cannot be read: {folder} holds no weights"),
        (
            0.1,
            "too late",
            "the trainer's last weights, of version 1, could not be read within 0.1 s (evaluation.finish_s)",
        ),
        (PATIENCE_S, "interrupted", ""),
    ],
)
async def test_last_weights_that_cannot_be_read_fail_no_run_that_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last_read_s: float, case: str, warning: str
) -> None:
    samples, log, store = MemorySampleStream(), MemoryEventLog("epoch"), SlowStore()
    outside = OutsideTrainer(samples, store, log, last_read_s=last_read_s)
    outside.listen(Believing())
    trainer = Trainer(samples, tmp_path / "weights")
    await trainer.begin()
    await trainer.step(1, [])
    await trainer.end()
    while not outside.has_answered:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
    shutil.rmtree(trainer.folder)
    if case == "removed":
        store.may_read.set()
    elif case == "interrupted":
        outside.let_end(RunStatus.CANCELLED)
    async for event in log.follow():
        assert not isinstance(event, ModelStateDictPublished)
        if isinstance(event, TrainerEnded):
            assert (event.status, event.step, event.reason) == (RunStatus.FINISHED, 1, "enough")
            break
    assert warning.format(folder=trainer.folder / "version_1") in caplog.text
    store.may_read.set()
    await outside.close()


class Deserted(Believing):
    num_consumers = 0


@pytest.mark.parametrize("status", [RunStatus.CANCELLED, RunStatus.FAILED])
async def test_a_run_about_to_finish_that_is_cut_short_does_not_wait_for_a_trainer_that_is_gone(
    status: RunStatus,
) -> None:
    log = MemoryEventLog("epoch")
    outside = OutsideTrainer(MemorySampleStream(), None, log, last_read_s=PATIENCE_S)
    outside.listen(Deserted())
    outside.let_end()
    await log.append(StopRequested(epoch="epoch", role="orchestrator", status=RunStatus.FINISHED, reason="no tasks"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not log.has_ended  # it may come back
    outside.let_end(status)
    async with asyncio.timeout(PATIENCE_S):
        ended = await anext(event async for event in log.follow() if isinstance(event, TrainerEnded))
    assert (ended.status, ended.reason) == (status, "orchestrator: no tasks; no rank of the trainer was there")
    await outside.close()


def test_a_trainer_that_answered_in_time_is_waited_for_while_its_last_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, answered, last_save_s = MemoryModelStateDictStore.publish_folder, threading.Event(), 2.0

    def read_slowly(store: MemoryModelStateDictStore, folder: Path, version: int) -> ModelStateDictRef:
        if version == 2:
            assert answered.wait(PATIENCE_S)
            time.sleep(last_save_s)  # which runs since before that answer
        return read(store, folder, version)

    async def program(samples: MemorySampleStream) -> None:
        trainer = Trainer(samples, tmp_path / "weights")
        await trainer.begin()
        await trainer.step(1, await trainer.pull(4))
        await trainer.step(2, await trainer.pull(4))
        assert await trainer.pull(1) == []
        assert trainer.stop is not None
        await trainer.end(trainer.stop.status, trainer.stop.reason)
        answered.set()

    monkeypatch.setattr(MemoryModelStateDictStore, "publish_folder", read_slowly)
    few = [{"name": "tests.support.run_environments:words", "args": {"count": 6, "held_out": 2}}]
    changes = {"environments": few, "evaluation": {"every_steps": 2}, "shutdown": {"last_save_s": last_save_s}}
    summary = asyncio.run(run_with(tmp_path, program, max_epochs=1, **changes))
    assert (summary.status, summary.steps, summary.evaluations["words"].step_last) == (RunStatus.FINISHED, 2, 2)


async def _steps_of_nothing(trainer: Trainer) -> None:
    await trainer.step(1, await trainer.pull(4))
    await trainer.step(2, [])


async def _weights_of_nothing(trainer: Trainer) -> None:
    await trainer.rank.report(WeightsWritten(consumer="rank-0", version=0, folder="/nowhere"))
    await trainer.pull(100)


async def _an_adapter(trainer: Trainer) -> None:
    folder = trainer.folder / "adapter"
    folder.mkdir(parents=True)
    lora = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)}
    save_file(lora, folder / "adapter_model.safetensors")
    await trainer.rank.report(WeightsWritten(consumer="rank-0", version=0, folder=str(folder)))
    await trainer.pull(100)


async def _weights_of_another_model(trainer: Trainer) -> None:
    folder = trainer.folder / "other"
    folder.mkdir(parents=True)
    save_file({"other.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    await trainer.rank.report(WeightsWritten(consumer="rank-0", version=1, folder=str(folder)))
    await trainer.pull(100)


async def _weights_of_its_process(trainer: Trainer) -> None:
    ref = ModelStateDictRef(version=1, uri="somewhere", num_bytes=1)
    await trainer.rank.report(WeightsOffered(consumer="rank-0", ref=ref))
    await trainer.pull(100)


@pytest.mark.parametrize(
    ("work", "reason", "exit_code"),
    [
        (_steps_of_nothing, "told of step 2 without a sample", 1),
        (_weights_of_nothing, "/nowhere holds no weights", 1),
        (_an_adapter, "holds an adapter (LoRA), and generators take whole weights: merge it", 1),
        (_weights_of_another_model, "names weights that the model lacks: other.weight", 2),
        (_weights_of_its_process, "told of weights elsewhere than where this run takes them from: folders", 1),
    ],
)
def test_what_ends_a_run_is_named(
    tmp_path: Path, work: Callable[[Trainer], Awaitable[None]], reason: str, exit_code: int
) -> None:
    async def program(samples: MemorySampleStream) -> None:
        trainer = Trainer(samples, tmp_path / "weights")
        await trainer.begin()
        await work(trainer)

    # a generator that was given another model's weights would be started again, and given them again
    changes = {"shutdown": {"last_save_s": 1.0, "grace_s": 1.0}, "restarts": {"per_role": 0}}
    summary = asyncio.run(run_with(tmp_path, program, **changes))
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, exit_code)
    assert reason in summary.reason
    assert summary.ledger.in_flight == 0


class Heard(logging.Handler):
    """Waits for what the log says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text, self._loop, self.said = text, asyncio.get_running_loop(), asyncio.Event()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self._loop.call_soon_threadsafe(self.said.set)


def test_a_run_whose_trainer_is_gone_says_so_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    async def program(samples: MemorySampleStream) -> None:
        heard, log = Heard("no rank of the outside trainer is there"), logging.getLogger("tailrace.reporting.live")
        log.addHandler(heard)
        trainer = Trainer(samples, tmp_path / "weights")
        await trainer.begin()
        lost = await trainer.pull(1)
        samples.lose("rank-0", "died")
        await heard.said.wait()
        log.removeHandler(heard)
        trainer.rank = samples.join("rank-0")
        await trainer.begin()
        again = await trainer.pull(8)
        assert lost[0].sample_id in {one.sample_id for one in again}
        await trainer.step(1, again)
        await trainer.end()

    quick = {"live": "off", "report": False, "no_progress_s": 0.5}
    summary = asyncio.run(run_with(tmp_path, program, observability=quick))
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 1)
    assert summary.ledger.by_state[TerminalState.TRAINED] == 8


def test_so_does_one_whose_generators_wait_for_the_first_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those do that it is connected to, whatever weights they hold."""
    monkeypatch.setattr(started_roles, "Generators", partial(Generators, awaits_weights=True))

    async def program(samples: MemorySampleStream) -> None:
        heard = Heard("the outside trainer to write weights of version 0, with which it begins")
        log = logging.getLogger("tailrace.reporting.live")
        log.addHandler(heard)
        trainer = Trainer(samples, tmp_path / "weights")
        await trainer.begin()
        await asyncio.wait_for(heard.said.wait(), PATIENCE_S)
        log.removeHandler(heard)
        await trainer.write_weights(0)
        await trainer.step(1, await trainer.pull(4))
        await trainer.end()

    quick = {"live": "off", "report": False, "no_progress_s": 0.5}
    summary = asyncio.run(run_with(tmp_path, program, observability=quick))
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 1)


def test_so_does_one_that_is_about_to_finish(tmp_path: Path) -> None:
    async def program(samples: MemorySampleStream) -> None:
        heard, log = Heard("no rank of the outside trainer is there"), logging.getLogger("tailrace.reporting.live")
        trainer = Trainer(samples, tmp_path / "weights")
        await trainer.begin()
        await trainer.step(1, await trainer.pull(4))
        assert await trainer.pull(1) == []
        assert trainer.stop is not None
        log.addHandler(heard)
        samples.lose("rank-0", "died")
        await asyncio.wait_for(heard.said.wait(), PATIENCE_S)
        log.removeHandler(heard)
        trainer.rank = samples.join("rank-0")
        await trainer.end()

    few = [{"name": "tests.support.run_environments:words", "args": {"count": 2, "held_out": 0}}]
    quick = {"live": "off", "report": False, "no_progress_s": 0.5}
    summary = asyncio.run(run_with(tmp_path, program, environments=few, max_epochs=1, observability=quick))
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 1)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"max_steps": 10}, "that program says when training is over: leave max_steps out"),
        ({"trainer": {"feed": "stream", "learning_rate": 0.1}}, "trainer.learning_rate is of Tailrace's own trainer"),
        ({"scheduling": {"batch_size": 4, "on_stale": "wait"}}, "leave scheduling.on_stale out"),
        ({"scheduling": {"batch_size": 4, "over_sampling": 2.0}}, "leave scheduling.over_sampling out"),
        ({"scheduling": {"batch_size": 4, "whiten_advantages": True}}, "leave scheduling.whiten_advantages out"),
        ({"scheduling": {"batch_size": 4, "row_tokens": 512}}, "leave scheduling.row_tokens out"),
        ({"generator": {"return_routed_experts": True}}, "leave generator.return_routed_experts out"),
        ({"transport": {"batches": "memory"}}, "leave transport.batches out"),
    ],
)
def test_what_a_trainer_outside_would_ignore_is_refused(changes: dict[str, object], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        settings(**changes)


def test_weights_may_be_sent_from_a_trainer_outside_to_vllm() -> None:
    transport = {"weights": "nccl", "redis": {"start": True}}
    chosen = settings(placement="local", generator={"engine": "vllm"}, transport=transport)
    assert (chosen.trainer.feed, chosen.transport.weights) == ("stream", "nccl")


async def test_one_process_needs_a_trainer_in_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="write placement = 'local'"):
        await train(settings(), tmp_path)
