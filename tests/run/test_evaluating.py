"""Evaluations with the generators that a training run would use."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tailrace.config import RunSettings
from tailrace.config.sources import recipe_folder
from tailrace.environments import EnvironmentSpec, Policy, Task
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.free_ports import free_port
from tailrace.generation.engines.torch.engine import TorchEngine
from tailrace.records import GroupId, RolloutId
from tailrace.run.evaluating import EnvironmentEvaluation, evaluate_model, save_rollouts, unevaluated
from tailrace.scheduling import EvaluationResult
from tailrace.scheduling.groups import UNSCORED
from tailrace.transport.owned_folders import shared_memory_folder
from tests.run.runs import environment, records, tiny_settings
from tests.run.test_serve import address_of, serving
from tests.scheduling import world

INLINE = ("--placement", "inline")
ASKING = ("--environment.name", "tests.support.program_environments:asking")
"""Its agents need an address of their policy."""
GREEDY = ("--rollouts.evaluation.temperature", "0")


def settings(*overrides: str) -> RunSettings:
    return tiny_settings(*GREEDY, *overrides)


async def rewards(*overrides: str) -> list[float]:
    [found] = await evaluate_model(settings(*overrides), limit=6)
    assert found.result.failed == {}
    return found.result.rewards


async def test_several_generators_measure_what_one_does_in_this_process_and_leave_nothing() -> None:
    alone = await rewards(*INLINE)
    assert len(alone) == 6
    assert await rewards("--generator.replicas", "2") == alone
    assert not [*shared_memory_folder().glob(f"tailrace-run-{os.getpid()}-*")]


async def test_an_evaluation_in_this_process_waits_for_its_engine_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's thread that runs on would abort a command that ends with it."""
    close, closing = TorchEngine.close, list[threading.Thread]()

    def take_long(engine: TorchEngine) -> None:
        closing.append(threading.current_thread())
        time.sleep(0.3)
        close(engine)

    monkeypatch.setattr(TorchEngine, "close", take_long)
    await rewards(*INLINE)
    assert [thread.is_alive() for thread in closing] == [False]


async def test_what_the_settings_say_of_the_trainer_changes_nothing() -> None:
    assert await rewards("--trainer.ranks", "2") == await rewards(*INLINE)


async def test_as_many_rollouts_run_as_the_generators_that_are_started_have_slots_for() -> None:
    """And not those that might join a run."""
    running = most = 0

    async def agent(task: Task, policy: Policy) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await policy.chat([{"role": "user", "content": str(task["word"])}])
        running -= 1
        return 0.0

    words = [{"word": f"word {number}"} for number in range(8)]
    counted = EnvironmentSpec(name="counted", agent=agent, train_tasks=words, held_out=6, trusted=True)
    elastic = ("--generator.replicas", "{min = 1, max = 4}", "--generator.slots", "2")
    [found] = await evaluate_model(settings(*elastic, "--environment.name", "counted"), given={"counted": counted})
    assert (len(found.result.rewards), most) == (6, 2)


async def test_greedy_decoding_is_measured_beside_what_the_settings_ask_for(tmp_path: Path) -> None:
    [found] = await evaluate_model(tiny_settings(*INLINE), limit=6, greedy=True)
    save_rollouts([found], tmp_path / "rollouts.jsonl", "save")
    assert found.greedy is not None
    assert found.greedy.rewards == await rewards(*INLINE)
    assert found.result.rewards != found.greedy.rewards
    sampling = [record["sampling"]["temperature"] for record in records(tmp_path / "rollouts.jsonl")]
    assert sampling == [1.0] * 6 + [0.0] * 6


async def test_generators_that_run_already_measure_the_model_that_they_serve_whatever_it_is_called() -> None:
    folder = str(recipe_folder() / "models" / "quickstart")
    with serving("--address", "tcp://127.0.0.1:0", model=folder) as process:
        assert await rewards("--generator.connect", address_of(process)) == await rewards(*INLINE)


async def test_generators_that_fail_before_they_served_fail_the_evaluation_once() -> None:
    with pytest.raises(SettingsError, match=r"generator\.device = 'xpu:7' cannot be used here"):
        await evaluate_model(settings("--generator.replicas", "2", "--generator.device", "xpu:7"), limit=2)


async def test_an_environment_that_no_worker_can_load_fails_the_evaluation_once() -> None:
    held_out = ("--environment.eval_tasks", "1")
    with pytest.raises(EnvironmentFailed, match="not in a worker"):
        await evaluate_model(settings(*INLINE, *environment("loading_only_here"), *held_out))


async def test_an_environment_that_cannot_be_closed_costs_no_figures(caplog: pytest.LogCaptureFixture) -> None:
    assert len(await rewards(*INLINE, *environment("closing"), "--environment.args.how", "raise")) == 6
    assert caplog.text.count("environment 'closing' could not be closed: of the close") == 1


@pytest.mark.parametrize(("came_back", "says"), [(0, "20 of 20"), (1, "19 of 20"), (2, "")])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_an_environment_of_which_hardly_a_rollout_came_back_could_not_be_evaluated(
    came_back: int, says: str, is_greedy: bool
) -> None:
    task = world.environment().train_task(0)
    rollout = world.make_rollout(task, GroupId("g"), RolloutId("r"), reward=1.0)
    whole = EvaluationResult([rollout], {})
    lost = EvaluationResult([rollout] * came_back, {"environment_failed": 20 - came_back}, "it is away")
    measured = EnvironmentEvaluation("toy", whole if is_greedy else lost, lost if is_greedy else None, wall_s=1.0)
    told = f"environment 'toy' could not be evaluated: {says} rollouts were lost; the newest failure: it is away"
    assert unevaluated([measured]) == [told] * bool(says)


def test_rollouts_that_are_kept_without_a_reward_came_back() -> None:
    task = world.environment().train_task(0)
    rollout = world.make_rollout(task, GroupId("g"), RolloutId("r"), reward=1.0)
    rollout.reward = None
    assert unevaluated([EnvironmentEvaluation("toy", EvaluationResult([rollout], {UNSCORED: 1}), None, 1.0)]) == []


async def test_an_evaluation_needs_no_port_for_agents_that_ask_for_no_address() -> None:
    """As beside a run with the same settings."""
    port = free_port(count=2)
    apart = ("--rollouts.agent_workers", "1", "--gateway.port", str(port))
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
        assert await rewards(*apart) == await rewards(*INLINE)
        with pytest.raises(SettingsError, match=rf"gateway\.port = {port + 1}: cannot listen there .* or port 0"):
            await evaluate_model(settings(*apart, *ASKING), limit=1)
