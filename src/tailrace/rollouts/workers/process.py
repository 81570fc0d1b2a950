"""A rollout worker: runs users' synchronous environments and rewards in a process that can be killed.

Started by `WorkerPool` in a process group of its own. Calls run one after another on the main thread. A second thread
reads the pipe, so that the process ends when its parent does, even during a call that never returns.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

from tailrace.environments import Environment, EnvironmentSettings, EnvironmentSpec, Observation, load_environment
from tailrace.environments.callables import settled
from tailrace.environments.programs import CommandAgent
from tailrace.environments.protocol import end_early, read_attributes, require_observation
from tailrace.environments.results import as_agent_result
from tailrace.records import Json
from tailrace.rollouts.attribution import is_mistake, text_of
from tailrace.rollouts.workers.messages import (
    LENGTH_BYTES,
    Answer,
    Call,
    EndEarly,
    Hello,
    Load,
    Open,
    ReadAttributes,
    Request,
    Score,
    ScoreNamed,
    ScoreProgram,
    Step,
    hello_decoder,
    pack,
    request_decoder,
)
from tailrace.rollouts.workers.starting import restore_python_path


class RolloutWorker:
    """Environments by instance number, and the calls that they take."""

    def __init__(self, hello: Hello) -> None:
        self._settings = hello.environments
        self._specs: dict[str, EnvironmentSpec] = {}
        self._open: dict[int, Environment] = {}
        self._coroutines = asyncio.Runner()
        self._pid = os.getpid()

    @property
    def is_copy(self) -> bool:
        """Whether this process is one that user code forked."""
        return os.getpid() != self._pid

    def answer(self, request: Request) -> Answer:
        """Make the call. What user code raises becomes the answer's failure, also where it means to end the process."""
        for instance in request.closed:
            self._open.pop(instance, None)
        try:
            return Answer(value=self._do(request.call))
        except BaseException as error:  # user code may raise anything; the orchestrator raises it again
            if self.is_copy:
                raise  # it ends with the status that its maker may wait for
            return failure(error)

    def _do(self, call: Call) -> Json:
        match call:
            case Load(environment):
                self._spec(environment)
                return None
            case Open():
                return self._reopen(call)
            case Step(instance, reply):
                return self._observe(self._open[instance].step(reply))
            case EndEarly(instance):
                return self._observe(end_early(self._open[instance]))
            case ReadAttributes(instance, names, optional):
                return read_attributes(self._open[instance], names, optional)
            case Score(task, messages):
                reward = self._spec(task.environment).reward
                return as_agent_result(self._settled(reward(task, messages) if reward else None))
            case ScoreProgram(end):
                agent = self._spec(end.task.environment).agent
                assert isinstance(agent, CommandAgent)
                return as_agent_result(self._settled(agent.reward(end) if agent.reward else None))
            case ScoreNamed(task, rollouts, names, state):
                rewards, tasks = self._spec(task.environment).rewards, [task] * len(rollouts)
                return {name: self._settled(rewards[name].call(tasks, rollouts, state)) for name in names}

    def _reopen(self, call: Open) -> Observation:
        factory = self._spec(call.task.environment).environment
        assert factory is not None  # only reset/step environments are opened
        environment = factory()
        observation = self._observe(environment.reset(call.task))
        for reply in call.replies:
            observation = self._observe(environment.step(reply))
        self._open[call.instance] = environment
        return observation

    def _spec(self, environment: str) -> EnvironmentSpec:
        if environment not in self._specs:
            settings = EnvironmentSettings.model_validate_json(self._settings[environment])
            self._specs[environment] = load_environment(settings, with_tasks=False)
        return self._specs[environment]

    def _observe(self, result: Any) -> Observation:
        return require_observation(self._settled(result))

    def _settled(self, result: Any) -> Any:
        return self._coroutines.run(settled(result)) if inspect.isawaitable(result) else result


def failure(error: BaseException) -> Answer:
    """An answer with what was raised, and where."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Answer(failure=f"{type(error).__name__}: {text_of(error)}\n{trace}", is_mistake=is_mistake(error))


def main() -> None:
    """Answer calls until the orchestrator closes the pipe or vanishes."""
    restore_python_path()
    requests, answers = _take_pipes()
    hello = hello_decoder.decode(_read(requests))
    sys.path[:] = hello.module_path
    worker = RolloutWorker(hello)
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, arrived), daemon=True).start()
    while True:
        answer = worker.answer(request_decoder.decode(arrived.get()))
        if worker.is_copy:  # the call forked, and returns here as well: one answer is asked for
            os._exit(0)
        answers.write(_packed(answer))
        answers.flush()


def _packed(answer: Answer) -> bytes:
    try:
        return pack(answer)
    except (TypeError, ValueError, OverflowError) as error:
        return pack(failure(error))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes to ourselves: what user code prints goes to the log, what it reads is empty."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _receive(requests: BinaryIO, arrived: queue.SimpleQueue[bytes]) -> None:
    while body := _read(requests):
        arrived.put(body)
    _end()


def _read(requests: BinaryIO) -> bytes:
    """One message's body; empty where the pipe was closed."""
    return requests.read(int.from_bytes(requests.read(LENGTH_BYTES), "little"))


def _end() -> None:
    """End now, and with it whatever user code started in this process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
