"""Agents that are programs: what they earn, what they may take, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tailrace.environments import (
    AgentResult,
    EnvironmentSettings,
    EnvironmentSpec,
    ProgramEnd,
    ProgramLimits,
    command_agent,
    load_environment,
)
from tailrace.environments.programs import marked
from tailrace.environments.programs.host import hosted
from tailrace.environments.programs.marked import MARK, marks
from tailrace.environments.programs.process import Program
from tailrace.errors import BudgetExceeded, InvalidReward, ProgramFailed, RolloutTimeout, SettingsError
from tailrace.gateway import Gateway
from tailrace.records import GroupId, Rollout, RolloutId
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter, RolloutSettings
from tests.support.descendants import still_run
from tests.support.loaded import loaded
from tests.support.program_environments import PROGRAM
from tests.support.scripted_generate import ScriptedGenerate

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes through /proc")

ASKING = [sys.executable, PROGRAM]
PATIENCE_S = 60.0
NO_DESCRIPTOR = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def reward(end: ProgramEnd) -> float:
    return 1.0 if end.messages[-1]["content"] == "HUSH" else 0.0


def spec_of(row: dict[str, str] | None = None, *, command: list[object] = ASKING, **agent: object) -> EnvironmentSpec:
    tasks = [{"word": "hush", **(row or {})}]
    agent = {"reward": reward, **agent}
    program = command_agent(command, **agent)  # type: ignore[arg-type]
    return EnvironmentSpec(name="own", agent=program, train_tasks=tasks, trusted=True)


async def run(
    renderer: ChatRenderer, spec: EnvironmentSpec, *, replies: Sequence[str] = ("HUSH",), **settings: object
) -> Rollout:
    chosen = RolloutSettings.model_validate({"timeout_s": PATIENCE_S, **settings})
    generate = ScriptedGenerate(renderer.tokenizer, replies)
    rollouter = Rollouter(
        chosen, loaded(spec, settings=chosen), renderer=renderer, generate=generate, endpoints=Gateway()
    )
    async with rollouter:
        return await rollouter.run(spec.train_task(0), rollout_id=RolloutId("r0"), group_id=GroupId("g0"))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's programs have their folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def alive() -> list[int]:
    """Processes of this test's programs."""
    found = []
    for pid, _ in marks():
        with suppress(psutil.Error):
            if psutil.Process(pid).environ().get("TMPDIR", "").startswith(tempfile.gettempdir()):
                found.append(pid)
    return found


def pipes() -> set[str]:
    """That this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            found.add(str(descriptor.readlink()))
    return {one for one in found if one.startswith("pipe:")}


def left() -> list[object]:
    """Processes of this test's programs, and their folders."""
    return [*alive(), *Path(tempfile.gettempdir()).iterdir()]


@pytest.mark.parametrize("task_in", ["environment", "file", "stdin"])
async def test_a_program_finds_its_task_and_policy_and_is_scored(renderer: ChatRenderer, task_in: str) -> None:
    rollout = await run(renderer, spec_of(task_in=task_in))
    assert rollout.reward is not None
    assert (rollout.reward.value, rollout.reward.columns["exit_status"]) == (1.0, 0)
    assert [message["content"] for message in rollout.messages] == ["hush", "HUSH"]
    assert [branch.num_completion_tokens > 0 for branch in rollout.branches] == [True]
    assert not left()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"behave": "write", "file": "reward.txt", "text": " 0.25\n"}, AgentResult(0.25)),
        ({"behave": "write", "file": "reward.json", "text": "0.5"}, AgentResult(0.5)),
        (
            {"behave": "write", "file": "reward.json", "text": '{"reward": 1, "metrics": {"right": 2}}'},
            AgentResult(1.0, {"right": 2.0}),
        ),
        ({"behave": "post"}, AgentResult(0.75)),
    ],
)
async def test_without_a_function_the_program_says_what_it_earned(
    renderer: ChatRenderer, row: dict[str, str], expected: AgentResult
) -> None:
    rollout = await run(renderer, spec_of(row, reward=None))
    assert rollout.reward is not None
    assert (rollout.reward.value, rollout.reward.components) == (expected.reward, expected.metrics)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "left no reward"),
        ({"behave": "write", "file": "reward.txt", "text": "good"}, "no number"),
        ({"behave": "write", "file": "reward.txt", "text": "nan"}, "must be finite"),
        ({"behave": "write", "file": "reward.json", "text": '{"rewards": 1}'}, "neither a number nor an object"),
        ({"behave": "write", "file": "reward.json", "text": "x" * 1_000_001}, "at most 1,000,000 bytes"),
    ],
)
async def test_a_reward_that_is_none_costs_the_rollout(renderer: ChatRenderer, row: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidReward, match=says):
        await run(renderer, spec_of(row, reward=None, task_in="file"))
    assert not left()


@pytest.mark.parametrize(
    ("behave", "limits", "reason", "says"),
    [
        ("exit", {}, "program_exit", r"ended with status 3; the end of its output:\nfirst line\nthe last line"),
        ("never ask", {}, "program_without_turn", "ended without a reply of the model; it printed nothing"),
        ("flood", {"output_bytes": 3_000_000}, "program_output", "printed more than 3 MB"),
        ("hang", {"time_s": 1.5}, "program_timeout", r"was ended after 1\.5 s"),
        ("memory", {"memory_bytes": 200_000_000}, "program_memory", "MB of memory, and may take 200 MB"),
        ("processes", {"processes": 4}, "program_processes", r"started \d+ processes, and may have 4 at once"),
    ],
)
async def test_a_program_that_fails_costs_its_rollout_and_says_why(
    renderer: ChatRenderer, behave: str, limits: dict[str, float], reason: str, says: str
) -> None:
    spec = spec_of({"behave": behave}, limits=ProgramLimits(**limits))  # type: ignore[arg-type]
    with pytest.raises(ProgramFailed, match=says) as raised:
        await run(renderer, spec)
    assert raised.value.reason == reason
    assert "task own/train/0" in str(raised.value)
    assert not left()


def fail_to_look(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
    """The next looks at processes fail with these."""
    left_to_raise = iter(errors)

    def look() -> Iterator[tuple[int, str]]:
        for error in left_to_raise:
            raise error
        return marks()

    monkeypatch.setattr(marked, "marks", look)


async def test_a_look_at_programs_that_fails_is_told_of_once_and_made_again(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_to_look(monkeypatch, NO_DESCRIPTOR, RuntimeError("can't start new thread"))
    spec = spec_of({"behave": "memory"}, limits=ProgramLimits(memory_bytes=200_000_000))
    with pytest.raises(ProgramFailed) as raised:
        await run(renderer, spec)
    assert raised.value.reason == "program_memory"
    assert caplog.text.count("could not be looked at") == 1
    assert not left()


async def test_a_mark_that_a_program_has_written_itself_ends_no_limit(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> Iterator[tuple[int, str]]:
        for pid, mark in marks():
            yield pid, f"{mark.partition('.')[0]}.{'1' * 5_000}"
            yield pid, mark

    monkeypatch.setattr(marked, "marks", look)
    spec = spec_of({"behave": "memory"}, limits=ProgramLimits(memory_bytes=200_000_000))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ProgramFailed) as raised:
            await run(renderer, spec)
    assert raised.value.reason == "program_memory"
    assert not left()


async def test_a_program_that_cannot_be_watched_is_ended_and_costs_its_rollout(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise NO_DESCRIPTOR

    before = pipes()
    with monkeypatch.context() as without:
        without.setattr(os, "pidfd_open", refuse)
        with pytest.raises(ProgramFailed, match="could not be started: Too many open files") as raised:
            await run(renderer, spec_of({"behave": "hang"}))
    assert raised.value.reason == "program_not_started"
    assert not left()
    assert pipes() <= before


async def test_a_program_is_reaped_although_nobody_can_look_for_what_it_left(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_look(monkeypatch, *[NO_DESCRIPTOR] * 3)
    assert (await run(renderer, spec_of({"behave": "leave a daemon"}))).reward is not None
    assert not left()


@pytest.mark.parametrize("behave", ["well", "exit"])
async def test_a_first_prompt_without_room_is_why_the_rollout_failed_whatever_the_program_did(
    renderer: ChatRenderer, tmp_path: Path, behave: str
) -> None:
    spec = spec_of({"behave": behave}, keep_failed=tmp_path / "failed")
    with pytest.raises(BudgetExceeded) as raised:
        await run(renderer, spec, max_tokens=2, max_rollout_tokens=3)
    why, program, *_, kept = str(raised.value).splitlines()
    assert re.fullmatch(r"task own/train/0: .* its \d+ tokens use up rollouts.max_rollout_tokens = 3", why)
    assert "asking_program.py" in program
    assert kept == f"(its folder is kept as {next((tmp_path / 'failed').iterdir())})"
    assert not left()


async def test_a_status_that_is_not_zero_can_be_scored(renderer: ChatRenderer) -> None:
    spec = spec_of({"behave": "exit"}, score_failures=True, reward=lambda end: end.status + len(end.output))
    rollout = await run(renderer, spec)
    assert rollout.reward is not None
    assert rollout.reward.value == 3 + len("first line\nthe last line\n")


@pytest.mark.parametrize("behave", ["leave a child", "leave a daemon"])
async def test_what_a_program_leaves_behind_is_ended_with_it(renderer: ChatRenderer, behave: str) -> None:
    counted: list[int] = []

    def count(end: ProgramEnd) -> float:
        counted.append(len(alive()))
        return 0.0

    await run(renderer, spec_of({"behave": behave}, reward=count))
    assert counted == [0]  # when it is scored
    assert not left()


async def test_a_rollouts_time_and_its_cancellation_end_the_program(renderer: ChatRenderer) -> None:
    spec = spec_of({"behave": "hang"})
    with pytest.raises(RolloutTimeout):
        await run(renderer, spec, timeout_s=1.5)
    assert not left()
    running = asyncio.create_task(run(renderer, spec))
    while not alive():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not left()


async def test_an_end_that_is_cancelled_leaves_no_pipe_open(tmp_path: Path) -> None:
    before = pipes()
    async with hosted() as host:
        program = Program(
            host,
            host.new_number(),
            [sys.executable, "-c", "import time; time.sleep(600)"],
            folder=tmp_path,
            environment=os.environ,
            standard_input=None,
            limits=ProgramLimits(),
        )
        closing = asyncio.create_task(program.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    async with asyncio.timeout(20):
        while not pipes() <= before:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    assert not alive()


async def test_the_example_program_calls_its_tool(renderer_of: Callable[[str], ChatRenderer]) -> None:
    seats = load_environment(EnvironmentSettings(name="examples.own_program:seats"))
    rows = [row for row in (*seats.train_tasks, *seats.eval_tasks) if row["names"] == ["Max", "Ada"]]
    spec = replace(seats, train_tasks=rows, eval_tasks=(), trusted=True)
    call = '<tool_call>\n{"name": "sits_by", "arguments": {"name": "Max"}}\n</tool_call>'
    rollout = await run(renderer_of("hermes"), spec, replies=[call, "Ada\nLeo"])
    assert rollout.reward is not None
    assert (rollout.reward.value, rollout.reward.components) == (1.0, {"right": 1.0, "tool_calls": 1.0})
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "Ada"


ASKS_AT_THE_BASE = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "hush"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_API_BASE"] + "/chat/completions", body, headers)
urllib.request.urlopen(request, timeout=60).read()
print(sorted(name for name, value in os.environ.items() if value == "the user's"))
"""


async def test_what_the_user_s_own_variables_say_of_providers_is_not_what_a_program_finds(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_BASE", "ANTHROPIC_API_BASE", "CLAUDE_CODE_USE_BEDROCK", "OPENAI_API_TYPE", "MY_OWN"):
        monkeypatch.setenv(name, "the user's")
    script = tmp_path / "asks.py"
    script.write_text(ASKS_AT_THE_BASE)
    seen: list[str] = []

    def look(end: ProgramEnd) -> float:
        seen.append(end.output)
        return 1.0

    await run(renderer, spec_of(command=[sys.executable, script], reward=look))
    assert seen == ["['MY_OWN']\n"]


async def test_only_so_many_programs_run_at_once(renderer: ChatRenderer, tmp_path: Path) -> None:
    most: list[int] = []

    async def look(end: ProgramEnd) -> float:
        return 0.0

    agent = command_agent([sys.executable, PROGRAM], reward=look, concurrency=2)
    spec = EnvironmentSpec(name="own", agent=agent, train_tasks=[{"word": "hush"}], trusted=True)
    running = asyncio.gather(*(run(renderer, spec) for _ in range(6)))
    while not running.done():
        most.append(len(alive()))
        await asyncio.sleep(0.005)
    assert len(await running) == 6
    assert 1 <= max(most) <= 2


async def test_a_failed_programs_folder_is_kept_where_asked_for(renderer: ChatRenderer, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    (template / "notes.txt").write_text("of the template")
    spec = spec_of({"behave": "exit"}, template=template, keep_failed=tmp_path / "kept")
    with pytest.raises(ProgramFailed, match="its folder is kept as") as raised:
        await run(renderer, spec)
    (kept,) = (tmp_path / "kept").iterdir()
    assert str(kept) in str(raised.value)
    assert (kept / "work" / "notes.txt").read_text() == "of the template"
    assert (kept / "work" / "said.txt").read_text() == "HUSH"
    assert list(template.iterdir()) == [template / "notes.txt"]
    assert not left()


async def test_a_row_that_is_too_long_for_a_variable_says_where_it_fits(renderer: ChatRenderer) -> None:
    with pytest.raises(Exception, match="write command_agent"):
        await run(renderer, spec_of({"long": "x" * 200_000}))
    rollout = await run(renderer, spec_of({"long": "x" * 200_000}, task_in="file"))
    assert rollout.reward is not None


async def test_a_synchronous_reward_is_called_in_a_worker_that_can_be_killed(renderer: ChatRenderer) -> None:
    settings = EnvironmentSettings(name="tests.support.program_environments:scored_apart")
    spec = load_environment(settings)
    chosen = RolloutSettings(workers=1, worker_timeout_s=2.0)
    environments = {spec.name: LoadedEnvironment.of(spec, chosen, settings)}
    generate = ScriptedGenerate(renderer.tokenizer, ["HUSH"])
    assert spec.needs_workers
    async with Rollouter(chosen, environments, renderer=renderer, generate=generate, endpoints=Gateway()) as rollouter:
        names = {"rollout_id": RolloutId("r0"), "group_id": GroupId("g0")}
        rollout = await rollouter.run(spec.train_task(0), **names)
        assert rollout.reward is not None
        assert rollout.reward.value == 4.0
        hanging = EnvironmentSpec(
            name=spec.name, agent=spec.agent, train_tasks=[{"word": "hush", "behave": "hang the reward"}]
        )
        with pytest.raises(RolloutTimeout, match="the reward function did not return"):
            await rollouter.run(hanging.train_task(0), **names)
    assert not left()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: command_agent(["no-such-program-here"]), "'no-such-program-here' is not on the PATH"),
        (lambda: command_agent(["bin/nothing"]), "'bin/nothing' is not there"),
        (lambda: command_agent([sys.executable, "no_such_agent.py"]), "there is no file 'no_such_agent.py'"),
        (lambda: command_agent([sys.executable], template="/no/such/folder"), "there is no such folder"),
        (lambda: command_agent([]), "names no program"),
        (lambda: command_agent("python agent.py"), "give a list"),
        (lambda: command_agent([sys.executable], limits=ProgramLimits(time_s=0)), "no program could keep to that"),
        (lambda: command_agent([sys.executable], concurrency=0), "no program could ever run"),
    ],
)
def test_a_command_that_is_missing_is_refused_when_its_environment_is_loaded(
    make: Callable[[], object], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        load_environment(
            EnvironmentSettings(name="own"),
            given=EnvironmentSpec(name="own", agent=make(), train_tasks=[{"word": "hush"}]),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("has_template", [False, True])
async def test_an_argument_may_be_longer_than_any_file_s_name(
    renderer: ChatRenderer, tmp_path: Path, has_template: bool
) -> None:
    template = tmp_path / "template"
    template.mkdir()
    spec = spec_of(command=[*ASKING, "a prompt " * 1000], template=template if has_template else None)
    rollout = await run(renderer, spec)
    assert rollout.reward is not None
    assert rollout.reward.value == 1.0


def test_a_process_that_is_killed_leaves_no_program_behind(tmp_path: Path) -> None:
    """Neither one that is being asked for a reward, nor a daemon that it started, nor their folder."""
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, contextlib, sys, types
            from tests.support.scripted_policy import ScriptedPolicy
            from tailrace.environments import EnvironmentSpec, command_agent

            class Policy(ScriptedPolicy):
                @contextlib.asynccontextmanager
                async def endpoint(self):
                    url = "http://127.0.0.1:9"
                    yield types.SimpleNamespace(root_url=url, openai_url=url, path_url=url, key="key")

            async def main():
                code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
                code += "time.sleep(600)'], start_new_session=True); print('begun', flush=True); time.sleep(600)"
                spec = EnvironmentSpec(name="own", agent=command_agent([sys.executable, "-c", code]), train_tasks=[{}])
                await asyncio.gather(*(spec.agent(spec.train_task(0), Policy(["a"])) for _ in range(3)))

            asyncio.run(main())
            """
        )
    )
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, f"{root}/src", os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(tmp_path),
    }
    parent = subprocess.Popen([sys.executable, script], env=environment, cwd=root)
    deadline_s = time.monotonic() + PATIENCE_S
    try:
        while len(found := _descending_from(parent.pid)) < 6:
            assert parent.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert still_run(found, PATIENCE_S) == []
        while list(tmp_path.glob("tailrace-programs-*")):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()


def _descending_from(pid: int) -> list[psutil.Process]:
    """Those that carry the mark."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if MARK in process.environ():
                found.append(process)
        except psutil.Error:
            continue
    return found
