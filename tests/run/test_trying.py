"""`tailrace try` with the bundled model: what it shows, and what it finds wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.config import placed
from tailrace.errors import SettingsError
from tailrace.run.trying import settings_to_try, try_environments
from tests.run.runs import TINY
from tests.support.bundled_models import copy_bundled

HERE = "tests.support.run_environments"


async def tried(name: str, *overrides: str, tasks: int = 2, group_size: int = 2, tokens: bool = False) -> str:
    settings, _, _ = settings_to_try(f"{HERE}:{name}", "quickstart", [*TINY, *overrides])
    [(_, text)] = await try_environments(settings, tasks=tasks, group_size=group_size, tokens=tokens)
    return text


async def test_what_goes_wrong_in_rollouts_is_told_with_the_first_traceback_of_each_kind() -> None:
    text = await tried("troubled", "--environment.eval_tasks", "0", tasks=8, group_size=1)
    wrong = text.partition("wrong with troubled:")[2]
    assert re.search(r"1 failure of the kind environment_failed; the first: .*ZeroDivisionError: of the user", wrong)
    assert "Traceback" in wrong
    assert "in trouble" in wrong
    assert re.search("2 failures of the kind invalid_reward; the first: .*it must be", wrong)
    assert re.search(r"1 failure of the kind budget_exceeded; the first: .*context of 512 \(.*max_cache_tokens", wrong)
    assert "rollouts had a reply cut at 6 tokens" in wrong
    assert "it holds no task out" in wrong


async def test_what_holds_the_loop_never_chats_or_rewrites_history_is_told() -> None:
    text = await tried("blocking", "--rollouts.max_turns", "2")
    assert re.search(r"it held the event loop, for up to .* s:\n(.*\n)* .*run_environments.py", text)
    assert "2 of 4 rollouts never called policy.chat" in text
    assert "turns rewrote the conversation's past" in text
    assert "in 1 of 2 groups all rewards are equal" in text


async def test_what_an_agent_itself_cut_is_not_laid_to_the_settings_and_errors_write_no_colours() -> None:
    text = await tried("terse", tasks=3)
    assert "2 of 4 rollouts had a reply cut before rollouts.max_tokens = 6: by the agent's own max_tokens" in text
    assert "raise rollouts.max_tokens" not in text
    assert "ValueError: \\x1b[31mred" in text
    assert "\x1b" not in text


async def test_rewards_that_differ_are_not_trainable_where_no_rollout_has_a_token() -> None:
    settings, _, _ = settings_to_try(f"{HERE}:muttering", "quickstart", TINY)
    [(trial, text)] = await try_environments(settings, tasks=2, group_size=2)
    assert "4 of 4 rollouts never called policy.chat: there is no token to train on" in text
    assert len({*trial.rewards}) > 1
    assert not trial.is_trainable


async def test_prompt_reply_reward_and_times_are_shown_and_the_prompts_tokens_where_asked_for() -> None:
    text = await tried("talking", "--rollouts.max_turns", "2", "--environment.eval_tasks", "8", tasks=1)
    assert re.search(r'task talking/train/\d+: {"word":"word \d+"}', text)
    assert re.search(r"prompt of \d+ tokens\n    <\|im_start\|>user\n    word \d+<\|im_end\|>", text)
    assert len(re.findall(r"reward \d\.\d{3}\n  user       word \d+\n  assistant  ", text)) == 2
    assert len(re.findall(r"generate .*s · environment .*s · 2 turns · \d+ tokens sampled", text)) == 2
    assert re.search(r"\d+:'<\|im_start\|>' ", await tried("words", tasks=1, group_size=1, tokens=True))


async def test_a_model_s_own_context_is_the_limit_as_it_is_in_a_run(tmp_path: Path) -> None:
    short = str(copy_bundled(tmp_path / "short", max_position_embeddings=32))
    text = await tried("words", "--model.name", short, "--rollouts.max_tokens", "30")
    assert re.search(r"a first prompt has \d+ tokens: of the 32 that prompt and reply may have together \(the", text)
    assert "failure" not in text


def test_the_command_ends_with_1_where_nothing_could_be_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", f"{HERE}:praising", "--tasks", "1", "--each", "2", *TINY]) == 1
    printed = capsys.readouterr().out
    assert "every reward is 1, so there would be nothing to train on: the task is too easy" in printed


def test_an_error_of_more_than_a_rollout_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", f"{HERE}:demonstrating", *TINY]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error environment 'demonstrating' demonstrates replies, and nothing would learn from them")


def test_a_single_reward_shows_nothing_wrong_and_the_command_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "alphabet-sort", "--tasks", "1", "--each", "1"]) == 0
    assert "nothing is wrong, as far as this shows" in capsys.readouterr().out


def test_a_recipe_is_tried_with_all_of_its_own() -> None:
    settings, recipe, overrides = settings_to_try("mixed", "quickstart", ["--max_steps", "3"])
    assert (recipe, overrides, len(settings.environments)) == ("mixed", ["--max_steps", "3"], 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own:x", {"name": "own:x", "max_turns": 2}),
        (
            "reverse-text",
            {"name": "reverse-text", "weight": 1, "group_size": 16, "max_tokens": 48, "max_turns": 2, "timeout_s": 30},
        ),
    ],
)
def test_of_a_recipe_with_several_environments_one_is_tried(name: str, expected: dict[str, object]) -> None:
    settings, recipe, overrides = settings_to_try(name, "mixed", ["--environment.max_turns", "2"])
    (tried_one,) = settings.environments
    assert tried_one.model_dump(exclude_unset=True) == expected
    with placed(recipe, overrides):
        pass


@pytest.mark.parametrize(("name", "tried_ids"), [("short", ["short"]), ("arithmetic", ["short", "long"])])
def test_of_several_environments_an_id_names_one_of_those_with_the_same_name(
    tmp_path: Path, name: str, tried_ids: list[str]
) -> None:
    entries = [f"[[environments]]\nname = 'arithmetic'\nid = '{one}'\n" for one in ("short", "long")]
    path = tmp_path / "two.toml"
    path.write_text("max_steps = 1\nmodel.name = 'bundled:quickstart'\n" + "".join(entries))
    settings, *_ = settings_to_try(name, str(path), [])
    assert [environment.id for environment in settings.environments] == tried_ids


async def test_what_a_run_would_be_refused_for_is_refused() -> None:
    with pytest.raises(SettingsError, match="has no 'nowhere'"):
        await tried("nowhere")
