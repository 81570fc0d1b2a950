"""What `tailrace try` shows of an environment: its conversations, what they cost, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tailrace.generation.settings import CONTEXT_IS
from tailrace.records import Group, Int32Array, Rollout, Task
from tailrace.reporting.conversations import conversation_lines, readable
from tailrace.reporting.formats import NOTHING, plural, seconds
from tailrace.rollouts import LoadedEnvironment
from tailrace.tracing.lag import LagStatistics

_PROMPT_CHARACTERS = 1_500
_ROW_CHARACTERS = 300
_PARTS = {"generate_s": "generate", "environment_s": "environment", "score_s": "reward"}
"""Where a rollout's time went: its metric, and what people call it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout, or the score of a group, that failed."""

    reason: str
    message: str
    """With the traceback of users' code."""
    rollout: Rollout | None = None
    """As far as it came."""


@dataclass(slots=True)
class TriedGroup:
    """The rollouts of one task."""

    task: Task
    finished: list[Rollout] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    scored: list[Group] = field(default_factory=list)
    """What scoring made of it."""

    @property
    def rewards(self) -> list[float]:
        """Of the rollouts that have one."""
        rollouts = [rollout for group in self.scored for rollout in group.rollouts]
        return [rollout.reward.value for rollout in rollouts if rollout.reward is not None]

    @property
    def started(self) -> list[Rollout]:
        """Every rollout that made a prompt, lost ones included."""
        lost = [failure.rollout for failure in self.failures if failure.rollout is not None]
        return [rollout for rollout in [*self.finished, *lost] if rollout.branches]


@dataclass(frozen=True, slots=True)
class Trial:
    """A few groups of one environment, played without training."""

    environment: LoadedEnvironment
    groups: Sequence[TriedGroup]
    lag: LagStatistics
    stalls: Sequence[str] = ()
    """What the log said of an event loop that was held, with stacks."""
    max_model_tokens: int | None = None

    @property
    def finished(self) -> list[Rollout]:
        """Of all groups."""
        return [rollout for group in self.groups for rollout in group.finished]

    @property
    def failures(self) -> list[Failure]:
        """Of all groups."""
        return [failure for group in self.groups for failure in group.failures]

    @property
    def started(self) -> list[Rollout]:
        """Of all groups, lost ones included."""
        return [rollout for group in self.groups for rollout in group.started]

    @property
    def rewards(self) -> list[float]:
        """Of all groups."""
        return [reward for group in self.groups for reward in group.rewards]

    @property
    def is_trainable(self) -> bool:
        """Whether some group has rewards that differ; where none has two to compare, whether nothing speaks against it.

        One reward alone shows nothing, and rewards of several tasks that are all the same show that it is not. Groups
        in which no rollout has a token do not count.
        """
        judged = [group.rewards for group in self.groups if any(rollout.branches for rollout in group.finished)]
        compared = [rewards for rewards in judged if len(rewards) > 1]
        if compared:
            return any(map(_differ, compared))
        alone = [reward for rewards in judged for reward in rewards]
        return len(alone) == 1 or _differ(alone)


def _differ(rewards: Sequence[float]) -> bool:
    return bool(rewards) and min(rewards) < max(rewards)


def trial_text(trial: Trial, decode: Callable[[Sequence[int]], str], *, tokens: bool = False) -> str:
    """All of it for the terminal; `decode` turns token ids into text, `tokens` shows prompts token by token."""
    parts = [_group_text(group, decode, tokens=tokens) for group in trial.groups]
    found = findings(trial)
    parts += [f"wrong with {trial.environment.spec.name}:" if found else "nothing is wrong, as far as this shows"]
    return "\n\n".join(parts) + "".join(f"\n- {finding}" for finding in found)


def _group_text(group: TriedGroup, decode: Callable[[Sequence[int]], str], *, tokens: bool) -> str:
    row = readable(msgspec.json.encode(dict(group.task.row), enc_hook=repr).decode())
    lines = [f"task {readable(group.task.task_id)}: {row[:_ROW_CHARACTERS]}{'…' * (len(row) > _ROW_CHARACTERS)}"]
    if group.started:
        prompt = first_prompt(group.started[0])
        lines.append(f"prompt of {len(prompt)} tokens")
        lines.append(_indented(_token_list(prompt, decode) if tokens else _cut(readable(decode(prompt.tolist())))))
    for rollout in group.finished:
        lines += [*conversation_lines(rollout), _indented(" · ".join([*_components(rollout), *_times(rollout)]))]
    for failure in group.failures:
        said: Iterable[str] = () if failure.rollout is None else conversation_lines(failure.rollout)
        lines += [*said, _indented(f"failed ({failure.reason}): {_first_line(readable(failure.message))}")]
    return "\n".join(lines)


def first_prompt(rollout: Rollout) -> Int32Array:
    """Tokens of its first branch before the first sampled one: [num_tokens]."""
    branch = rollout.branches[0]
    sampled = branch.loss_mask.nonzero()[0]
    return branch.token_ids[: sampled[0]] if len(sampled) else branch.token_ids


def _token_list(prompt: Int32Array, decode: Callable[[Sequence[int]], str]) -> str:
    return " ".join(f"{token_id}:{decode([token_id])!r}" for token_id in prompt.tolist())


def _components(rollout: Rollout) -> Iterator[str]:
    for name, value in (rollout.reward.components if rollout.reward else {}).items():
        yield f"{name} {value:.3g}"


def _times(rollout: Rollout) -> Iterator[str]:
    for metric, name in _PARTS.items():
        if metric in rollout.metrics:
            yield f"{name} {seconds(rollout.metrics[metric])}"
    yield f"{plural(rollout.turns, 'turn')} · {plural(rollout.num_completion_tokens, 'token')} sampled"


# --- what is wrong -----------------------------------------------------------------------------------------------


def findings(trial: Trial) -> list[str]:
    """What is wrong with the environment, or soon will be, most serious first. Empty where nothing is."""
    return [*_failures(trial), *_rewards(trial), *_replies(trial), *_prompts(trial), *_speed(trial)]


def _failures(trial: Trial) -> Iterator[str]:
    counts = Counter(failure.reason for failure in trial.failures)
    for reason, count in counts.items():
        first = next(failure for failure in trial.failures if failure.reason == reason)
        yield f"{plural(count, 'failure')} of the kind {reason}; the first: {readable(first.message)}"


def _rewards(trial: Trial) -> Iterator[str]:
    rewards = trial.rewards
    known = {0.0: "too hard for this model", 1.0: "too easy for this model"}
    alike = [group for group in trial.groups if len(group.rewards) > 1 and not _differ(group.rewards)]
    if not rewards:
        yield "no rollout has a reward: there would be nothing to train on"
    elif len(rewards) > 1 and not _differ(rewards):
        yield (
            f"every reward is {rewards[0]:g}, so there would be nothing to train on: the task is "
            f"{known.get(rewards[0], 'not told apart by its reward')}. Reward a reply by degrees"
        )
    elif alike:
        yield (
            f"in {len(alike)} of {plural(len(trial.groups), 'group')} all rewards are equal: such a group teaches "
            "nothing, and is replaced by another task's"
        )


def _replies(trial: Trial) -> Iterator[str]:
    of = f"of {plural(len(trial.finished), 'rollout')}"
    most = trial.environment.sampling.max_tokens
    cut = [_longest_reply(rollout) for rollout in trial.finished if rollout.truncated]
    if at_most := sum(length >= most for length in cut):
        yield f"{at_most} {of} had a reply cut at {most} tokens: raise rollouts.max_tokens, or reward what is brief"
    if shorter := len(cut) - at_most:
        yield (
            f"{shorter} {of} had a reply cut before rollouts.max_tokens = {most}: by the agent's own max_tokens, "
            f"rollouts.max_rollout_tokens, or where the context ended{_context(trial)}"
        )
    if silent := sum(not rollout.branches for rollout in trial.finished):
        yield f"{silent} {of} never called policy.chat: there is no token to train on"
    if malformed := int(sum(rollout.metrics.get("malformed_tool_calls", 0.0) for rollout in trial.finished)):
        yield f"{plural(malformed, 'tool call')} could not be parsed"
    if rewritten := int(sum(rollout.metrics.get("rewritten_turns", 0.0) for rollout in trial.finished)):
        yield (
            f"{plural(rewritten, 'turn')} rewrote the conversation's past, which begins another branch each time: "
            "append reply.message as it is"
        )


def _context(trial: Trial) -> str:
    """How long it is, and what sets that, where it is known."""
    return "" if trial.max_model_tokens is None else f" at {trial.max_model_tokens} tokens ({CONTEXT_IS})"


def _longest_reply(rollout: Rollout) -> int:
    """Its tokens."""
    return max((end - start for branch in rollout.branches for start, end in branch.completion_spans), default=0)


def _prompts(trial: Trial) -> Iterator[str]:
    longest = max((len(first_prompt(rollout)) for rollout in trial.started), default=0)
    limit, most = trial.max_model_tokens, trial.environment.sampling.max_tokens
    if limit is not None and longest + most > limit:
        yield (
            f"a first prompt has {longest} tokens: of the {limit} that prompt and reply may have together "
            f"({CONTEXT_IS}) it leaves {max(0, limit - longest)}, less than rollouts.max_tokens = {most}"
        )


def _speed(trial: Trial) -> Iterator[str]:
    if trial.stalls:
        yield f"it held the event loop, for up to {seconds(trial.lag.max_s)}:\n{trial.stalls[0].rstrip()}"
    if not len(trial.environment.spec.eval_tasks):
        yield "it holds no task out (held_out, environment.eval_tasks): nothing would measure what was learned"


def _first_line(text: str) -> str:
    return text.partition("\n")[0] or NOTHING


def _cut(text: str) -> str:
    rest = len(text) - _PROMPT_CHARACTERS
    return text if rest <= 0 else f"{text[:_PROMPT_CHARACTERS]}\n… and {rest:,} more characters"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
