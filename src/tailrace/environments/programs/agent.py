"""An agent that is a program: started for each rollout, it asks the policy over HTTP.

    slot ─► folder ─► endpoint ─► process ─► it ends ─► all that it started is killed ─► reward ─► folder is removed

Any program that speaks to OpenAI's or Anthropic's API does: it finds the address and the key, which is the rollout,
where their clients look for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import urlsplit

from tailrace.environments.callables import is_async, settled
from tailrace.environments.programs.host import ProgramHost, hosted
from tailrace.environments.programs.process import Program, ProgramLimits
from tailrace.environments.programs.rewards import ProgramEnd, ProgramReward, read_reward
from tailrace.environments.results import AgentResult, as_agent_result
from tailrace.environments.rows import row_as_json
from tailrace.errors import EnvironmentFailed, InvalidReward, RolloutError, SettingsError
from tailrace.records import Task

if TYPE_CHECKING:
    from tailrace.environments.protocol import Endpoint, Policy

TaskIn: TypeAlias = Literal["environment", "file", "stdin"]
ScoreProgram: TypeAlias = Callable[[ProgramEnd], Awaitable[object]]

TASK, TASK_FILE, TASK_ID, TASK_SEED = "TAILRACE_TASK", "TAILRACE_TASK_FILE", "TAILRACE_TASK_ID", "TAILRACE_TASK_SEED"
ROLLOUT_URL = "TAILRACE_ROLLOUT_URL"
"""Variables of a program."""

_LONGEST_VARIABLE = 128 * 1024 - 64
"""Bytes of one variable of a process's environment (MAX_ARG_STRLEN of Linux), less those of its name."""
_FOREIGN = frozenset(
    {
        *("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID"),
        *("OPENAI_API_TYPE", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
    }
)
"""Of the user's own accounts: clients would send some beside the rollout's key, and ask elsewhere by the others."""
_MOST_KEPT = 100


def command_agent(
    command: Sequence[str | Path],
    *,
    reward: ProgramReward | None = None,
    task_in: TaskIn = "environment",
    template: str | Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    limits: ProgramLimits | None = None,
    score_failures: bool = False,
    keep_failed: str | Path | None = None,
    concurrency: int = 64,
) -> CommandAgent:
    """An agent that starts a program for each rollout.

    `command`: the program and its arguments. Files that it names relative to the current folder are found from the
    program's own, which is empty but for a copy of the folder `template`. `reward` scores the rollout by how the
    program ended; without it the program sends its reward to the gateway, or writes `reward.json` or `reward.txt`.
    `task_in`: where it finds the task's row as JSON, the variable `TAILRACE_TASK`, the file that `TAILRACE_TASK_FILE`
    names, or its standard input. `environment` is added to its variables. A program that ends with another status than
    0 fails its rollout unless `score_failures`. `keep_failed` is a folder for the folders of programs that failed, 100
    at most; one that `rollouts.timeout_s` ended is not among them. `concurrency`: how many run at once in one process
    of Tailrace; the others wait.

    >>> agent = command_agent([sys.executable, "-c", "print('hello')"], reward=lambda end: len(end.output))
    >>> agent.require_command()

    Raises `SettingsError` for values that make no sense.
    """
    if isinstance(command, str):
        raise SettingsError(f"command_agent({command!r}): give a list, the program and each of its arguments apart")
    if not command:
        raise SettingsError("command_agent([]): the command names no program")
    if concurrency < 1:
        raise SettingsError(f"command_agent(concurrency={concurrency}): no program could ever run; give 1 or more")
    if task_in not in ("environment", "file", "stdin"):
        raise SettingsError(f"command_agent(task_in={task_in!r}): expected 'environment', 'file' or 'stdin'")
    return CommandAgent(
        command=tuple(map(str, command)),
        reward=reward,
        task_in=task_in,
        template=None if template is None else Path(template).absolute(),
        environment=dict(environment),
        limits=limits or ProgramLimits(),
        score_failures=score_failures,
        keep_failed=None if keep_failed is None else Path(keep_failed).absolute(),
        concurrency=concurrency,
        base=Path.cwd(),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommandAgent:
    """What `command_agent` returns; its arguments are explained there."""

    command: tuple[str, ...]
    reward: ProgramReward | None
    task_in: TaskIn
    template: Path | None
    environment: Mapping[str, str]
    limits: ProgramLimits
    score_failures: bool
    keep_failed: Path | None
    concurrency: int
    base: Path
    """The current folder when it was made."""

    async def __call__(self, task: Task, policy: Policy) -> AgentResult:
        """One rollout, with a reward function that runs on the event loop."""
        return await self.play(task, policy)

    @property
    def needs_worker(self) -> bool:
        """Whether its reward function is synchronous."""
        return self.reward is not None and not is_async(self.reward)

    def require_command(self) -> None:
        """Raise `SettingsError` where its program, its script or its template is missing."""
        if self.template is not None and not self.template.is_dir():
            raise SettingsError(f"command_agent(template={str(self.template)!r}): there is no such folder")
        self._found_command()

    async def play(
        self, task: Task, policy: Policy, *, score: ScoreProgram | None = None, needs_reward: bool = False
    ) -> AgentResult:
        """One rollout. `score` calls the reward function, by default here; without any reward it may have to fail.

        Raises `ProgramFailed` where the program failed, and what the reward function raises.
        """
        async with (
            hosted() as host,
            host.slots(self, self.concurrency),
            policy.endpoint() as endpoint,
            self._workplace(host, task) as place,
            self._started(place, task, endpoint) as program,
        ):
            status = await program.ended()
            if status and not self.score_failures:
                raise program.failed_with(status)
            if not policy.messages:
                raise program.failed_silently()
            end = ProgramEnd(task, policy.messages, str(place.folder), status, program.output)
            result = await self._scored(end, endpoint, score or self._score_here, needs_reward=needs_reward)
            return replace(result, info={"exit_status": status, **result.info})

    async def _scored(
        self, end: ProgramEnd, endpoint: Endpoint, score: ScoreProgram, *, needs_reward: bool
    ) -> AgentResult:
        if self.reward is not None:
            return as_agent_result(await score(end))
        sent, written = endpoint.reported, await asyncio.to_thread(read_reward, end.folder)
        if sent is not None and written is not None:
            raise InvalidReward(
                "the program both sent a reward to the gateway and wrote one into a file: do one of them"
            )
        if (result := sent or written) is None and needs_reward:
            raise InvalidReward(
                "the program left no reward: it must send one to `$TAILRACE_ROLLOUT_URL/reward`, or write reward.json "
                "or reward.txt into its working folder; or give command_agent a `reward` function"
            )
        return result or AgentResult()

    async def _score_here(self, end: ProgramEnd) -> object:
        assert self.reward is not None  # it is called where there is one
        return await settled(self.reward(end))

    # ---- what a program is started with

    @contextlib.asynccontextmanager
    async def _started(self, place: _Workplace, task: Task, endpoint: Endpoint) -> AsyncIterator[Program]:
        row = row_as_json(task)
        program = Program(
            place.host,
            place.number,
            self._found_command(),
            folder=place.folder,
            environment=self._variables(place, task, endpoint, row),
            standard_input=place.task_file if self.task_in == "stdin" else None,
            limits=self.limits,
        )
        try:
            yield program
        finally:
            await program.close()

    def _variables(self, place: _Workplace, task: Task, endpoint: Endpoint, row: bytes) -> dict[str, str]:
        own = urlsplit(endpoint.root_url).hostname
        direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), own]))
        variables = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        variables |= {
            "PATH": _search_path(),
            "OPENAI_BASE_URL": endpoint.openai_url,
            "OPENAI_API_BASE": endpoint.openai_url,
            "OPENAI_API_KEY": endpoint.key,
            "ANTHROPIC_BASE_URL": endpoint.root_url,
            "ANTHROPIC_API_BASE": endpoint.root_url,
            "ANTHROPIC_API_KEY": endpoint.key,
            "NO_PROXY": direct,
            "no_proxy": direct,
            "TMPDIR": str(place.temporary),
            ROLLOUT_URL: endpoint.path_url,
            TASK_ID: task.task_id,
            TASK_SEED: str(task.seed),
        }
        match self.task_in:
            case "environment":
                variables[TASK] = row.decode()
            case "file":
                variables[TASK_FILE] = str(place.task_file)
        return {**variables, **self.environment}

    @contextlib.asynccontextmanager
    async def _workplace(self, host: ProgramHost, task: Task) -> AsyncIterator[_Workplace]:
        """A folder for the program, and its end: it is kept where asked for and the program failed."""
        row = row_as_json(task)
        if self.task_in == "environment" and len(row) > _LONGEST_VARIABLE:
            raise EnvironmentFailed(
                f"the row of task {task.task_id} has {len(row):,} bytes, too many for a variable of a process: write "
                "command_agent(..., task_in='file')"
            )
        place = _Workplace(host, number := host.new_number(), host.folder(number))
        making = asyncio.ensure_future(asyncio.to_thread(place.make, self.template, row))
        try:
            await asyncio.shield(making)
            yield place
        except RolloutError as error:
            if self.keep_failed is None:
                raise
            raise await self._kept(place, task, error, self.keep_failed) from error
        finally:
            await asyncio.wait({making})
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, place.root, ignore_errors=True))

    async def _kept(self, place: _Workplace, task: Task, failure: RolloutError, parent: Path) -> RolloutError:
        """The failure, which names the folder where the program's own is kept."""
        kept = await asyncio.to_thread(place.keep, parent, task.task_id.replace("/", "-"))
        where = f"its folder is kept as {kept}" if kept else f"{parent} holds {_MOST_KEPT} folders already"
        return failure.saying(f"{failure}\n({where})")

    # ---- its files

    def _found_command(self) -> list[str]:
        """The command, with paths of files that are there. Raises `SettingsError`."""
        program, *arguments = self.command
        if (own := self._own_file(program)) is not None:
            found: str | None = own
        else:
            found = shutil.which(str(self.base / program) if os.sep in program else program, path=_search_path())
        if found is None:
            where = "is not there" if os.sep in program else "is not on the PATH"
            raise SettingsError(f"command_agent: the command {program!r} {where} (from {self.base})")
        return [found, *map(self._argument, arguments)]

    def _argument(self, argument: str) -> str:
        if (own := self._own_file(argument)) is not None:
            return own
        path = self.base / argument
        if os.path.isfile(path):  # which any text may be asked about: some are too long for a path
            return str(path)
        if argument.endswith(".py"):
            raise SettingsError(f"command_agent: there is no file {argument!r} (from {self.base})")
        return argument

    def _own_file(self, name: str) -> str | None:
        """A file of the template, as the program's own folder has it."""
        if self.template is None or not os.path.isfile(self.template / name) or os.path.isabs(name):
            return None
        return os.path.join(os.curdir, name)


@dataclass(frozen=True, slots=True)
class _Workplace:
    """The folders of one program: its own, and what is beside it."""

    host: ProgramHost
    number: int
    root: Path

    @property
    def folder(self) -> Path:
        """Where the program runs."""
        return self.root / "work"

    @property
    def temporary(self) -> Path:
        """For its temporary files."""
        return self.root / "tmp"

    @property
    def task_file(self) -> Path:
        """The task's row."""
        return self.root / "task.json"

    def make(self, template: Path | None, row: bytes) -> None:
        """All of it. Raises `OSError`."""
        self.root.mkdir(mode=0o700)
        self.temporary.mkdir()
        if template is None:
            self.folder.mkdir()
        else:
            shutil.copytree(template, self.folder, symlinks=True)
        self.task_file.write_bytes(row)

    def keep(self, parent: Path, name: str) -> Path | None:
        """Move it to where it stays; None where too many stay there already."""
        parent.mkdir(parents=True, exist_ok=True)
        if len(os.listdir(parent)) >= _MOST_KEPT:
            return None
        return Path(shutil.move(self.root, parent / f"{name}-{os.getpid()}-{self.number}"))


def _search_path() -> str:
    """Programs of this very Python come first: `python` has the packages that Tailrace has."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
