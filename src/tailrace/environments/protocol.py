"""The seams of an environment.

An environment is written in one of two ways, and everything else of `EnvironmentSpec` is the same for both:

    agent         async def agent(task, policy) -> AgentResult  the rollout, written as an ordinary coroutine
    environment   reset(task) -> Observation                    the rollout, turned inside out: the loop asks the policy
                  step(reply) -> Observation                    and calls `step` until an observation is `done`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Protocol, TypeAlias, runtime_checkable

from tailrace.environments.callables import is_async, is_async_environment
from tailrace.environments.judge import JudgeFormat, JudgeSettings
from tailrace.environments.named_rewards import NamedReward
from tailrace.environments.outside import Offer
from tailrace.environments.programs import CommandAgent
from tailrace.environments.results import AgentResult
from tailrace.environments.rows import ClientRow
from tailrace.errors import DataError, EnvironmentFailed, SettingsError
from tailrace.records import Group, Json, Message, Reply, Reward, Task, TaskId, ToolSpec


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the model's chats become tokens, for clients that do that themselves."""

    tokenizer: str
    """Folder of its tokenizer and chat template, as transformers reads them."""
    family: str | None = None
    """Its family's renderer in the package `renderers`; None: its chat template is used."""
    keeps_reasoning: bool = True
    """Whether the reasoning of earlier turns stays (`rollouts.thinking_retention`)."""


class Endpoint(Protocol):
    """Where a rollout's policy answers over HTTP, in the forms that `docs/gateway.md` lists."""

    @property
    def key(self) -> str:
        """The rollout, for the gateway: what clients send as their API key. A secret, and nothing but letters, digits,
        `-` and `_`."""

    @property
    def root_url(self) -> str:
        """`http://127.0.0.1:41234`: the base URL of Anthropic's clients, which add `/v1/messages` to it."""

    @property
    def openai_url(self) -> str:
        """`http://127.0.0.1:41234/v1`: the base URL of OpenAI's clients, which add `/chat/completions` to it."""

    @property
    def path_url(self) -> str:
        """In place of `root_url`, for clients that cannot set a key: the key is in its path."""

    @property
    def chat_format(self) -> ChatFormat | None:
        """For clients that send and get tokens. None where the model is simulated, and has no tokenizer."""

    @property
    def reported(self) -> AgentResult | None:
        """What was last sent to `POST {path_url}/reward`."""

    async def play_outside(self, offer: Offer) -> None:
        """Let a client claim this rollout by `POST /rollouts`, unless one has, and wait until it has ended it.

        Raises `ClientLost` where it is silent for longer than its lease, `RolloutTimeout` where it takes too long.
        """

    async def ended(self) -> None:
        """Wait for `POST {path_url}/end`, or for a reward: then the agent asks for no turn any more."""


class Policy(Protocol):
    """All that an agent knows of the model. Belongs to one rollout."""

    async def chat(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Sample the next message of a conversation: one turn, recorded as the rollout's tokens.

        Pass the whole conversation each time, earlier replies included as `reply.message`. Histories that only grow
        stay one branch; a rewritten history starts another. `max_tokens` may lower the run's limit, never raise it.
        Calls are read out of the reply where the turn offers `tools`, and are its text otherwise.

        `temperature` is this turn's own, 0.01 or above; a branch has one temperature, so a change of it begins another.
        A reply ends where it holds one of the strings `stop`, which its text is then without. Content may be a list of
        text parts, `[{"type": "text", "text": ...}]`.

        Raises `BudgetExceeded` where no turn or token is left (let it pass: it ends the rollout), `RequestRefused`
        where the conversation does not fit the model's context.
        """

    @property
    def messages(self) -> list[Message]:
        """The conversation of the latest turn, its reply included; empty before the first."""

    def demonstrate(self, messages: list[Message], *, tools: list[ToolSpec] | None = None, weight: float = 1.0) -> None:
        """Show what the policy ought to say: the last message of this conversation, the assistant's.

        Nothing is sampled. Each token of that message bears cross-entropy, times `weight`, and no loss of rewards; the
        run's loss must have `trainer.loss.cross_entropy`. Evaluations leave demonstrations out.

        Raises `EnvironmentFailed` where the model's template cannot show it, `ValueError` where it is longer than the
        model's context or `scheduling.row_tokens`, `SettingsError` where the loss has no cross-entropy.
        """

    def set_column(self, reply: Reply, name: str, values: object) -> None:
        """Give each token of a reply a number, or k of them, under a name that a loss reads it by.

        `values` are [num_tokens of `reply.completion`] or [num_tokens, k]: whole numbers become int32, others float32.
        Tokens that nothing is set for are 0 (1 in `reference_kl_weights` and `distillation_weights`). Raises
        `ValueError` for values of another length or kind.
        """

    def endpoint(self) -> AbstractAsyncContextManager[Endpoint]:
        """Let programs that speak HTTP ask this policy: each request is a `chat`, recorded as this rollout's tokens.

        On leaving, requests that still run are cancelled, and later ones are refused. Raises `SettingsError` where the
        rollout is played without a gateway. Requests for which no turn or token is left get an empty reply: an agent
        that ends without another, as for a first prompt that does not fit the model's context, fails its rollout.
        """


Agent: TypeAlias = Callable[[Task, Policy], Awaitable[AgentResult | Reward | float | None]]
"""One rollout. A number or a `Reward` are short forms of an `AgentResult`; None where something else scores it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers: the messages to append before the policy's next turn.

    >>> Observation.user("Sort these names: Bob, Ada").messages
    [{'role': 'user', 'content': 'Sort these names: Bob, Ada'}]
    """

    messages: Sequence[Message] = ()
    """The opening of the conversation after `reset`; later what follows the reply (user or tool messages)."""
    reward: float | None = None
    """Of the last reply. A rollout's reward is the **sum** over its observations."""
    done: bool = False
    """The rollout ends here; its messages are kept for people, the policy does not answer them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Become `AgentResult.metrics`; of one name the last value counts."""
    columns: Mapping[str, Json] = field(default_factory=dict)
    """Become `AgentResult.info`, saved beside the rollout; of one name the last value counts."""

    @classmethod
    def user(cls, content: str, *, reward: float | None = None) -> Observation:
        """One user message, and the rollout goes on."""
        return cls(messages=[{"role": "user", "content": content}], reward=reward)

    @classmethod
    def end(
        cls,
        reward: float | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        columns: Mapping[str, Json] | None = None,
    ) -> Observation:
        """The rollout is over, with the reward of the last reply."""
        return cls(reward=reward, done=True, metrics=metrics or {}, columns=columns or {})


class Environment(Protocol):
    """A reset/step environment, made anew for every rollout, so state is plain attributes.

    Methods may be `async`; synchronous ones run in a worker process that can be killed, unless the spec is `trusted`.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Open the conversation of a task."""

    def step(self, reply: Message) -> Observation | Awaitable[Observation]:
        """Judge the policy's reply and answer it."""


@runtime_checkable
class EndsEarly(Protocol):
    """An environment that still has a say where a rollout's turns or tokens run out before an observation is `done`."""

    def end_early(self) -> Observation | Awaitable[Observation]:
        """Called in place of the next `step`; its reward and metrics count as the last observation's."""


EnvironmentFactory: TypeAlias = Callable[[], Environment]
RewardFunction: TypeAlias = Callable[
    [Task, list[Message]], AgentResult | Reward | float | Awaitable[AgentResult | Reward | float]
]
"""Scores a finished rollout by its task and its whole conversation."""
GroupScore: TypeAlias = Group | list[Group] | Sequence[AgentResult | Reward | float] | None
ScoreGroup: TypeAlias = Callable[[Group], Awaitable[GroupScore]]
"""Rescores, splits or (None) discards a complete group; its rollouts have their own rewards already.

It sets `rollout.reward` and returns the group, or returns one `AgentResult` per rollout, in their order, or a short
form of it."""
TaskRows: TypeAlias = Sequence[Mapping[str, Json]]
"""Task rows by index: a list, a `datasets.Dataset`, or a class of your own that generates a row when asked for it.

Only `len` and `[index]` are used.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentSpec:
    """Everything that Tailrace needs to know about an environment.

    >>> async def agent(task: Task, policy: Policy) -> float:
    ...     reply = await policy.chat([{"role": "user", "content": task["word"]}])
    ...     return float(reply.content == task["word"].upper())
    >>> shout = EnvironmentSpec(name="shout", agent=agent, train_tasks=[{"word": "hush"}])
    >>> shout.train_task(0).task_id
    'shout/train/0'

    Raises `SettingsError` where fields exclude each other, `agent` and `environment` are both missing, or a field is of
    another kind.
    """

    name: str
    train_tasks: TaskRows = ()
    """May be empty where the rows come from `environment.data`."""
    eval_tasks: TaskRows = ()
    """Never trained on. Or leave empty and set `held_out`."""
    held_out: int = 0
    """This many rows are taken out of `train_tasks` to be the eval tasks, the same ones every time."""
    agent: Agent | None = None
    environment: EnvironmentFactory | None = None
    """Called once per rollout; usually the class itself."""
    reward: RewardFunction | None = None
    """Scores the finished rollout in place of what the agent returned or the observations summed up to."""
    rewards: Mapping[str, NamedReward] = field(default_factory=dict)
    """In place of `reward`: named functions in TRL's form, whose weighted sum is the reward."""
    adds_rewards: bool = False
    """The sum of `rewards` adds to what its agent or environment reported, in whose place it is otherwise."""
    score_group: ScoreGroup | None = None
    judge: JudgeSettings | None = None
    """In place of `score_group`: a language model ranks the rollouts of a group."""
    judge_format: JudgeFormat | None = None
    """How the judge is asked and answers; None: scores by id, as JSON."""
    needs_whole_group: bool = False
    """`score_group` can do nothing with a group that lost members: such a group is filtered."""
    tools: tuple[ToolSpec, ...] = ()
    """Offered to the policy at every turn of a reset/step environment. An agent passes its own to `chat`."""
    required_columns: tuple[str, ...] = ()
    """Columns that every task row must have; checked before a rollout starts. Beside those that its agent has as an
    attribute of this name, and those that its named rewards take."""
    columns: tuple[str, ...] = ()
    """Attributes of a reset/step environment to save beside each rollout. An agent uses `AgentResult.info`."""
    info_keys: tuple[str, ...] | None = None
    """Only these are saved, of what it reports, of its attributes and of what `reward` adds; where a rollout lacks one,
    the others. None: all that is reported, and `columns`. They are `environment.columns` of the settings."""
    trusted: bool = False
    """Its synchronous code returns soon and always, so it may run on the event loop. Otherwise it runs in a worker
    process, which is killed with that one rollout when it never returns. Coroutines always run on the loop."""
    description: str = ""
    check: Callable[[], None] | None = None
    """Called once before a run by the process that starts it. Raises `SettingsError` where the environment cannot be
    played, because something that it reaches or starts does not answer."""
    close: Callable[[], Awaitable[None]] | None = None
    """Called when no rollout is played any more, in each process that may have played some. What it raises is logged,
    and it has `shutdown.cancel_rollouts_s` in the run's own process, 5 s in an agent worker."""

    def __post_init__(self) -> None:
        if (self.agent is None) == (self.environment is None):
            have = "neither" if self.agent is None else "both"
            raise SettingsError(f"environment {self.name!r} has {have}: give exactly one of `agent` and `environment`")
        self._require_kinds()
        if self.held_out and len(self.eval_tasks):
            raise SettingsError(
                f"environment {self.name!r} has both `eval_tasks` and `held_out` = {self.held_out}; give one of them"
            )
        for field_name in ("train_tasks", "eval_tasks"):
            self._require_rows(field_name, getattr(self, field_name))
        if self.reward is not None and self.rewards:
            raise SettingsError(f"environment {self.name!r} has both `reward` and `rewards`; give one of them")
        if self.score_group is not None and self.judge is not None:
            raise SettingsError(f"environment {self.name!r} has both `score_group` and `judge`; give one of them")

    def _require_kinds(self) -> None:
        for field_name in ("agent", "environment", "reward", "score_group", "check", "close"):
            value: object = getattr(self, field_name)
            if value is not None and not callable(value):
                also = "; give the class itself, not one that was made" if field_name == "environment" else ""
                raise self._wrong(field_name, value, f"a function{also}")
        for field_name in ("required_columns", "columns", "info_keys"):
            if isinstance(names := getattr(self, field_name), str):
                raise self._wrong(field_name, names, f"a tuple of names, ({names!r},)")
        held_out: object = self.held_out
        if not isinstance(held_out, Integral) or int(held_out) < 0:
            raise self._wrong("held_out", held_out, "a number of rows, 0 or above")
        named = "a dict of names, each with its NamedReward(function, weight=1.0)"
        if not isinstance(self.rewards, Mapping):
            raise self._wrong("rewards", self.rewards, named)
        for name, reward in self.rewards.items():
            if not isinstance(reward, NamedReward):
                raise self._wrong(f"rewards[{name!r}]", reward, f"in {named}")

    def _wrong(self, field_name: str, value: object, expected: str) -> SettingsError:
        found = f"{value!r:.200} ({type(value).__name__})"
        return SettingsError(f"environment {self.name!r}: `{field_name}` is {found}; it must be {expected}")

    def _require_rows(self, field_name: str, rows: object) -> None:
        """Rows have a length and an index; what `datasets` makes of several splits, or streams, has not."""
        if isinstance(rows, Mapping):
            splits = ", ".join(map(str, rows)) or "none"
            raise SettingsError(
                f"environment {self.name!r}: `{field_name}` maps names to rows (a DatasetDict?); choose one: {splits}"
            )
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise SettingsError(
                f"environment {self.name!r}: `{field_name}` is a {type(rows).__name__}, which has no length and index; "
                "give a list or a `datasets.Dataset` (load a data set that is streamed without streaming)"
            )

    @property
    def scores_rollouts(self) -> bool:
        """Whether a function scores a finished rollout, in place of what its agent or environment says."""
        return self.reward is not None or bool(self.rewards)

    @property
    def scores_groups(self) -> bool:
        """Whether a complete group is scored once more, so that its rollouts need no reward of their own."""
        together = any(reward.together for reward in self.rewards.values())
        return together or self.score_group is not None or self.judge is not None

    @property
    def needs_workers(self) -> bool:
        """Whether some of its code is synchronous and not trusted, so that it must run in a worker process."""
        functions: list[object] = [self.reward, *(named.function for named in self.rewards.values())]
        if isinstance(self.agent, CommandAgent):
            functions.append(self.agent.reward)
        plays_async = self.environment is None or is_async_environment(self.environment)
        return not (self.trusted or (plays_async and all(one is None or is_async(one) for one in functions)))

    @property
    def runs_on_loop(self) -> bool:
        """Whether some of its code runs on the event loop of what plays it: coroutines, and all that is trusted."""
        functions = [self.reward, self.score_group, *(named.function for named in self.rewards.values())]
        plays_async = self.environment is None or is_async_environment(self.environment)
        return self.trusted or plays_async or any(one is not None and is_async(one) for one in functions)

    @property
    def all_required_columns(self) -> tuple[str, ...]:
        """With those of its agent and of its named rewards."""
        of_agent: tuple[str, ...] = getattr(self.agent, "required_columns", ())
        of_rewards = (column for reward in self.rewards.values() for column in reward.required_columns)
        return (*self.required_columns, *of_agent, *of_rewards)

    def train_task(self, index: int, *, seed: int = 0) -> Task:
        """The task of a training row. Raises `DataError` for a row without a required column."""
        return self._task(self.train_task_id(index), self.train_tasks, index, seed)

    def train_task_id(self, index: int) -> TaskId:
        """What the task of a training row is called."""
        return TaskId(f"{self.name}/train/{index}")

    def eval_task(self, index: int, *, seed: int = 0) -> Task:
        """The task of a held-out row. Raises `DataError` for a row without a required column."""
        return self._task(TaskId(f"{self.name}/eval/{index}"), self.eval_tasks, index, seed)

    def _task(self, task_id: TaskId, rows: TaskRows, index: int, seed: int) -> Task:
        row = rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"task {task_id} is a {type(row).__name__}; a task row maps column names to values")
        if isinstance(row, ClientRow):
            row.require(self.all_required_columns)
        elif missing := [column for column in self.all_required_columns if column not in row]:
            have = ", ".join(sorted(row)) or "none"
            raise DataError(
                f"task {task_id} has no column {missing[0]!r}, which environment {self.name!r} needs; "
                f"its columns are: {have}"
            )
        return Task(task_id=task_id, environment=self.name, index=index, row=row, seed=seed)


def end_early(environment: Environment) -> Observation | Awaitable[Observation]:
    """What an environment says where turns or tokens ran out; most say nothing."""
    return environment.end_early() if isinstance(environment, EndsEarly) else Observation()


def require_observation(returned: object) -> Observation:
    """What `reset` or `step` returned. Raises `EnvironmentFailed` unless it is an observation."""
    if not isinstance(returned, Observation):
        raise EnvironmentFailed(
            f"reset and step return an Observation; this environment returned a {type(returned).__name__}"
        ).as_mistake()
    return returned


def read_attributes(environment: Environment, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Json]:
    """The named attributes of an environment, to be saved; of the `optional` ones those that it has.

    Raises `SettingsError` for another one that it does not have.
    """
    values = {name: getattr(environment, name) for name in (*names, *optional) if hasattr(environment, name)}
    for name in names:
        if name not in values:
            raise SettingsError(
                f"{type(environment).__name__} has no attribute {name!r}, which its spec names under `columns`"
            )
    return values
