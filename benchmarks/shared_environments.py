"""The shared tasks as Tailrace's environments; rows come from `--environment.data`."""

from __future__ import annotations

from benchmarks.shared_tasks import REWARDS

from tailrace.environments import EnvironmentSpec, Message, Task, single_turn_agent


def _environment(name: str) -> EnvironmentSpec:
    function = REWARDS[name]

    def reward(task: Task, messages: list[Message]) -> float:
        return function(messages[-1]["content"], task["answer"])

    return EnvironmentSpec(
        name=name,
        agent=single_turn_agent(),
        reward=reward,
        required_columns=("prompt", "answer"),
        trusted=True,
    )


length = _environment("length")
reverse = _environment("reverse")
