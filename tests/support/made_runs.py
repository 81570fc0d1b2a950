"""Run folders made by a script, over the writers that runs use: as long, as large and as odd as is needed."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import tomli_w

from tailrace.records import (
    CheckpointWritten,
    Completion,
    Event,
    FinishReason,
    GroupId,
    Json,
    Message,
    Outcome,
    Reward,
    Rollout,
    RolloutId,
    RunStatus,
    SamplingParams,
    StepTrained,
    Task,
    TaskId,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.records.branch import Branch
from tailrace.reporting.evaluation_figures import EVALUATED
from tailrace.reporting.rollout_records import RolloutEntry, encode_line, rollout_record
from tailrace.reporting.sinks import rollouts_path
from tailrace.reporting.summary import RunSummary, write_summary
from tailrace.reporting.tokens import TokenWriter
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.traces import TraceWriter, join_trace

STEP_S = 1.5
WORDS = ("Ida", "Tom", "\n", "Piper", "sorted", "names", "<b>", "and", "\u202e", "the")
Conversation = Callable[[int, int], list[Message]]


def plain_conversation(step: int, number: int) -> list[Message]:
    return [
        {"role": "user", "content": f"Sort these names: Ida, Tom, Piper ({step}.{number})"},
        {"role": "assistant", "content": "Ida\nPiper\nTom"},
    ]


@dataclass(kw_only=True)
class MadeRun:
    """A run of made-up figures. Lines are appended as a run would: `write_steps` may be called again."""

    folder: Path
    steps: int = 12
    group_size: int = 4
    groups: int = 3
    completion_tokens: int = 12
    num_branches: int = 1
    seed: int = 0
    conversation: Conversation = plain_conversation
    environment: str = "sort"
    extra_metrics: int = 0
    """Further columns of `metrics.jsonl`, as a real run has some 280."""
    trace_mb: float = 8.0
    settings: dict[str, Json] | None = None
    step: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "rollouts").mkdir(exist_ok=True)
        recipe: dict[str, Json] = {
            "max_steps": self.steps,
            "environments": [{"name": self.environment}],
            "model": {"name": "bundled:quickstart"},
        }
        settings = {"name": self.folder.name, "seed": self.seed, **recipe, **(self.settings or {})}
        (self.folder / "config.toml").write_text(tomli_w.dumps(settings))
        (self.folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
        self._event(TrainerStarted(epoch="e", step=0, version=0))

    def write_steps(self, count: int, *, rollouts: bool = True) -> None:
        """So many more."""
        for _ in range(count):
            self.step += 1
            self._write_metrics(self.step)
            self._event(StepTrained(epoch="e", step=self.step, version=self.step, metrics={}))
            if rollouts:
                self.write_rollouts(self.step)

    def write_all(self) -> MadeRun:
        """A whole run, finished."""
        self.write_steps(self.steps)
        self.write_evaluation(self.steps)
        self.write_trace()
        return self.finish()

    def finish(self, status: RunStatus = RunStatus.FINISHED) -> MadeRun:
        """Its end."""
        self._event(CheckpointWritten(epoch="e", step=self.step, path=f"checkpoints/step_{self.step:06d}"))
        self._event(TrainerEnded(epoch="e", status=status, step=self.step, reason=f"max_steps = {self.steps} reached"))
        write_summary(
            self.folder,
            RunSummary(name=self.folder.name, status=status, reason="max_steps reached", steps=self.step),
        )
        return self

    def own(self, pid: int) -> None:
        """The process that the run goes on in, while it is there."""
        owner = {"pid": pid, "host": socket.gethostname(), "kernel": "", "started_at": ""}
        (self.folder / "owner.json").write_bytes(msgspec.json.encode(owner))

    def _event(self, event: Event) -> None:
        with (self.folder / "events.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    def _write_metrics(self, step: int) -> None:
        reward = 1 - math.exp(-step / max(1, self.steps / 3)) * 0.9 + self._random.uniform(-0.03, 0.03)
        metrics: dict[str, Json] = {
            "step": step,
            "wall_s": step * STEP_S,
            "policy/version": step,
            "reward/mean": reward,
            "reward/std": 0.2,
            f"reward/{self.environment}/mean": reward,
            "group/zero_spread_share": 0.1,
            "generation/tokens_per_s": 2_000.0,
            "rollout/generated_tokens": float(self.groups * self.group_size * self.completion_tokens),
            "rollout/completion_tokens": float(self.completion_tokens),
            "staleness/mean": 1.0,
            "staleness/max": 2.0,
            "training/loss": self._random.uniform(-0.01, 0.01),
            "training/entropy": 0.3,
            "training/kl": 0.01,
            "lag/max_s": 0.002,
            "memory/trainer_rss_bytes": 1e9,
            "scheduler/trainer_wait_s": 0.1,
        }
        metrics |= {f"phase/work_{number}/wall_s": self._random.random() for number in range(self.extra_metrics)}
        with (self.folder / "metrics.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(metrics) + b"\n")

    def write_rollouts(self, step: int) -> None:
        """The file of a step."""
        self._write(rollouts_path(self.folder / "rollouts", step), step, self.entries(step))

    def write_large_file(self, step: int, count: int) -> list[str]:
        """The file of a step of `count` rollouts, all of one group and alike but for their ids: these."""
        (entry, *_) = self.entries(step)
        group = entry.rollout.group_id
        line = encode_line(rollout_record(entry, step)).decode()
        ids = [f"{group}.{number}.0" for number in range(count)]
        path = rollouts_path(self.folder / "rollouts", step)
        path.write_text("".join(line.replace(entry.rollout.rollout_id, rollout_id) for rollout_id in ids))
        return ids

    def write_evaluation(self, step: int) -> None:
        """The same tasks each time, as held-out ones are."""
        entries = self.entries(step, held_out=True)
        self._write(rollouts_path(self.folder / "rollouts", step, "evaluation"), step, entries)

    @staticmethod
    def _write(path: Path, step: int, entries: list[RolloutEntry]) -> None:
        with path.open("ab") as file:
            file.writelines(encode_line(rollout_record(entry, step)) for entry in entries)

    def entries(self, step: int, *, held_out: bool = False) -> list[RolloutEntry]:
        """The rollouts of a step, group by group; in the last group all rewards are equal, its last rollout failed."""
        made = []
        for group in range(self.groups):
            for member in range(self.group_size):
                is_last = group == self.groups - 1
                rollout = self._rollout(step, group, member, held_out=held_out)
                failed = is_last and member == self.group_size - 1 and not held_out
                outcome = (
                    EVALUATED
                    if held_out
                    else Outcome.failed("timeout")
                    if failed
                    else Outcome.filtered("zero_spread")
                    if is_last
                    else Outcome.trained(step)
                )
                reward = 0.5 if is_last else (step * 7 + group * 3 + member * 5) % 11 / 10
                rollout.reward = None if failed else Reward(reward, components={"right": reward})
                error = "RolloutTimeout: took over 60 s" if failed else ""
                made.append(RolloutEntry(rollout, outcome, advantage=None if failed else reward - 0.5, error=error))
        return made

    def _rollout(self, step: int, group: int, member: int, *, held_out: bool) -> Rollout:
        task = f"{self.environment}/{'held-out' if held_out else 'train'}/{group if held_out else step * 100 + group}"
        number = group * self.group_size + member
        began_s = self._began_s(step, number)
        return Rollout(
            rollout_id=RolloutId(f"{task}#{step}.{member}.0"),
            group_id=GroupId(f"{task}#{step}"),
            task=Task(TaskId(task), self.environment, group, {"names": ["Ida", "Tom"], "answer": ["Ida", "Tom"]}),
            sampling=SamplingParams(max_tokens=64),
            branches=self.branches(step),
            messages=self.conversation(step, number),
            turns=1,
            started_s=began_s - 0.05,
            ended_s=began_s + 0.8,
            metrics={"generate_s": 0.7},
        )

    def branches(self, step: int) -> list[Branch]:
        """Of made-up tokens; every further one forks from the first where it begins to sample."""
        return [self._branch(step, number) for number in range(self.num_branches)]

    def _branch(self, step: int, number: int) -> Branch:
        count = self.completion_tokens
        branch = Branch()
        branch.extend_context(np.arange(10, 30, dtype=np.int32))
        branch.extend_completion(
            Completion(
                token_ids=np.arange(number, count + number, dtype=np.int32) % 500 + 30,
                logprobs=-np.abs(np.sin(np.arange(count, dtype=np.float32))),
                policy_versions=np.full(count, max(0, step - 2), np.int32),
                finish_reason=FinishReason.STOP,
            )
        )
        return branch

    def _began_s(self, step: int, number: int) -> float:
        return 100 + step * STEP_S + number * 0.01

    def write_tokens(self, steps: Iterable[int], *, exported: bool = True) -> None:
        """Of these steps, as the orchestrator writes them, and beside them what a trainer exports of the sampled."""
        writer = BackgroundWriter(queue_records=1 << 20)  # nothing is dropped, however many steps
        tokens = TokenWriter(
            self.folder / "tokens", writer, token_text, every_steps=1, max_bytes=1 << 40, waiting_rollouts=1 << 20
        )
        for step in steps:
            entries = self.entries(step)
            tokens.write(step, entries, {})
            if exported:
                write_export(self.folder / "tokens" / f"step_{step:06d}_rank_0.parquet", entries)
        assert writer.close(600)
        assert writer.dropped == 0

    def write_trace(self, *, joined: bool = True) -> None:
        """Of all steps so far: a trainer, one replica, and the rollouts of the orchestrator."""
        parts = self.folder / "trace"
        orchestrator, trainer, generator = (
            TraceWriter(parts, name, max_bytes=int(self.trace_mb * 1e6))
            for name in ("orchestrator", "trainer", "generator")
        )
        for step in range(1, self.step + 1):
            for name, track, at_s, took_s, about in self._spans_of_trainer(step):
                trainer.add_span(name, track, 0, began_ns=_ns(at_s), duration_ns=_ns(took_s), about=about)
            swap: dict[str, Json] = {"version": step, "replica": "generator"}
            at_s = 100 + (step + 2) * STEP_S
            orchestrator.add_span(
                "load_model_state_dict", "weights", 0, began_ns=_ns(at_s), duration_ns=_ns(0.02), about=swap
            )
            lanes = [self._trace_rollout(orchestrator, generator, entry.rollout) for entry in self.entries(step)]
            for lane in lanes:
                orchestrator.give_lane_back("rollouts", lane)
        for writer in (orchestrator, trainer, generator):
            writer.close()
        if joined:
            join_trace(parts, self.folder / "trace.json")

    @staticmethod
    def _spans_of_trainer(step: int) -> Iterator[tuple[str, str, float, float, dict[str, Json]]]:
        at_s = 100 + (step + 1) * STEP_S
        yield "wait_for_batch", "optimizer steps", at_s, 0.3, {}
        yield "train", "optimizer steps", at_s + 0.3, STEP_S - 0.35, {"step": step}
        yield "gradients", "optimizer steps", at_s + 0.3, STEP_S - 0.5, {}
        yield "publish", "weights", at_s + STEP_S - 0.04, 0.02, {"version": step}

    def _trace_rollout(self, orchestrator: TraceWriter, generator: TraceWriter, rollout: Rollout) -> int:
        """In a lane that no other has meanwhile: which."""
        began_s, took_s = rollout.started_s + 0.05, 0.8
        lane = orchestrator.take_lane("rollouts")
        about: dict[str, Json] = {"rollout": rollout.rollout_id, "attempt": 0}
        for name, at_s, length_s, told in (
            ("generate", began_s + 0.05, 0.6, None),
            ("environment", began_s + 0.01, 0.75, None),
            ("rollout", began_s, took_s, about),
        ):
            orchestrator.add_span(name, "rollouts", lane, began_ns=_ns(at_s), duration_ns=_ns(length_s), about=told)
        told_of: dict[str, Json] = {"request": f"{rollout.rollout_id}/0/1"}
        generator.add_span(
            "request", "requests", lane, began_ns=_ns(began_s + 0.05), duration_ns=_ns(0.6), about=told_of
        )
        return lane


def token_text(token_ids: Sequence[int]) -> str:
    return f" {WORDS[token_ids[0] % len(WORDS)]}"


def write_export(path: Path, entries: Sequence[RolloutEntry]) -> None:
    """As `training.reports.token_export` does, of the sampled tokens of what was trained."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(exist_ok=True)
    rows: dict[str, list[object]] = {name: [] for name in ("rollout_id", "branch", "position", "text")}
    columns: dict[str, list[np.ndarray]] = {}
    for entry in entries:
        if entry.outcome.state != "trained":
            continue
        for number, branch in enumerate(entry.rollout.branches):
            places = np.flatnonzero(branch.loss_mask)
            logprobs = branch.logprobs[places] + np.float32(0.05) * np.sin(places).astype(np.float32)
            rows["rollout_id"] += [entry.rollout.rollout_id] * len(places)
            rows["branch"] += [number] * len(places)
            rows["position"] += places.tolist()
            rows["text"] += [token_text([token_id]) for token_id in branch.token_ids[places].tolist()]
            for name, values in (
                ("loss_mask", np.ones(len(places), bool)),
                ("kept", places % 7 != 0),
                ("advantage", np.full(len(places), entry.advantage or 0.0, np.float32)),
                ("loss", -logprobs),
                ("trainer_logprob", logprobs),
                ("ratio", np.exp(logprobs - branch.logprobs[places])),
                ("entropy", np.abs(logprobs)),
                ("token_id", branch.token_ids[places]),
                ("policy_version", branch.policy_versions[places]),
                ("support_size", np.zeros(len(places), np.int32)),
                ("generator_logprob", branch.logprobs[places]),
            ):
                columns.setdefault(name, []).append(values)
    made = {name: pyarrow.array(np.concatenate(parts)) for name, parts in columns.items()}
    for name in ("rollout_id", "text"):
        made[name] = pyarrow.array(rows[name])
    for name in ("branch", "position"):
        made[name] = pyarrow.array(np.array(rows[name], np.int32))
    parquet.write_table(pyarrow.table(made), path, compression="zstd", row_group_size=1 << 16)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
