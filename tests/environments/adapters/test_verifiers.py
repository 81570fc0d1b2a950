"""Environments of verifiers 0.3 play and score by themselves; what they see is what was sampled."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tailrace.environments import EnvironmentSettings, EnvironmentSpec, load_environment, verifiers_environment
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.rollouts import ChatRenderer
from tests.environments.adapters.playing import call, play
from tests.support.scripted_policy import play as play_here

vf: Any = pytest.importorskip("verifiers")
pytest.importorskip("reasoning_gym")

from tests.support import verifiers_gym as gym  # noqa: E402 - imports verifiers

HERE = "tests.environments.adapters.test_verifiers"
GYM = EnvironmentSettings(name="verifiers", args={"id": "verifiers-gym", "num_train_examples": 8})


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed: verifiers finds it by its id."""
    monkeypatch.setitem(sys.modules, "verifiers_gym", gym)


def adding() -> EnvironmentSpec:
    return verifiers_environment(gym.adding(), name="adding", state_columns=["said", "trajectory"])


async def test_chain_sum_of_reasoning_gym_runs_as_it_is(renderer: ChatRenderer) -> None:
    spec = load_environment(GYM)
    row = spec.train_tasks[3]
    entry = gym.load_environment(num_train_examples=8).rg_dataset[int(row["answer"])]
    assert len(spec.eval_tasks) == 4
    for said, reward in ((f"<answer>{entry['answer']}</answer>", 1.0), ("<answer>no</answer>", 0.0)):
        played = await play(renderer, GYM, [said], index=3)
        assert played.rollout.reward is not None
        assert played.rollout.reward.value == pytest.approx(reward, abs=0.05)
        assert played.rollout.reward.components["format_reward_func"] == 1.0
        assert played.rollout.reward.columns == {"stop_condition": "max_turns_reached"}


async def test_its_trajectory_has_the_tokens_that_were_sampled(renderer: ChatRenderer) -> None:
    environment = EnvironmentSettings(name=f"{HERE}:adding")
    played = await play(renderer, environment, [call("add", a=2, b=3) + " Hm.", "5"])
    rollout = played.rollout
    assert rollout.reward is not None
    assert (rollout.reward.value, rollout.reward.columns["said"]) == (2.0, "5")
    assert rollout.reward.components["total_tool_calls"] == 1.0
    (branch,) = rollout.branches
    steps = [step["tokens"] for step in rollout.reward.columns["trajectory"]]
    assert len(steps) == 2
    for step, (start, end) in zip(steps, branch.completion_spans, strict=True):
        assert step["prompt_ids"] == branch.token_ids[:start].tolist()
        assert step["completion_ids"] == branch.token_ids[start:end].tolist()
        assert step["completion_logprobs"] == branch.logprobs[start:end].tolist()
        assert (set(step["prompt_mask"]), set(step["completion_mask"])) == ({0}, {1})


async def test_an_episode_that_uses_up_its_turns_is_scored_as_it_is(renderer: ChatRenderer) -> None:
    environment = EnvironmentSettings(name=f"{HERE}:adding", max_turns=2)
    played = await play(renderer, environment, [call("add", a=2, b=3)])
    assert played.rollout.reward is not None
    assert played.rollout.turns == 2
    assert (played.rollout.reward.value, played.rollout.reward.columns["stop_condition"]) == (0.0, "prompt_too_long")


def wishing(**wish: Any) -> EnvironmentSpec:
    return verifiers_environment(gym.wishing(**wish), name="wishing")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"sampling_args": {"top_k": 5}}, r"samples with top_k = 5; of its own it may set max_tokens"),
        ({"model": "gpt-6"}, "asks for the model 'gpt-6' beside the policy"),
    ],
)
async def test_what_the_policy_cannot_do_is_refused_by_name(wish: dict[str, Any], says: str) -> None:
    spec = wishing(**wish)
    with pytest.raises(SettingsError, match=says):
        await play_here(spec, spec.train_task(0), ["5"])


OWN_SAMPLING = {"max_tokens": 3, "temperature": 0.5, "n": 1}
limited = wishing(sampling_args=OWN_SAMPLING)
made_limited = verifiers_environment(gym.adding(sampling_args=OWN_SAMPLING), name="made_limited")


@pytest.mark.parametrize("name", ["limited", "made_limited"])
async def test_its_own_limits_hold(renderer: ChatRenderer, name: str) -> None:
    played = await play(renderer, EnvironmentSettings(name=f"{HERE}:{name}"), ["5 and much more than that"])
    (branch,) = played.rollout.branches
    assert (branch.num_completion_tokens, branch.temperature) == (3, 0.5)
    assert played.rollout.truncated


async def test_an_error_inside_it_costs_the_rollout() -> None:
    class Broken(gym.Wishes):  # type: ignore[misc]
        async def setup_state(self, state: Any) -> Any:
            raise vf.InfraError("no sandbox is left")

    broken = Broken(dataset=gym.Dataset.from_list(gym.ROWS), rubric=vf.Rubric(funcs=[gym.near]))
    spec = verifiers_environment(broken)
    with pytest.raises(EnvironmentFailed, match="no sandbox is left"):
        await play_here(spec, spec.train_task(0), ["5"])


def with_images() -> Any:
    content = [{"type": "image_url", "image_url": {"url": "data:"}}]
    rows = [{"prompt": [{"role": "user", "content": content}], "answer": "5"}]
    return gym.adding(dataset=gym.Dataset.from_list(rows))


def group_of(**changes: Any) -> Any:
    """An environment in a group inside a group."""
    inner = vf.EnvGroup(envs=[gym.adding(), gym.adding(**changes)], env_names=["one", "two"])
    return vf.EnvGroup(envs=[inner], env_names=["inner"])


async def together(completions: list[Any]) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: verifiers_environment("chain_sum"), "is a str, no verifiers.Environment"),
        (lambda: verifiers_environment(gym.adding(score_rollouts=False)), "score_rollouts = False"),
        (lambda: verifiers_environment(gym.adding(rubric=vf.Rubric(funcs=[together]))), "rollouts of a group together"),
        (lambda: verifiers_environment(group_of(rubric=vf.Rubric(funcs=[together]))), "rollouts of a group together"),
        (lambda: verifiers_environment(gym.adding(sampling_args={"top_p": 0.9})), r"samples with top_p = 0\.9"),
        (lambda: verifiers_environment(with_images()), "content of type 'image_url'"),
        (
            lambda: verifiers_environment(gym.simulated(gym.Simulated), name="chat"),
            r"chat: Simulated\.env_response asks for the model 'gpt-6' beside the policy",
        ),
        (
            lambda: verifiers_environment(gym.simulated(gym.SimulatedByAttribute)),
            r"SimulatedByAttribute\.env_response asks for the model 'gpt-6'",
        ),
        (
            lambda: verifiers_environment(gym.simulated(gym.SimulatedByVariable)),
            r"SimulatedByVariable\.env_response asks for the model 'gpt-6'",
        ),
        (
            lambda: verifiers_environment(
                vf.EnvGroup(envs=[gym.adding(), gym.simulated(gym.Simulated)], env_names=["one", "two"])
            ),
            "asks for the model 'gpt-6' beside the policy",
        ),
        (lambda: load_environment(EnvironmentSettings(name="verifiers", args={"id": "no-such"})), "no_such"),
        (lambda: load_environment(EnvironmentSettings(name="verifiers")), "args.id is missing"),
        (
            lambda: load_environment(EnvironmentSettings(name="verifiers", args={"id": "verifiers-gym", "gum": "x"})),
            "unexpected keyword argument 'gum'",
        ),
    ],
)
def test_what_it_cannot_do_is_told_when_it_is_loaded(make: Callable[[], object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make()


def test_a_simulator_with_a_client_of_its_own_is_none_of_our_business() -> None:
    assert verifiers_environment(gym.simulated(gym.SimulatedByItsClient)).name == "SimulatedByItsClient"


async def test_a_simulator_whose_model_is_chosen_in_a_turn_is_refused_in_that_turn() -> None:
    spec = verifiers_environment(gym.simulated(gym.SimulatedInTurns))
    with pytest.raises(SettingsError, match="asks for the model 'gpt-6' beside the policy"):
        await play_here(spec, spec.train_task(0), ["5", "6"])


def test_it_is_made_in_any_thread_and_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as aside:
        spec = aside.submit(verifiers_environment, gym.adding).result()
    assert verifiers_environment(gym.adding).name == spec.name == "ToolEnv"
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.types", None)
    with pytest.raises(SettingsError, match=r'pip install "tailrace\[verifiers\]"'):
        load_environment(GYM)


def test_it_is_played_apart_where_code_of_others_is() -> None:
    from tailrace.environments.registry import is_built_in

    assert not is_built_in("verifiers")
