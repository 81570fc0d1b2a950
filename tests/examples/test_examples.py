"""Every example does what its first lines say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.records import RunStatus
from tests.run.runs import records, run_inline
from tests.support.bundled_models import save_with_other_weights
from tests.support.scripted_policy import calls, play

ROOT = Path(__file__).parents[2]


async def test_own_agent_rewards_the_names_in_order() -> None:
    spec = load_environment(EnvironmentSettings(name="examples.own_agent:first_names"))
    task = spec.train_task(0)
    by_last_letter = sorted(task["names"], key=lambda name: name[::-1].lower())
    assert (await play(spec, task, ["\n".join(by_last_letter)])).reward == 1.0
    assert (await play(spec, task, ["no names"])).reward == 0.0
    assert len(spec.eval_tasks) == 32


async def test_own_environment_rewards_the_quicker_guess() -> None:
    spec = load_environment(EnvironmentSettings(name="examples.own_environment:guess_the_name"))
    task = spec.train_task(5)
    first, _, name, *_ = sorted(task["names"])
    assert (await play(spec, task, [name])).reward == 1.0
    assert (await play(spec, task, [first, name])).reward == pytest.approx(2 / 3)
    assert (await play(spec, task, [first] * 3)).reward == 0.0
    assert (await play(spec, task, [f"{first}\n{name}"] * 3)).reward == pytest.approx(2 / 3)


async def test_own_dataset_rewards_each_right_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = load_environment(
        EnvironmentSettings(name="examples.own_dataset:rest", data="examples/names.jsonl", eval_tasks=4)
    )
    task = spec.train_task(0)
    assert (await play(spec, task, [task["answer"]])).reward == 1.0
    assert (await play(spec, task, [task["answer"].split("\n")[0]])).reward == pytest.approx(2 / 3)
    assert len(spec.eval_tasks) == 4


async def test_own_tool_looks_neighbours_up_and_learns_from_a_refusal() -> None:
    loaded = load_environment(EnvironmentSettings(name="examples.own_tool:seats"))
    spec = replace(loaded, train_tasks=[{"names": ["Max", "Ada"]}])
    task = spec.train_task(0)
    script = [calls("sits_by", {"name": "Bob"}), calls("sits_by", {"name": "Max"}), "Ada\nLeo"]
    result = await play(spec, task, script)
    assert (result.reward, result.metrics["tool_calls"]) == (pytest.approx(1.0), 2)
    assert 0.0 < ((await play(spec, task, ["Ada"])).reward or 0.0) < 0.8


async def test_the_class_in_trls_form_counts() -> None:
    spec = load_environment(EnvironmentSettings(name="examples.trl_increment:increment"))
    result = await play(spec, spec.train_task(0), [*(calls("increment", {"step": n}) for n in range(1, 4)), "Done."])
    assert result.metrics["tool_errors"] == 0.0
    alone = load_environment(EnvironmentSettings(name="examples.trl_increment:IncrementEnv"))
    results = [await play(alone, alone.train_task(0), [calls("increment", {"step": n}), "."]) for n in range(1, 7)]
    assert sorted(one.reward or 0.0 for one in results) == [0.0] * 5 + [1.0]


async def test_the_mcp_agent_asks_the_server_beside_it() -> None:
    pytest.importorskip("mcp")
    spec = load_environment(EnvironmentSettings(name="examples.mcp_agent:seats"))
    task = replace(spec.train_task(0), row={"prompt": "Who sits beside Max?", "names": ["Max"]})
    script = [calls("sits_by", {"name": "Bob"}), calls("sits_by", {"name": "Max"}), "Ada"]
    result = await play(spec, task, script)
    assert (result.reward, result.metrics["right"]) == (pytest.approx(1.0), 1.0)
    assert (await play(spec, task, ["Ada"])).reward == pytest.approx(0.8)


async def test_the_example_of_verifiers_scores_by_its_rubric() -> None:
    pytest.importorskip("verifiers")
    spec = load_environment(EnvironmentSettings(name="examples.verifiers_gym:chain_sums"))
    task = spec.train_task(0)
    answer = eval(task["question"].split(": ")[1].rstrip(" ="))
    assert (await play(spec, task, [str(answer)])).reward == 1.0
    assert 0 < (await play(spec, task, [f"It is {answer}."])).reward < 1
    assert len(spec.eval_tasks) == 200


ADAPTED = [ROOT / f"examples/{name}.py" for name in ("mcp_agent", "trl_increment", "verifiers_gym")]
RUNNABLE = [*(ROOT / "examples").glob("own_*.py"), *ADAPTED]


@pytest.mark.parametrize("path", sorted(RUNNABLE), ids=lambda path: path.stem)
def test_every_example_names_itself_in_the_command_that_runs_it(path: Path) -> None:
    named = re.findall(r"--environment\.name (\S+)", path.read_text())
    assert named
    assert all(name.startswith(f"examples.{path.stem}:") for name in named)


async def test_own_teacher_teaches_without_a_reward(tmp_path: Path) -> None:
    teacher = save_with_other_weights(tmp_path / "teacher")
    taught = ("--trainer.loss.distillation.model", teacher, "--trainer.loss.distillation.top_k", "8")
    summary = await run_inline(
        tmp_path, "--environment.name", "examples.own_teacher:names", *taught, "--max_steps", "2"
    )
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 2)
    for line in records(tmp_path / "run" / "metrics.jsonl"):
        assert line["training/reward_loss"] == 0
        assert line["training/distillation"] > 0.01
        assert line["training/grad_norm"] > 0


async def test_the_stalling_reward_compares_letter_by_letter() -> None:
    spec = load_environment(EnvironmentSettings(name="examples.stalling_reward:copy_text"))
    task = spec.train_task(0)
    assert (await play(spec, task, [task["reference"]])).reward == 1.0
    assert 0.0 < (await play(spec, task, ["The mill"])).reward < 0.5
    mended = load_environment(EnvironmentSettings(name="examples.stalling_reward:mended"))
    assert (spec.trusted, mended.trusted) == (True, False)
