from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from tailrace.config import (
    RunSettings,
    list_recipes,
    load_from_python,
    load_settings,
    plan_run,
    settings_reference,
    simulation_reference,
    with_decay_end,
)
from tailrace.config.problems import ELSEWHERE_CALLED
from tailrace.config.sections import all_keys, end_of
from tailrace.config.serving import joined_settings, load_serve_settings
from tailrace.errors import SettingsError
from tailrace.simulation import SimulationPlan
from tailrace.training.settings.components import ReferenceKlSettings
from tailrace.training.settings.losses import (
    CispoSettings,
    ClippedRatioSettings,
    CommonLossSettings,
    DapoSettings,
    DrGrpoSettings,
    GrpoSettings,
    GspoSettings,
    IpoSettings,
    OwnLossSettings,
)
from tailrace.training.settings.masks import IcePopSettings
from tailrace.training.settings.trainer import TrainerSettings

TEACHER = ("--trainer.loss.distillation.url", "http://teacher/v1", "--trainer.loss.distillation.model", "big")
MINIMAL = """
max_steps = 10

[model]
name = "bundled:quickstart"

[[environments]]
name = "alphabet-sort"

[rollouts]
group_size = 8
"""


HUGE = (
    *("rollouts.group_size", "rollouts.workers", "generator.slots", "generator.threads", "generator.replicas"),
    *("generator.max_cache_tokens", "scheduling.row_tokens", "trainer.threads"),
)


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write_file(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write_file


def test_every_packaged_recipe_loads() -> None:
    for name in list_recipes():
        assert load_settings(name).name == name


def test_a_file_names_its_run(write) -> None:  # type: ignore[no-untyped-def]
    assert load_settings(write(MINIMAL)).name == "run"


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'quickstart'"):
        load_settings("quikstart")


def test_the_folder_of_a_run_in_place_of_a_recipe_says_which_file_goes_on_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(MINIMAL)
    with pytest.raises(SettingsError, match=rf"give {tmp_path}/config.toml, and --resume to go on with it"):
        load_settings(str(tmp_path))


def test_an_unknown_key_names_its_line_and_the_nearest_key(write) -> None:  # type: ignore[no-untyped-def]
    path = write(MINIMAL + "\n[trainer]\nlerning_rate = 1e-4\n")
    with pytest.raises(SettingsError, match=r"run.toml, line 14: .*did you mean trainer.learning_rate\?"):
        load_settings(path)


def test_a_key_in_the_wrong_section_is_told_where_it_belongs(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match=r"did you mean trainer.learning_rate\?"):
        load_settings(write("learning_rate = 1e-4\n" + MINIMAL))


def test_an_unknown_override_is_blamed_on_the_command_line() -> None:
    with pytest.raises(SettingsError, match=r"command line: trainer.learnrate .*trainer.learning_rate"):
        load_settings("quickstart", ["--trainer.learnrate", "1e-4"])


def test_a_value_of_the_wrong_type_is_shown_with_its_line(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match=r"line 11: rollouts.group_size = 'many'"):
        load_settings(write(MINIMAL.replace("group_size = 8", 'group_size = "many"')))


def test_broken_toml_is_told_with_its_place(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match=r"is not TOML: .*line 1"):
        load_settings(write("max_steps = = 3"))


JOINED = ["--generator.replicas", "{min = 1, max = 2}"]
TRANSFERRED = ["--transport.weights", "nccl"]
ON_GPUS = ["--trainer.device", "cuda", "--generator.engine", "vllm"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--schedule", "sync", "--scheduling.max_staleness", "2"], r'leave it out, or write schedule = "stream"'),
        (["--scheduling.batch_size", "60"], "no multiple of the group size 8"),
        (["--rollouts.group_size", "1"], "write rollouts.group_size = 2 or more"),
        (["--scheduling.row_tokens", "100"], "write scheduling.row_tokens = "),
        (
            ["--model.max_model_tokens", "8192"],
            r"model.max_model_tokens = 8192 .* is generator.max_cache_tokens = 4096: write generator.max_cache_tok",
        ),
        (
            ["--rollouts.max_tokens", "4096"],
            r"^command line: rollouts.max_tokens is 4096, .* holds generator.max_cache_tokens = 4096, prompt and",
        ),
        (
            ["--environment.max_tokens", "512", "--generator.max_cache_tokens", "512"],
            r"^command line: max_tokens of environment 'alphabet-sort' is 512, .* = 512, .*; raise it, or lower max_t",
        ),
        (
            ["--scheduling.group_release", "early", "--scheduling.advantage", "mean_std"],
            "is no reward less the mean of the siblings that are known",
        ),
        (
            ["--scheduling.group_release", "early", "--scheduling.advantage", "maxrl"],
            "write scheduling.advantage = 'mean'",
        ),
        (["--scheduling.group_release", "early", "--scheduling.on_stale", "restart"], "starts the whole group again"),
        (["--scheduling.min_known_siblings", "3"], "leave it out"),
        (["--scheduling.max_restarts", "3"], "for scheduling.on_stale = 'restart' alone: leave it out, or write 1"),
        (["--scheduling.on_straggler", "drop"], "write scheduling.over_sampling = 1.5"),
        (
            ["--scheduling.on_stale", "wait", "--scheduling.on_straggler", "drop", "--scheduling.over_sampling", "2"],
            "leave one of them out",
        ),
        (
            ["--rollouts.top_p", "0.9", "--generator.engine", "vllm"],
            "add generator.vllm.return_sampling_mask = true",
        ),
        (["--rollouts.top_k", "20", "--generator.engine", "vllm"], "^.*rollouts.top_k restricts"),
        (
            ["--rollouts.temperature", "2.5", "--generator.engine", "vllm"],
            "rollouts.temperature asks for a temperature of 2.5, and generator.engine = 'vllm' samples at 2 at most:",
        ),
        (["--rollouts.evaluation.temperature", "2.5", "--generator.engine", "vllm"], "or choose the torch engine"),
        (["--rollouts.temperature", "1e-40"], "engines sample at 0.01 or above"),
        (["--rollouts.evaluation.temperature", "0.001", "--generator.engine", "vllm"], "sample at 0.01 or above"),
        (["--environment.temperature", "3", "--generator.engine", "vllm"], "environments asks for a temperature of 3,"),
        (
            [*TEACHER, "--scheduling.group_release", "early"],
            "asks a teacher when a group is scored, .* leave one of them",
        ),
        ([*TEACHER, "--rollouts.temperature", "0.7"], r"rollouts are sampled at 0.7: write rollouts.temperature = 1.0"),
        ([*TEACHER, "--environment.temperature", "1.5"], r"rollouts are sampled at 1.5: write"),
        (
            ["--trainer.loss.distillation.model", "big", "--trainer.loss.distillation.api_key_variable", "KEY"],
            "api_key_variable is for url, and there is none: leave it out, or set url",
        ),
        ([*TEACHER, "--trainer.loss.distillation.divergence", "forward"], "set top_k, or leave divergence out"),
        (
            [*TEACHER, "--trainer.loss.distillation.top_k", "8", "--trainer.loss.distillation.truncation", "3"],
            "truncation bounds importance weights, and there are none with top_k: leave one of them out",
        ),
        ([*TEACHER, "--rollouts.top_p", "0.9"], "over the whole vocabulary, .* leave one of them out"),
        (["--trainer.head_dtype", "bfloat16"], 'dtype is .float32.*leave it out, or write head_dtype = "float32"'),
        (["--trainer.router_replay", "on"], "write generator.return_routed_experts = true"),
        (["--trainer.router_replay", "off", "--generator.return_routed_experts"], "leave one of them out"),
        (
            ["--trainer.loss.reference_kl.coefficient", "0.1", "--generator.return_routed_experts"],
            "the model of trainer.loss.reference_kl chooses its own",
        ),
        (["--gateway.port", "65535"], "the 1 agent workers .* listen at the ports after it, .*: lower gateway.port"),
        (["--gateway.port", "65500", "--rollouts.agent_workers", "36"], "lower gateway.port"),
        (["--transport.weights", "whole"], "leave it out, or set generator.connect"),
        (TRANSFERRED, "the torch engine has no weight transfer: leave it out"),
        ([*TRANSFERRED, "--generator.engine", "vllm"], "the trainer is on 'cpu': leave it out"),
        (["--trainer.devices", "0"], "trainer.devices names GPUs, and trainer.device = 'cpu' uses none: write"),
        (["--generator.devices", "0,1"], "generator.devices names GPUs, and generator.device = 'cpu' uses none: write"),
        (
            ["--trainer.device", "cuda", "--trainer.devices", "1", "--placement", "inline"],
            "trainer.devices gives GPUs to a process of its own, and placement = 'inline' has one for all roles",
        ),
        (
            ["--generator.engine", "vllm", "--generator.devices", "1", "--placement", "inline"],
            "generator.devices gives GPUs to a process of its own, .* or set CUDA_VISIBLE_DEVICES for vLLM",
        ),
        (
            ["--generator.device", "cuda", "--generator.devices", "1", "--generator.connect", "10.0.0.1:20000"],
            "generator.devices gives GPUs to generators that the run starts, and generator.connect has it start none",
        ),
        (["--trainer.device", "gpu"], "trainer.device is 'gpu', which names no device: write cpu, cuda or"),
        (["--generator.device", "cuda:"], "generator.device is 'cuda:', which names no device: write cpu, cuda or"),
        (["--trainer.device", "auto"], "names no device"),
        (["--trainer.device", "cuda:²"], "names no device"),
        (["--trainer.device", "mps"], "names no device"),
        (["--trainer.device", "xpu:1"], "names no device"),
        ([*TRANSFERRED, *ON_GPUS, "--placement", "inline"], "roles of one process share its GPUs"),
        ([*TRANSFERRED, *ON_GPUS, "--generator.connect", "tcp://there:1"], "are sent weights by their sockets"),
        (
            [*TRANSFERRED, *ON_GPUS, "--generator.lockstep", "true", "--generator.tensor_parallel", "2"],
            "are given weights by their first one",
        ),
        (
            [*TRANSFERRED, *ON_GPUS, "--trainer.lora.rank", "4", "--trainer.lora.publish", "adapters"],
            "adapters are installed from files",
        ),
        ([*TRANSFERRED, *ON_GPUS, *JOINED], "generators that join take no part in its group of GPUs"),
        ([*JOINED, "--placement", "inline"], "needs generators in processes of their own"),
        (["--generator.join_address", "tcp://127.0.0.1:1"], "generator.replicas = 1 takes none in: leave it out"),
        (["--generator.join_key", "key"], "for generator.join_address, which is unset"),
        ([*JOINED, "--generator.join_address", "tcp://10.0.0.1:1"], "give generator.join_key as well"),
        (["--generator.replicas", "{min = 3, max = 2}"], r"generator\.replicas\.min is 3 and max 2: give a max"),
        (
            ["--transport.batches", "redis", "--transport.redis.url", "redis://:secret[@host:6379/0"],
            r"^command line: transport\.redis\.url cannot be read \((?!.*secret)",
        ),
        (["--generator.replicas", "{min = 2}"], r"generator\.replicas\.min is 2 and max 1"),
        (
            ["--generator.replicas", "{min = 0, max = 2}"],
            r"generator\.replicas\.min = 0: .* greater than or equal to 1",
        ),
        (["--generator.replicas", "0"], r"^command line: generator\.replicas = 0: give a number .* less than or equal"),
        (["--generator.replicas", "two"], r"generator\.replicas = 'two': give a number .* \{min = 2, max = 16\}$"),
        (["--generator.replicas", "2.5"], r"generator\.replicas = 2\.5: give a number"),
    ],
)
def test_contradictions_say_what_to_write_instead(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings("quickstart", overrides)


def test_gpus_are_named_for_roles_that_use_them() -> None:
    named = ["--trainer.devices", "0", "--generator.devices", "1"]
    for overrides in (ON_GPUS, ["--trainer.device", "cuda", "--generator.device", "cuda"]):
        assert load_settings("quickstart", [*overrides, *named]).generator.devices == ("1",)
    for device in ("cpu", "cuda", "cuda:0", "cuda:12"):
        assert load_settings("quickstart", ["--trainer.device", device]).trainer.device == device
    for device in ("cpu", "cuda:12", "mps", "xpu:1"):
        assert load_settings("quickstart", ["--generator.device", device]).generator.device == device


def test_weights_are_transferred_between_gpus() -> None:
    for placement in ("local", "ray"):
        overrides = [*TRANSFERRED, *ON_GPUS, "--placement", placement]
        assert load_settings("quickstart", overrides).transport.weights == "nccl"


def test_every_contradiction_is_told_where_it_stands(write) -> None:  # type: ignore[no-untyped-def]
    path = write(MINIMAL.replace("max_steps = 10", 'schedule = "sync"') + "[scheduling]\nbatch_size = 60\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(path, ["--scheduling.max_staleness", "2"])
    places = [line.rpartition("run.toml")[2].partition(": ")[0] for line in str(caught.value).splitlines()]
    assert places == ["", "command line", ", line 13"]


def test_the_only_environment_is_called_as_the_command_line_calls_it() -> None:
    with pytest.raises(
        SettingsError, match=r"^command line: environment\.patience is no setting; known in environment: args"
    ):
        load_settings("quickstart", ["--environment.patience", "2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"model is missing; write a table \[model\] with name = .*--model.name"),
        ("", r"environments is missing; write a table \[\[environments\]\] with name = .*--environment.name"),
        ("model = 'a'\n" + MINIMAL.replace("[model]", "[mode]"), r"line 1: model = 'a': it is a section.*--model.name"),
        (MINIMAL.replace("[[environments]]", "[environments]"), r"line 7: environments = .*\[\[environments\]\]"),
        (MINIMAL.replace("[[environments]]", "[environment]"), r"line 7: .*did you mean \[\[environments\]\]\?"),
        (MINIMAL.replace('name = "alphabet-sort"', "weight = 1"), r"line 7: environment.name is missing"),
        ("carriage = 1\n" + MINIMAL, r"line 1: carriage is no setting; known here: .*trainer"),
        ("[generator]\nconnect = 5\n" + MINIMAL, r"generator.connect = 5: it is a list; write connect = \["),
        (MINIMAL.replace('name = "alphabet-sort"', 'name = "a"\ncolumns = "a"'), r"columns = 'a': it is a list; write"),
        (f"name = '{'é' * 128}'\n{MINIMAL}", "line 1: name has 256 bytes, and a folder's may have 255"),
        ("name = '../up'\n" + MINIMAL, r"line 1: name = '../up' cannot name a folder; use letters"),
    ],
)
def test_what_is_missing_or_misplaced_says_what_to_write(write, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match=message):
        load_settings(write(text))


@pytest.mark.parametrize("levels", [257, 400, 490, 5000])
def test_what_nests_too_deep_to_be_copied_is_told_where_it_stands(write, levels: int) -> None:  # type: ignore[no-untyped-def]
    deep = "[" * levels + "]" * levels
    path = write(MINIMAL.replace('name = "alphabet-sort"', f'name = "alphabet-sort"\nargs.rows = {deep}'))
    with pytest.raises(SettingsError, match=r"run\.toml(, line 7: environments nests more than 256| is not TOML)"):
        load_settings(path)
    with pytest.raises(SettingsError, match=r"command line: .* nests"):
        load_settings("quickstart", ["--environment.args.rows", deep])


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_that_is_not_utf_8_is_told_how_to_be_saved(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "run.toml").write_bytes(f"# für mich\n{MINIMAL}".encode(encoding))
    with pytest.raises(SettingsError, match=r"run\.toml is not UTF-8, .*save it as UTF-8"):
        load_settings(str(tmp_path / "run.toml"))


def test_a_file_that_begins_with_the_mark_of_windows_is_read_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"seed = 3\n{MINIMAL}", encoding="utf-8-sig")
    assert load_settings(str(path)).seed == 3
    path.write_text(f"seed = 'three'\n{MINIMAL}", encoding="utf-8-sig")
    with pytest.raises(SettingsError, match=r"run\.toml, line 1: seed"):
        load_settings(str(path))


def test_a_file_with_a_space_in_its_name_names_a_run(tmp_path: Path) -> None:
    (tmp_path / "my run.toml").write_text(MINIMAL)
    assert load_settings(str(tmp_path / "my run.toml")).name == "my-run"


@pytest.mark.parametrize("prefix", ["*", "team*", "a?", "[ab]", "", "a b", "\\", "ä", "a\n"])
def test_a_prefix_of_keys_that_would_find_others_is_refused(prefix: str) -> None:
    with pytest.raises(SettingsError, match=r"transport.redis.prefix = .* names no keys: write letters, digits"):
        load_settings("quickstart", ["--transport.redis.prefix", prefix])


def test_a_prefix_of_keys_may_be_of_several_words() -> None:
    settings = load_settings("quickstart", ["--transport.redis.prefix", "team-1:tail_race.v2"])
    assert settings.transport.redis.prefix == "team-1:tail_race.v2"


def test_only_a_name_is_told_to_name_a_folder() -> None:
    with pytest.raises(SettingsError, match="placement = 'a b': string should match pattern"):
        load_settings("quickstart", ["--placement", "a b"])
    with pytest.raises(SettingsError, match="name = 'a b' cannot name a folder"):
        load_settings("quickstart", ["--name", "a b"])


def test_a_judge_elsewhere_may_have_any_temperature() -> None:
    judge = ["--environment.judge.url", "http://judge/v1", "--environment.judge.temperature", "0.001"]
    (environment,) = load_settings("quickstart", judge).environments
    assert environment.judge is not None
    assert environment.judge.temperature == 0.001


def test_a_run_without_an_end_is_refused(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match="set max_steps or max_epochs"):
        load_settings(write(MINIMAL.replace("max_steps = 10", "")))


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["--max_steps", "unset", "--max_epochs", "2"], 200),  # 800 tasks of 8 rollouts, 64 to a batch
        (["--max_steps", "50", "--max_epochs", "2"], 50),
        (["--max_steps", "500", "--max_epochs", "2"], 200),
        (["--max_steps", "500"], None),
        (["--max_steps", "unset", "--max_epochs", "2", "--trainer.decay_steps", "70"], 70),
        (["--max_steps", "unset", "--max_epochs", "2", "--trainer.decay", "constant"], None),
    ],
)
def test_the_learning_rate_falls_until_the_end_of_epochs_too(overrides: list[str], steps: int | None) -> None:
    settings = load_settings("quickstart", ["--trainer.decay", "linear", "--scheduling.batch_size", "64", *overrides])
    plan = plan_run(settings, {"alphabet-sort": 800})
    assert with_decay_end(settings, plan).trainer.decay_steps == steps


def handed_to_roles(*overrides: str) -> RunSettings:
    settings = load_settings("quickstart", ["--trainer.decay", "linear", "--trainer.warmup_steps", "5", *overrides])
    ready = with_decay_end(settings, plan_run(settings, {"alphabet-sort": 800}))
    return RunSettings.model_validate_json(ready.model_dump_json())


def test_a_run_may_end_before_its_learning_rate_has_risen() -> None:
    by_epochs = ("--max_steps", "5", "--max_epochs", "1")
    assert handed_to_roles(*by_epochs).trainer.decay_steps == 5
    assert handed_to_roles(*by_epochs, "--trainer.decay_steps", "4").trainer.decay_steps == 4


def test_a_learning_rate_that_has_fallen_before_it_has_risen_is_refused_where_the_run_goes_on() -> None:
    """It would be that of the decay's end from there, and 0 mostly."""
    assert handed_to_roles("--trainer.decay_steps", "6").trainer.decay_steps == 6
    with pytest.raises(SettingsError, match=r"warmup_steps = 5 it rises until then: write more decay_steps, or fewer"):
        handed_to_roles("--trainer.decay_steps", "5")


def test_a_step_at_which_a_constant_learning_rate_has_fallen_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"decay_steps = 5 .* 'constant' it does not fall: leave it out, or"):
        handed_to_roles("--trainer.decay_steps", "5", "--trainer.decay", "constant")


def test_a_run_with_one_goes_on_and_its_plan_says_that_it_does_nothing() -> None:
    constant = ("--trainer.decay_steps", "5", "--trainer.decay", "constant", "--trainer.decay_end", "0")
    resumed = load_settings("quickstart", [*constant, "--resume"])
    sentence = "The learning rate does not fall: trainer.decay_steps = 5 is for trainer.decay = 'linear' and 'cosine'"
    assert any(line.startswith(sentence) for line in plan_run(resumed, {"alphabet-sort": 800}).sentences)


@pytest.mark.parametrize("settings", [RunSettings, SimulationPlan])
def test_what_may_be_unset_is_unless_it_is_given(settings: type[BaseModel]) -> None:
    """A run's config.toml leaves out what is unset: another default would take its place in a resume."""
    keys = [tuple(key.split(".")) for key in all_keys(settings)]
    fields = [end_of(settings, ("environments", 0, *key[1:]) if key[0] == "environment" else key).field for key in keys]
    optional = [field for field in fields if field is not None and NoneType in get_args(field.annotation)]
    assert optional
    assert [field.description for field in optional if field.default is not None] == []


def test_all_groups_are_scored_at_once_where_the_settings_say_so() -> None:
    settings = load_settings("quickstart", ["--rollouts.score_concurrency", "0"])
    assert settings.rollouts.score_concurrency == 0
    with pytest.raises(SettingsError, match=r"rollouts\.score_concurrency = None: input should be a valid integer"):
        load_from_python("quickstart", {"rollouts.score_concurrency": None})


def test_a_dash_in_a_name_of_the_users_own_stays(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'max_steps = 1\nmodel.name = "bundled:quickstart"\n[[environments]]\nname = "arithmetic"\n'
        '[environments.rewards.exact-match]\nfunction = "own:exact"\n'
    )
    given = ["--environment.rewards.exact-match.weight", "0.5", "--environment.group-size", "4"]
    given += ["--environment.args.max-value", "9", "--environment.args.kept.as-it-is", "1"]
    (chosen,) = load_settings(str(tmp_path / "run.toml"), given).environments
    assert {name: reward.weight for name, reward in chosen.rewards.items()} == {"exact-match": 0.5}
    assert (chosen.group_size, chosen.args) == (4, {"max_value": 9, "kept": {"as-it-is": 1}})


def test_a_program_gives_names_of_the_users_own_as_they_are(write) -> None:  # type: ignore[no-untyped-def]
    text = MINIMAL.replace(
        'name = "alphabet-sort"',
        'name = "alphabet-sort"\nargs = { weights = { a = 1 }, kept = 2 }\nrewards.exact.function = "own:exact"',
    )
    weights, rewards = {"v1.5": 0.3}, {"exact": {"weight": 0.5}, "v1.5": {}}
    vllm = {"hf_overrides": {"rope.theta": 1.0}, "compilation_config": {}}
    changes = {"args": {"weights": weights, "extra": {}}, "rewards": rewards}
    settings, _ = load_from_python(write(text), {"environment": changes, "generator.vllm": vllm})
    (environment,) = settings.environments
    assert environment.args == {"weights": weights, "kept": 2, "extra": {}}
    assert {name: (reward.function, reward.weight) for name, reward in environment.rewards.items()} == {
        "exact": ("own:exact", 0.5),
        "v1.5": (None, None),
    }
    assert settings.generator.vllm == vllm


def test_overrides_win_over_the_file() -> None:
    settings = load_settings(
        "quickstart",
        ["--max-steps=7", "--trainer.learning_rate", "1e-3", "--environment.args.max_turns", "2", "--name", "mine"],
    )
    assert (settings.max_steps, settings.trainer.learning_rate, settings.name) == (7, 1e-3, "mine")
    assert settings.environments[0].args["max_turns"] == 2


@pytest.mark.parametrize("name", ["42", "1e5", "2026-11-28", "inf"])
def test_a_setting_that_is_text_is_taken_as_it_was_typed(name: str) -> None:
    overrides = [f"--{setting}={name}" for setting in ("name", "model.name", "environment.id", "environments.0.data")]
    settings = load_settings("quickstart", [*overrides, "--environment.args.max_turns", "2"])
    [environment] = settings.environments
    assert (settings.name, settings.model.name, environment.id, environment.data) == (name,) * 4
    assert environment.args["max_turns"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--trainer.learning_rate"],
            "trainer.learning_rate is no switch, it needs a value, as in --trainer.lear.* 1e-05",
        ),
        (["--trainer.learning_rate", "true"], "trainer.learning_rate is no switch"),
        (["--max_steps", "--environment.weight=2"], "max_steps is no switch"),
        (["--environment.weight"], "environment.weight is no switch"),
        (["--name"], "name is no switch"),
        (["--generator.connect"], "generator.connect is no switch"),
        (["--trainer"], "trainer = True: it is a section"),
    ],
)
def test_a_setting_without_a_value_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^command line: {message}"):
        load_settings("quickstart", overrides)


def test_a_switch_in_place_of_a_value_is_told_as_the_file_or_the_program_writes_it(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        SettingsError, match=r"line \d+: trainer.learning_rate is no switch, .* as in trainer.learning_ra"
    ):
        load_settings(write(MINIMAL + "[trainer]\nlearning_rate = true\n"))
    with pytest.raises(
        SettingsError, match=r"^changes: model.name is no switch, it needs a value, as in model.name = V"
    ):
        load_from_python("quickstart", {"model.name": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((["--trainer.learning_rate", rate], r"learning_rate = \S+: ") for rate in ("inf", "-1e-4", "0", "1e4")),
        (["--trainer.learning_rate", "nan"], "trainer.learning_rate = nan: it must be a finite number"),
        (["--trainer.learning_rate", "Infinity"], "trainer.learning_rate = 'Infinity': "),
        (["--scheduling.max_failing_s", "inf"], "scheduling.max_failing_s = inf: it must be a finite number"),
        (["--environment.args.lengths", "[1, nan]"], "environment.args.lengths.1 = nan: it must be a finite number"),
        (["--seed", str(10**30)], f"seed = {10**30}: it must be a finite number"),
        (
            ["--scheduling.batch_size", str(10**9)],
            r"scheduling.batch_size = 1000000000: .* less than or equal to 1048576",
        ),
        *(([f"--{name}", str(10**9)], f"{name} = 1000000000: .* less than or equal to") for name in HUGE),
    ],
)
def test_numbers_that_no_run_could_use_are_refused_in_a_sentence_each(given: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^command line: .*{message}") as caught:
        load_settings("quickstart", given)
    assert str(caught.value).count("\n") == 0


def test_a_switch_needs_no_value() -> None:
    assert load_settings("quickstart", ["--trainer.gradient_checkpointing"]).trainer.gradient_checkpointing


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "trainer.learning_rate"),
        ("trainer.lr", "trainer.learning_rate"),
        ("learning-rat", "trainer.learning_rate"),
        ("correction", "trainer.loss.correction"),
        ("clip_high", "trainer.loss.clip_high"),
        ("group_size", "environment.group_size or rollouts.group_size"),
        ("num_generations", "rollouts.group_size"),
        ("epochs", "max_epochs"),
    ],
)
def test_a_name_from_elsewhere_is_told_what_it_is_called_here(name: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=rf"is no setting; did you mean {meant}\?"):
        load_settings("quickstart", [f"--{name}", "2"])


@pytest.mark.parametrize("meant", sorted(set(ELSEWHERE_CALLED.values())))
def test_every_name_that_is_suggested_is_a_setting(meant: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings("quickstart", [f"--{meant}.inside", "2"])
    assert "is no setting" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--trainer.loss.clip_lwo", "0.1"], r"trainer.loss.clip_lwo is no setting of clipped_ratio; did you mean"),
        (
            ["--trainer.loss.scale", "0.1"],
            r"trainer.loss.scale is no setting of clipped_ratio; known in trainer.loss: clip_high, clip_low, .*",
        ),
        (
            ["--trainer.loss.name", "cliped_ratio"],
            r"trainer.loss.name = 'cliped_ratio': .*mean 'clipped_ratio'",
        ),
        (["--trainer.loss.name", "reward"], r".*there is none of that name; known: clipped_ratio, .*module:function"),
        (["--trainer.loss.name", "mine:"], r".*a loss of your own is written as module:function"),
        (
            ["--trainer.loss.name", "decoupled_ppo"],
            r".*with steps_per_batch = 1 there is no second: nothing would ever be clipped; write .* 2 or more",
        ),
        (
            ["--trainer.loss.correction", "none", "--trainer.loss.truncation", "3"],
            r".*truncation is a bound of importance weights, and with correction = 'none' there are none: leave one "
            "of them out, or write truncation = 2.0",
        ),
        (["--trainer.loss.correction", "none", "--trainer.loss.clip_high", "0.3"], r".*clip_high is a bound of"),
        (["--trainer.loss.truncation", "1.1"], r".*truncation is 1.1, which clip_high = 0.28 would never reach"),
        (["--trainer.loss.clip_low", "2"], r"trainer.loss.clip_low = 2: input should be less than 1"),
        (["--trainer.loss.clip_low"], r"trainer.loss.clip_low is no switch, it needs a value, as in --.* 0.2"),
        (["--trainer.loss.clip_high"], r"trainer.loss.clip_high is no switch, it needs a value, as in --.* 0.28"),
        (
            ["--trainer.loss.name", "gspo", "--trainer.loss.truncation", "2"],
            r".*is no setting of gspo; known",
        ),
        (["--trainer.loss.name", "tis"], r".*name is 'tis': it is called aipo here"),
        (["--trainer.loss.masks", "[{ name = 'icepoop' }]"], r"trainer.loss.masks.0.name = 'icepoop': .*'icepop'"),
        (
            ["--trainer.loss.masks", "[{ name = 'icepop', hihg = 2.0 }]"],
            r"trainer.loss.masks.0.hihg is no setting of icepop; did you mean trainer.loss.masks.0.high",
        ),
        (["--trainer.loss.masks", "icepop"], r"trainer.loss.masks = 'icepop': it is a list"),
        (
            ["--trainer.loss.reference_kl.estimator", "k4"],
            r"trainer.loss.reference_kl.estimator = 'k4': .*'k1', 'k2', 'k3' or 'unbiased'",
        ),
        (
            ["--trainer.loss.reference_kl.beta", "0.1"],
            r"trainer.loss.reference_kl.beta is no setting",
        ),
        (["--trainer.loss", "3"], r"trainer.loss = 3: it is a section, not a value; .*--trainer.loss.name"),
    ],
)
def test_a_loss_that_is_wrong_is_told_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=rf"^command line: {message}") as caught:
        load_settings("quickstart", overrides)
    assert "\n" not in str(caught.value)


def test_what_a_loss_needs_is_asked_for() -> None:
    with pytest.raises(SettingsError, match=r"trainer.loss.length is missing; add it, or give --trainer.loss.length"):
        load_settings("quickstart", ["--trainer.loss.name", "dr_grpo"])
    chosen = load_settings("quickstart", ["--trainer.loss.name", "dr_grpo", "--trainer.loss.length", "512"])
    assert chosen.trainer.loss == DrGrpoSettings(length=512)


def test_what_is_wrong_with_a_loss_is_told_where_it_stands(write) -> None:  # type: ignore[no-untyped-def]
    path = write(MINIMAL + "\n[trainer.loss]\nclip_high = 0.3\nclip_lwo = 0.1\n")
    with pytest.raises(SettingsError, match=r"run.toml, line 15: trainer.loss.clip_lwo is no setting of clipped_ratio"):
        load_settings(path)


def test_a_loss_is_read_and_edited_like_any_section(write) -> None:  # type: ignore[no-untyped-def]
    path = write(MINIMAL + "\n[trainer.loss]\nclip_high = 0.3\n")
    assert load_settings(path, ["--trainer.loss.clip_low", "0.1"]).trainer.loss == ClippedRatioSettings(
        clip_low=0.1, clip_high=0.3
    )
    kl = load_settings(path, ["--trainer.loss.reference_kl.coefficient", "0.1"]).trainer.loss.reference_kl
    assert kl == ReferenceKlSettings(coefficient=0.1)
    mask = "{ name = 'icepop', high = 2.0 }"
    gspo = load_settings(path, ["--trainer.loss.name", "gspo", "--trainer.loss.masks", f"[{mask}]"]).trainer.loss
    assert gspo == GspoSettings(masks=(IcePopSettings(high=2.0),))
    mine = load_settings(path, ["--trainer.loss.name", "mine:loss", "--trainer.loss.args.scale", "2.5"]).trainer.loss
    assert mine == OwnLossSettings(name="mine:loss", args={"scale": 2.5})  # and nothing of the file's, which it is not


@pytest.mark.parametrize(
    ("loss", "name", "stays"),
    [
        ("name = 'dapo'\nclip_low = 0.05\nclip_high = 0.1", "grpo", GrpoSettings(clip_low=0.05, clip_high=0.1)),
        ("clip_high = 0.3\ntruncation = 3.0", "cispo", CispoSettings(truncation=3.0)),
        ("name = 'cispo'\ntruncation = 3.0\nlowest_weight = 0.1", "unset", ClippedRatioSettings(truncation=3.0)),
        ("name = 'dapo'\nclip_low = 0.05", "gspo", GspoSettings()),  # a sequence's ratio, not a token's
        ("name = 'gspo'\nclip_low = 1e-4\nentropy = 0.1", "grpo", GrpoSettings(entropy=0.1)),
        ("name = 'dppo'\nthreshold = 0.1", "ipo", IpoSettings()),
        (
            "name = 'mine:one'\nentropy = 0.1\nargs = { scale = 2 }",
            "mine:two",
            OwnLossSettings(name="mine:two", entropy=0.1),
        ),
        ("name = 'mine:one'\ndenominator = 'sequences'", "grpo", GrpoSettings()),
        ("name = 'dappo'\nclip_low = 0.05", "dapo", DapoSettings(clip_low=0.05)),
    ],
)
def test_naming_another_loss_drops_what_it_does_not_know_or_means_otherwise(
    write: Callable[[str], str], loss: str, name: str, stays: CommonLossSettings
) -> None:
    path = write(f"{MINIMAL}\n[trainer.loss]\n{loss}\n")
    assert load_settings(path, ["--trainer.loss.name", name]).trainer.loss == stays


def test_masks_in_a_file_stay_when_another_loss_is_named(write) -> None:  # type: ignore[no-untyped-def]
    text = (
        "\n[trainer.loss]\nname = 'cispo'\ntruncation = 4.0\nentropy = 0.01\n[[trainer.loss.masks]]\nname = 'icepop'\n"
    )
    path = write(MINIMAL + text)
    loss = load_settings(path, ["--trainer.loss.name", "gspo", "--trainer.loss.masks.0.low", "0.4"]).trainer.loss
    assert loss == GspoSettings(entropy=0.01, masks=(IcePopSettings(low=0.4),))
    with pytest.raises(SettingsError, match=r"run.toml, line 19: trainer.loss.masks.0.lwo is no setting of icepop"):
        load_settings(write(MINIMAL + text + "lwo = 0.4\n"))


@pytest.mark.parametrize("loss", [CispoSettings(), GspoSettings(masks=(IcePopSettings(),))])
def test_a_loss_that_a_program_made_is_told_by_what_was_set(loss: CommonLossSettings) -> None:
    made = load_settings("quickstart").model_copy(update={"trainer": TrainerSettings.model_validate({"loss": loss})})
    given = made.model_dump(exclude_unset=True)  # which is what `tailrace.train` takes of settings
    assert load_from_python(given, {})[0].trainer.loss == loss


def test_naming_another_environment_drops_the_arguments_of_the_old_one(write) -> None:  # type: ignore[no-untyped-def]
    path = write(MINIMAL.replace('name = "alphabet-sort"', 'name = "alphabet-sort"\nargs = { max_turns = 2 }'))
    settings = load_settings(path, ["--environment.args.length", "4", "--environment.name", "reverse-text"])
    assert (settings.environments[0].name, settings.environments[0].args) == ("reverse-text", {"length": 4})


def test_naming_another_environment_drops_what_scored_the_old_one(write: Callable[[str], str]) -> None:
    own = (
        "name = 'alphabet-sort'\ntrusted = true\ncolumns = ['turn_rewards']\nmax_turns = 2\n"
        "judge = { rubric = 'brief', weight = 2.0 }\nrewards.right.function = 'own:right'"
    )
    path = write(MINIMAL.replace('name = "alphabet-sort"', own))
    overrides = ["--environment.judge.rubric", "long", "--environment.name", "reverse-text"]
    (chosen,) = load_settings(path, overrides).environments
    kept = {"name": "reverse-text", "judge": {"rubric": "long"}, "max_turns": 2}
    assert chosen.model_dump(exclude_unset=True) == kept


def test_what_a_file_says_of_an_environment_without_a_name_is_of_the_one_that_is_named_beside_it() -> None:
    entry = {"judge": {"rubric": "brief"}, "trusted": True, "args": {"most": 3}}
    given = {"max_steps": 1, "model": {"name": "bundled:quickstart"}, "environments": [entry]}
    (chosen,) = load_from_python(given, {"environment.name": "reverse-text"})[0].environments
    assert chosen.model_dump(exclude_unset=True) == {"name": "reverse-text", **entry}


def test_an_environment_is_named_by_its_key_alone_as_by_its_name() -> None:
    for overrides in (["--environment", "arithmetic"], ["--environment={name = 'arithmetic'}"]):
        (chosen,) = load_settings("quickstart", [*overrides, "--environment.weight", "2"]).environments
        assert (chosen.name, chosen.weight) == ("arithmetic", 2)
    assert load_from_python("quickstart", {"environment": "arithmetic"})[0].environments[0].name == "arithmetic"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--environment"], "environment.name is no switch, it needs a value, as in --environment.name VALUE"),
        (["--environment", "[3]"], r"environment.name = \[3\]: input should be a valid string"),
        (["--environment", "{}"], "environment.name is missing"),
        (["--environment", "unset"], "environment.name is missing"),
        (["--environments", "arithmetic"], "environments = 'arithmetic': it is a list"),
        (
            ["--observability.tags", "a"],
            r"""observability.tags = 'a': .* write --observability.tags '\["...", "..."\]'$""",
        ),
        (["--=arithmetic"], " is no setting"),
        (["--environment.", "arithmetic"], "environment. is no setting"),
    ],
)
def test_no_key_is_ignored(given: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^command line: {message}"):
        load_settings("quickstart", given)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('[environments]\nname = "reverse-text"', r"\{'name': 'reverse-text'\}"),
        ('environments = ["reverse-text"]', r"\['reverse-text'\]"),
        ('environments = "reverse-text"', "'reverse-text'"),
        ('environments = ["reverse-text", "arithmetic"]', r"\['reverse-text', 'arithmetic'\]"),
    ],
)
@pytest.mark.parametrize("key", ["environment", "environment.name", "environment.args.length"])
def test_environments_that_are_no_tables_are_refused_whatever_edits_them(
    write: Callable[[str], str], written: str, shown: str, key: str
) -> None:
    path = write(f'max_steps = 10\nmodel.name = "bundled:quickstart"\n{written}\n')
    with pytest.raises(SettingsError, match=rf"^--environment\..* environments = {shown}: .* \[\[environments\]\]$"):
        load_settings(path, [f"--{key}", "4"])


@pytest.mark.parametrize("index", ["²", "٣", pytest.param("9" * 5000, id="long"), "1"])
def test_what_is_no_index_is_told(index: str) -> None:
    with pytest.raises(
        SettingsError, match=f"^--environments.{index}.weight: '{index}' is no index into the 1 entries there$"
    ):
        load_settings("quickstart", [f"--environments.{index}.weight", "2"])
    assert load_settings("quickstart", [f"--environment.args.{index}", "2"]).environments[0].args[index] == 2


def test_a_list_is_given_whole_or_edited_by_number_and_an_entry_cannot_be_unset(write: Callable[[str], str]) -> None:
    path = write(MINIMAL + '[observability]\ntags = ["a", "b"]\n')
    tags = {
        given: load_settings(path, [f"--observability.tags{given}", value]).observability.tags
        for given, value in {"": '["c"]', ".1": "c"}.items()
    }
    assert tags == {"": ("c",), ".1": ("a", "c")}
    for key in ("observability.tags.0", "environments.0"):
        with pytest.raises(SettingsError, match=rf"^--{key} unset: .* without it, --{key[:-2]} '\[...\]'$"):
            load_settings(path, [f"--{key}", "unset"])


def test_a_served_context_that_no_slot_holds_is_refused_as_a_run_s_is() -> None:
    with pytest.raises(SettingsError, match=r"^command line: model.max_model_tokens = 8192 .* generator.max_cach"):
        load_serve_settings("bundled:quickstart", ["--model.max_model_tokens", "8192"])
    longer = ["--model.max_model_tokens", "8192", "--generator.max_cache_tokens", "8192"]
    assert load_serve_settings("bundled:quickstart", longer).max_model_tokens == 8192


def test_a_generator_that_joins_a_run_takes_no_settings_of_http() -> None:
    offered = b'{"model": {"name": "bundled:quickstart"}, "generator": {"slots": 8}}'
    assert joined_settings(offered, None, ["--generator.slots", "4"]).generator.slots == 4
    with pytest.raises(SettingsError, match=r"^--gateway\.port: a generator that joins a run answers that run alone$"):
        joined_settings(offered, None, ["--gateway.port", "8000"])


@pytest.mark.parametrize("port", ["²", pytest.param("9" * 5000, id="long"), "-1", ""])
def test_what_is_no_port_is_told(port: str) -> None:
    with pytest.raises(SettingsError, match=r"^--http 127\.0\.0\.1:.* is no address: write HOST:PORT"):
        load_serve_settings("bundled:quickstart", [], f"127.0.0.1:{port}")


def test_the_schedule_sets_the_default_staleness() -> None:
    staleness = {
        schedule: load_settings("quickstart", ["--schedule", schedule]).max_staleness
        for schedule in ("sync", "one-step-off", "stream")
    }
    assert staleness == {"sync": 0, "one-step-off": 1, "stream": 4}


def test_the_plan_says_every_budget_in_plain_words() -> None:
    settings = load_settings("quickstart", ["--max_steps", "50"])
    plan = plan_run(settings, {"alphabet-sort": 800})
    steps_per_epoch = 800 * settings.rollouts.group_size / settings.scheduling.batch_size
    assert f"An epoch is about {steps_per_epoch:,.1f} steps, if no group is filtered." in plan.sentences
    assert plan.expected_steps == 50
    assert len(plan.sentences) == 9


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["--schedule", "sync"], "Synchronous: generation and training take turns"),
        (["--trainer.ranks", "2"], "one that is silent for 300 s ends all of them."),  # which are started again
        (["--trainer.decay", "constant"], "The learning rate does not fall: trainer.decay_end = 0.1 is for"),
        (["--model.max_model_tokens", "65"], "A step trains on at most 12,288 completion tokens."),  # 3 turns of 64
        (["--schedule", "one-step-off"], "At most 128 rollouts are admitted and not yet trained ((1 + 1) x 64)."),
        (["--scheduling.on_stale", "restart"], "is started again, at most 1 times, then masked."),
        (["--scheduling.over_sampling", "1.5"], "Each step starts 96 rollouts; the first 64 of finished groups"),
        (["--evaluation.every_steps", "20"], "64 held-out tasks of each environment are measured, 8 rollouts at once"),
        (["--scheduling.over_sampling", "2", "--scheduling.on_straggler", "drop"], "batches favour short rollouts."),
        (["--trainer.loss.reference_kl.coefficient", "0.1"], "A frozen copy of bundled:quickstart lies beside"),
        ([*TEACHER], "Each group is scored by the teacher big at http://teacher/v1 before it is trained on."),
        (
            [*TEACHER, "--trainer.loss.distillation.url", "http://me:sesame@teacher/v1"],
            "by the teacher big at http://teacher/v1 before",
        ),
        (
            ["--trainer.loss.distillation.model", "big"],
            "by the teacher big in a process of its own, the role",
        ),
    ],
)
def test_the_plan_tells_what_each_mode_comes_to(overrides: list[str], sentence: str) -> None:
    settings = load_settings("quickstart", ["--scheduling.batch_size", "64", *overrides])
    assert any(sentence in line for line in plan_run(settings, {"alphabet-sort": 800}).sentences)


@pytest.mark.parametrize(
    ("page", "reference"), [("settings", settings_reference), ("simulation-settings", simulation_reference)]
)
def test_the_settings_pages_are_what_the_code_says(page: str, reference: Callable[[], str]) -> None:
    written = Path(__file__).parents[2] / "docs" / f"{page}.md"
    assert written.read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize(
    ("reference", "settings", "elsewhere"),
    [(settings_reference, RunSettings, ()), (simulation_reference, SimulationPlan, ("scheduling",))],
)
def test_every_section_has_a_block_with_a_row_for_each_of_its_settings(
    reference: Callable[[], str], settings: type[BaseModel], elsewhere: tuple[str, ...]
) -> None:
    told: dict[str, set[str]] = {}
    for block in reference().split("\n## ")[1:]:
        heading, _, text = block.partition("\n")
        told.setdefault(heading.split(" with ")[0].strip("`"), set()).update(re.findall(r"^\| `(\w+)` \|", text, re.M))
    schema = settings.model_json_schema()
    expected: dict[str, set[str]] = {}
    for path, names in settings_in(schema, schema["$defs"]):
        if path.partition(".")[0] not in elsewhere:
            expected.setdefault(path or "Top level", set()).update(names)
    assert expected.keys() == told.keys()
    for path, names in expected.items():
        assert names - set(elsewhere) <= told[path], path


def settings_in(schema: dict[str, Any], models: dict[str, Any], path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every section's path and the settings in it that are no sections, by pydantic's own account."""
    plain = set()
    for name, field in schema["properties"].items():
        named = ".NAME" if "additionalProperties" in field else ""
        inner = f"{path}.{name}{named}".lstrip(".")
        found = [models[key] for key in re.findall(r'"#/\$defs/(\w+)"', json.dumps(field))]
        sections = [section for section in found if "properties" in section]
        plain |= set() if sections else {name}
        for section in sections:
            yield from settings_in(section, models, inner)
    yield path, plain
