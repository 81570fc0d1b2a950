"""A run that goes on has its own settings, and over them only what was given anew."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tailrace.config import differences, load_from_python, load_settings, own_settings, placed, read_settings_file
from tailrace.environments import JudgeSettings, load_environment
from tailrace.errors import SettingsError
from tailrace.run.folder import RunPaths, record_settings

FILE = """\
max_steps = 60
[model]
name = "bundled:quickstart"
[[environments]]
name = "alphabet-sort"
group_size = 8
[environments.args]
max_names = 5
[trainer]
learning_rate = 1e-3
[observability]
capture = 2
"""
OTHERS = """
[[environments]]
name = "arithmetic"
group_size = 4
[environments.args]
digits = 2
[[environments]]
name = "reverse-text"
[environments.args]
length = 9
"""
PULLED_BACK = """[trainer.loss.reference_kl]
coefficient = 0.1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def start(file: Path, *overrides: str) -> Path:
    """What a run that was started with this file and these overrides leaves of its settings; its folder."""
    settings = load_settings(str(file), overrides, file.parent)
    paths = RunPaths(file.parent / settings.name)
    record_settings(settings, paths, read_settings_file(str(file)))
    return paths.root


def resumed(file: Path, *overrides: str) -> dict[str, tuple[object, object]]:
    """What a resume with this file and these overrides would change."""
    now = load_settings(str(file), ["--resume", *overrides], file.parent)
    before = own_settings(file.parent / now.name)
    assert before is not None
    return {one.name: (one.before, one.now) for one in differences(before, now)}


def test_what_was_given_at_the_start_need_not_be_given_again(file: Path) -> None:
    start(file, "--trainer.learning_rate", "7e-4", "--environment.args.max_names", "3", "--max_epochs", "2")
    assert resumed(file) == {}
    settings = load_settings(str(file), ["--resume"], file.parent)
    assert (settings.trainer.learning_rate, settings.max_epochs, settings.resume) == (7e-4, 2, True)
    assert settings.environments[0].args == {"max_names": 3}


def test_a_date_among_arguments_is_the_same_text_at_the_start_in_workers_and_in_a_resume(file: Path) -> None:
    file.write_text(
        FILE.replace("max_names = 5", "span = { since = 2026-01-31, at = [07:30:00, 2026-01-31T07:30:00Z] }")
    )
    start(file, "--environment.args.until", "2026-02-01")
    args = {"span": {"since": "2026-01-31", "at": ["07:30:00", "2026-01-31T07:30:00+00:00"]}, "until": "2026-02-01"}
    [environment] = load_settings(str(file), ["--resume"], file.parent).environments
    [begun] = load_settings(str(file), ["--environment.args.until", "2026-02-01"]).environments
    for settings in (environment, begun, type(begun).model_validate_json(begun.model_dump_json())):
        assert settings.args == args


def test_none_in_a_table_of_a_program_is_unset_for_a_resume_too(tmp_path: Path) -> None:
    given = {
        "model": {"name": "bundled:quickstart", "max_model_tokens": None},
        "environments": ({"name": "reverse-text", "data": None, "rewards": {"right": {"weight": None}}},),
        "max_steps": 1,
    }
    settings, places = load_from_python(given, {}, tmp_path)
    record_settings(settings, RunPaths(tmp_path / settings.name), places.file)
    recipe = read_settings_file(str(tmp_path / settings.name / "recipe.toml")).table
    assert recipe["environments"] == [{"name": "reverse-text", "rewards": {"right": {}}}]
    again, _ = load_from_python(given, {"resume": True}, tmp_path)
    assert differences(settings, again) == []


@pytest.mark.parametrize("args", [{"length": None}, {"lengths": [1, None]}, {"lengths": [{"most": None}]}])
def test_none_among_arguments_is_refused_before_anything_is_written(tmp_path: Path, args: dict[str, object]) -> None:
    environment = {"name": "reverse-text", "args": args}
    given = {"model": {"name": "bundled:quickstart"}, "environments": [environment], "max_steps": 1}
    settings, places = load_from_python(given, {}, tmp_path)
    with pytest.raises(SettingsError, match=r"^environments\.0\.args\.length\S* is None, which TOML has not"):
        record_settings(settings, RunPaths(tmp_path / settings.name), places.file)
    assert not list(tmp_path.iterdir())


def test_what_is_left_out_of_a_judge_stays_the_environments_own_in_a_resume(file: Path) -> None:
    own = "name = 'examples.own_judge:names_by_key'\njudge = { own_weight = 0.5 }"
    file.write_text(FILE.replace('name = "alphabet-sort"', own).replace("[environments.args]\nmax_names = 5\n", ""))
    config = start(file) / "config.toml"

    def judge() -> JudgeSettings | None:
        assert resumed(file) == {}
        return load_environment(load_settings(str(file), ["--resume"], file.parent).environments[0]).judge

    assert judge() == JudgeSettings(temperature=0.8, max_tokens=24, retries=6, own_weight=0.5)
    written = config.read_text()
    assert written.count("own_weight = 0.5\n") == 1
    config.write_text(written.replace("own_weight = 0.5\n", "own_weight = 0.5\nmax_tokens = 1024\nretries = 2\n"))
    assert judge() == JudgeSettings(temperature=0.8, max_tokens=1024, retries=2, own_weight=0.5)


def test_both_files_are_replaced_as_a_whole(file: Path) -> None:
    folder = start(file)
    before = {}
    for name in ("config.toml", "recipe.toml"):  # another name of the old file sees what is written into it
        (folder / f"old-{name}").hardlink_to(folder / name)
        before[name] = (folder / name).read_text()
    file.write_text(FILE.replace("[model]", "seed = 7\n[model]", 1))
    start(file, "--resume", "--allow_changed_settings")
    for name, text in before.items():
        assert (folder / f"old-{name}").read_text() == text != (folder / name).read_text()
    assert not [*folder.glob("*.part")]


def test_what_is_given_now_differs(file: Path) -> None:
    start(file, "--trainer.learning_rate", "7e-4")
    changes = ["--max_steps", "120", "--environment.args.max_names", "4", "--trainer.learning_rate", "7e-4"]
    assert resumed(file, *changes) == {"max_steps": (60, 120), "environments.0.args.max_names": (5, 4)}
    assert resumed(file, "--max_steps", "unset", "--max_epochs", "1") == {
        "max_steps": (60, None),
        "max_epochs": (None, 1),
    }


def test_another_loss_differs_by_its_name_and_by_what_either_knows(file: Path) -> None:
    start(file, "--trainer.loss.clip_low", "0.1")
    assert resumed(file) == {}
    assert resumed(file, "--trainer.loss.clip_low", "0.3") == {"trainer.loss.clip_low": (0.1, 0.3)}
    changes = resumed(file, "--trainer.loss.name", "mine:loss", "--trainer.loss.args.scale", "2")
    assert changes["trainer.loss.name"] == ("clipped_ratio", "mine:loss")
    assert changes["trainer.loss.args.scale"] == (None, 2)
    assert changes["trainer.loss.clip_low"] == (0.1, None)
    file.write_text(FILE + '[trainer.loss]\nname = "mine:loss"\n')
    assert resumed(file)["trainer.loss.name"] == ("clipped_ratio", "mine:loss")


def test_what_was_edited_in_the_file_differs_and_nothing_else_that_it_says(file: Path) -> None:
    start(file, "--trainer.learning_rate", "7e-4", "--environment.args.max_names", "3")
    file.write_text(FILE.replace("max_steps = 60", "max_steps = 90").replace("group_size = 8\n", ""))
    assert resumed(file) == {"max_steps": (60, 90), "environments.0.group_size": (8, None)}


def test_a_section_that_the_file_gains_or_loses_leaves_what_was_given_at_the_start(file: Path) -> None:
    given = ["--restarts.per_role", "10", "--rollouts.max_tokens", "64", "--trainer.loss.clip_low", "0.1"]
    start(file, *given)
    file.write_text(FILE + "[restarts]\nsilence_s = 120\n[rollouts]\ntimeout_s = 30\n[trainer.loss]\nclip_high = 0.4\n")
    changes = resumed(file)
    assert changes == {"rollouts.timeout_s": (600.0, 30.0), "trainer.loss.clip_high": (0.28, 0.4)}
    settings = load_settings(str(file), ["--resume"], file.parent)
    assert (settings.restarts.per_role, settings.restarts.silence_s, settings.rollouts.max_tokens) == (10, 120, 64)
    start(file, "--resume", "--allow_changed_settings")
    file.write_text(FILE)
    assert resumed(file) == {name: (now, before) for name, (before, now) in changes.items()}
    settings = load_settings(str(file), ["--resume"], file.parent)
    assert (settings.restarts.per_role, settings.restarts.silence_s, settings.rollouts.max_tokens) == (10, 60, 64)


def test_a_section_that_means_something_by_being_there_goes_as_a_whole(file: Path) -> None:
    file.write_text(FILE.replace("[trainer]", "[environments.rewards.right]\nweight = 2.0\n[trainer]") + PULLED_BACK)
    start(file, "--trainer.loss.reference_kl.estimator", "k2")
    file.write_text(FILE)
    settings = load_settings(str(file), ["--resume"], file.parent)
    assert settings.trainer.loss.reference_kl is None
    assert settings.environments[0].rewards == {}


def test_without_its_table_the_file_leaves_arguments_and_rewards_that_were_given_at_the_start(file: Path) -> None:
    tables = "[environments.rewards.right]\nweight = 2.0\n"
    file.write_text(FILE.replace("[trainer]", f"{tables}[trainer]"))
    given = ["--environment.args.seed", "7", "--environment.rewards.short.weight", "0.5"]
    start(file, *given)
    file.write_text(FILE.replace("[environments.args]\nmax_names = 5\n", ""))
    [environment] = load_settings(str(file), ["--resume"], file.parent).environments
    assert environment.args == {"seed": 7}
    assert {name: reward.weight for name, reward in environment.rewards.items()} == {"short": 0.5}


def test_a_loss_that_the_start_exchanged_takes_of_the_files_what_both_know(file: Path) -> None:
    loss = '[trainer.loss]\nname = "dapo"\nclip_low = 0.2\n'
    file.write_text(FILE + loss)
    start(file, "--trainer.loss.name", "cispo", "--trainer.loss.masks", "[{ name = 'icepop' }]")
    file.write_text(FILE + loss.replace("0.2", "0.3") + "entropy = 0.01\n")
    changes = {"trainer.loss.entropy": (0.0, 0.01)}
    assert resumed(file) == resumed(file, "--trainer.loss.name", "cispo") == changes
    file.write_text(FILE + '[trainer.loss]\nname = "aipo"\n')
    assert resumed(file)["trainer.loss.name"] == ("cispo", "aipo")


def test_an_environment_that_the_start_exchanged_takes_of_the_files_what_is_not_its_own(file: Path) -> None:
    start(file, "--environment", "arithmetic", "--environment.args.digits", "2")
    file.write_text(FILE.replace("max_names = 5", "max_names = 4").replace("group_size = 8", "group_size = 16"))
    changes = {"environments.0.group_size": (8, 16)}
    assert resumed(file) == resumed(file, "--environment", "arithmetic") == changes


def test_an_environment_that_the_file_renames_is_taken_as_it_is(file: Path) -> None:
    start(file, "--environment.args.max_names", "3", "--environment.args.seed", "7")
    file.write_text(FILE.replace("alphabet-sort", "mine:environment"))
    [environment] = load_settings(str(file), ["--resume"], file.parent).environments
    assert (environment.name, environment.args) == ("mine:environment", {"max_names": 5})
    file.write_text(FILE.replace('name = "alphabet-sort"', 'name = "mine:environment"\nid = "one"'))
    start(file, "--name", "other", "--environments.0.args.seed", "7")
    file.write_text(FILE.replace('name = "alphabet-sort"', 'name = "arithmetic"\nid = "one"'))
    [environment] = load_settings(str(file), ["--resume", "--name", "other"], file.parent).environments
    assert (environment.name, environment.args) == ("arithmetic", {"max_names": 5})


def test_environments_in_another_order_keep_what_each_was_given_at_the_start(file: Path) -> None:
    first, tables = FILE.split("[[environments]]")
    own, rest = tables.split("[trainer]")
    file.write_text(f"{first}{OTHERS}[[environments]]{own}[trainer]{rest}")
    start(file, "--environments.0.args.digits", "3", "--environments.1.weight", "2.0")
    file.write_text(f"{first}[[environments]]{own}{OTHERS.replace('9', '8')}[trainer]{rest}")
    environments = load_settings(str(file), ["--resume"], file.parent).environments
    assert [one.args for one in environments] == [{"max_names": 5}, {"digits": 3}, {"length": 8}]
    assert [one.weight for one in environments] == [1.0, 1.0, 2.0]
    file.write_text(f"{first}{OTHERS}[trainer]{rest}")
    environments = load_settings(str(file), ["--resume"], file.parent).environments
    assert [one.args for one in environments] == [{"digits": 3}, {"length": 9}]


def test_an_environment_added_in_the_file_is_told_by_all_that_it_brings(file: Path) -> None:
    start(file, "--environment.args.max_names", "3")
    file.write_text(FILE + '[[environments]]\nname = "arithmetic"\nid = "sums"\n')
    changes = resumed(file)
    assert changes["environments.1.name"] == (None, "arithmetic")
    assert all(name.startswith("environments.1.") for name in changes)


def test_the_runs_own_file_goes_on_as_before_whatever_became_of_the_recipe(file: Path) -> None:
    folder = start(file, "--trainer.learning_rate", "7e-4")
    file.write_text(FILE.replace("1e-3", "5e-3"))
    assert resumed(file) == {"trainer.learning_rate": (7e-4, 5e-3)}
    own = load_settings(str(folder / "config.toml"), ["--resume"], file.parent)
    before = own_settings(folder)
    assert before is not None
    assert differences(before, own) == []


def test_after_the_runs_own_file_the_recipe_is_what_was_edited_since(file: Path) -> None:
    given = ["--trainer.threads", "2", "--observability.watchdog_s", "9000", "--trainer.learning_rate", "7e-4"]
    folder = start(file, *given)
    began = read_settings_file(str(file)).table
    own = folder / "config.toml"
    text = own.read_text()
    record_settings(load_settings(str(own), ["--resume"], file.parent), RunPaths(folder), read_settings_file(str(own)))
    assert (own.read_text(), read_settings_file(str(folder / "recipe.toml")).table) == (text, began)
    assert load_settings(str(own), ["--resume"], file.parent).observability.capture == 0
    assert resumed(file) == {}
    settings = load_settings(str(file), ["--resume"], file.parent)
    assert (settings.trainer.threads, settings.observability.watchdog_s) == (2, 9000)


def test_a_module_beside_the_file_that_a_run_began_with_is_found_with_the_runs_own_file(file: Path) -> None:
    (file.parent / "beside_the_file_at_first.py").touch()
    config = start(file) / "config.toml"
    for own in (config, start(config, "--name", "another") / "config.toml"):
        with placed(str(own)):
            assert find_spec("beside_the_file_at_first")
        assert find_spec("beside_the_file_at_first") is None


def test_a_folder_without_the_recipe_does_not_know_what_was_edited(file: Path) -> None:
    folder = start(file)
    (folder / "recipe.toml").unlink()
    file.write_text(FILE.replace("1e-3", "5e-3"))
    assert resumed(file) == {}
    assert resumed(file, "--trainer.learning_rate", "5e-3") == {"trainer.learning_rate": (1e-3, 5e-3)}


def test_a_run_keeps_the_seed_that_its_generators_were_given(file: Path) -> None:
    config = start(file, "--seed", "3") / "config.toml"
    assert load_settings(str(file), ["--resume"], file.parent).generator_seed == 3
    config.write_text(config.read_text().replace("[generator]\n", "[generator]\nseed = 0\n"))
    assert resumed(file) == {}
    assert load_settings(str(file), ["--resume"], file.parent).generator_seed == 0


def test_how_long_is_waited_and_how_often_a_role_is_started_again_may_differ(file: Path) -> None:
    start(file)
    assert resumed(file, "--restarts.per_role", "0", "--shutdown.grace_s", "9", "--restarts.silence_s", "5") == {}


@pytest.mark.parametrize(
    "now",
    [
        *("generator.devices 3", "generator.join_address tcp://10.0.0.1:7000 --generator.join_key key"),
        *("gateway.host 0.0.0.0", "gateway.port 8300"),
        *("observability.log_level debug", "observability.live off", "observability.log_every_s 9"),
        "observability.no_progress_s 9",
        *("trainer.checkpoint_every_steps 5", "trainer.keep_checkpoints 1", "transport.redis.prefix other"),
        "trainer.gradient_checkpointing true",
    ],
)
def test_where_a_run_is_and_what_is_shown_of_it_may_differ(file: Path, now: str) -> None:
    start(file, "--generator.device", "cuda", "--generator.devices", "2", "--generator.replicas", "{min = 1, max = 2}")
    assert resumed(file, *f"--{now}".split()) == {}


def test_what_a_resume_takes_as_given_holds_for_the_next_one_too(file: Path) -> None:
    folder = start(file, "--generator.connect", '["tcp://127.0.0.1:7000"]')
    file.write_text(FILE + "tags = ['second']\n")
    start(file, "--resume", "--trainer.threads", "4", "--generator.connect", '["tcp://127.0.0.1:7001"]')
    for _ in range(2):
        settings = load_settings(str(file), ["--resume"], file.parent)
        assert (settings.trainer.threads, settings.generator.connect) == (4, ("tcp://127.0.0.1:7001",))
        assert settings.observability.tags == ("second",)
        recorded = own_settings(folder)
        assert recorded is not None
        assert differences(recorded, settings, of_places=True) == []
        start(file, "--resume")
    assert not (folder / "superseded").exists()


def test_the_cluster_of_a_run_may_be_another_one(file: Path) -> None:
    start(file, "--placement", "ray", "--ray.address", "10.0.0.1:6379")
    assert resumed(file, "--placement", "ray", "--ray.address", "10.0.0.2:6379", "--ray.wait_s", "9") == {}
    assert resumed(file, "--ray.address", "unset") == {}


@pytest.mark.parametrize("now", ["url redis://there", "url unset --transport.redis.start true"])
def test_a_redis_may_be_another_one(file: Path, now: str) -> None:
    start(file, "--transport.batches", "redis", "--transport.redis.url", "redis://here")
    assert resumed(file, *f"--transport.redis.{now}".split(), "--transport.redis.outage_s", "9") == {}


def test_an_export_of_tokens_goes_on_until_something_else_is_said(file: Path) -> None:
    start(file, "--trainer.export_tokens", "jsonl")
    for given, expected in (((), "jsonl"), (("parquet",), "parquet"), (("unset",), None)):
        overrides = [part for form in given for part in ("--trainer.export_tokens", form)]
        assert resumed(file, *overrides) == {}
        settings = load_settings(str(file), ["--resume", *overrides], file.parent)
        assert settings.trainer.export_tokens == expected


def test_name_and_capture_are_those_of_each_start(file: Path) -> None:
    folder = start(file)
    folder.rename(folder.with_name("copied"))
    assert resumed(file, "--name", "copied") == {}
    settings = load_settings(str(file), ["--resume", "--name", "copied"], file.parent)
    assert (settings.name, settings.observability.capture) == ("copied", 0)
    again = load_settings(str(file), ["--resume", "--name", "copied", "--observability.capture", "4"], file.parent)
    assert again.observability.capture == 4
    assert resumed(file, "--name", "copied", "--observability.capture", "4") == {}


def test_what_differs_is_refused_with_every_difference_and_nothing_is_written(file: Path) -> None:
    folder = start(file)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SettingsError) as refused:
        start(file, "--resume", "--max_steps", "120", "--trainer.learning_rate", "7e-4")
    told = str(refused.value)
    assert "max_steps = 120 in place of 60" in told
    assert "trainer.learning_rate = 0.0007 in place of 0.001" in told
    assert "--allow-changed-settings" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_differences_name_no_key_of_a_server(file: Path) -> None:
    file.write_text(FILE.replace("max_names = 5", 'max_names = 5\nheaders = { X-Key = "sesame" }'))
    folder = start(file)
    with pytest.raises(SettingsError) as refused:
        start(file, "--resume", "--environment.args.headers", '{ X-Key = "mellon" }')
    told = str(refused.value)
    assert "environments.0.args.headers.X-Key = '***' in place of '***'" in told
    assert "sesame" not in told
    assert "mellon" not in told
    assert "sesame" in (folder / "config.toml").read_text()  # the run needs it


def test_what_is_allowed_is_recorded_and_what_was_there_is_kept(file: Path) -> None:
    folder = start(file)
    kept = (folder / "config.toml").read_text()
    for steps in ("120", "180"):
        start(file, "--resume", "--allow-changed-settings", "--max_steps", steps)
    assert (folder / "superseded" / "config_1.toml").read_text() == kept
    assert "max_steps = 120" in (folder / "superseded" / "config_2.toml").read_text()
    assert resumed(file) == {}
    assert load_settings(str(file), ["--resume"], file.parent).max_steps == 180
    with pytest.raises(SettingsError, match="max_steps = 200 in place of 180"):  # it was allowed once
        start(file, "--resume", "--max_steps", "200")


def test_a_file_that_allows_changes_allows_those_of_every_resume(file: Path) -> None:
    start(file)
    for steps in (90, 120, 150):
        file.write_text("allow_changed_settings = true\n" + FILE.replace("max_steps = 60", f"max_steps = {steps}"))
        start(file, "--resume")
        assert load_settings(str(file), ["--resume"], file.parent).max_steps == steps
    file.write_text(FILE)
    with pytest.raises(SettingsError, match="max_steps = 60 in place of 150"):
        start(file, "--resume")


def test_so_do_tables_of_a_program(tmp_path: Path) -> None:
    given = {"model": {"name": "bundled:quickstart"}, "environments": [{"name": "reverse-text"}]}
    for max_steps in (1, 2, 3, 4):
        again = {"resume": True, "allow_changed_settings": True} if max_steps > 1 else {}
        settings, places = load_from_python({**given, **again, "max_steps": max_steps}, {}, tmp_path)
        record_settings(settings, RunPaths(tmp_path / settings.name), places.file)
        assert settings.max_steps == max_steps


def test_a_setting_of_the_runs_own_file_that_is_wrong_is_named_with_its_line(file: Path) -> None:
    folder = start(file)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("max_steps = 60", "max_stepz = 60"))
    with pytest.raises(SettingsError, match=r"config\.toml, line \d+: max_stepz is no setting"):
        load_settings(str(file), ["--resume"], file.parent)
