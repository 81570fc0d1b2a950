from __future__ import annotations

import pytest

from tailrace.errors import SettingsError
from tailrace.lifecycle.devices import DeviceNeed, assign_devices, visible_devices

TRAINER = DeviceNeed("trainer", 1, "trainer.device = 'cuda'")


def generators(count: int, tensor_parallel: int = 1, *, chosen: str = "") -> list[DeviceNeed]:
    setting = "generator.devices" if chosen else "generator.device = 'cuda'"
    ids = [tuple(chosen[tensor_parallel * index :][:tensor_parallel]) or None for index in range(count)]
    return [DeviceNeed(f"generator-{index}", tensor_parallel, setting, ids[index]) for index in range(count)]


def test_the_trainer_comes_first_then_the_replicas_in_order() -> None:
    assert assign_devices([TRAINER, *generators(2, 2)], "0123456") == {
        "trainer": ("0",),
        "generator-0": ("1", "2"),
        "generator-1": ("3", "4"),
    }


def test_what_was_chosen_is_taken_by_nobody_else() -> None:
    assert assign_devices([TRAINER, *generators(2, chosen="02")], "0123") == {
        "trainer": ("1",),
        "generator-0": ("0",),
        "generator-1": ("2",),
    }


def test_a_gpu_that_is_named_twice_is_shared() -> None:
    assert set(assign_devices(generators(2, chosen="11"), "01").values()) == {("1",)}


def test_a_single_gpu_is_shared_by_all() -> None:
    assert set(assign_devices([TRAINER, *generators(3)], ["GPU-8932f937"]).values()) == {("GPU-8932f937",)}


def test_who_needs_none_gets_none() -> None:
    assert assign_devices([DeviceNeed("generator", 0, "generator.engine = 'vllm'")], []) == {}


@pytest.mark.parametrize(
    ("needs", "pool", "why"),
    [
        ([TRAINER], "", r"trainer.device = 'cuda' cannot be used here: there is no GPU"),
        ([TRAINER, *generators(2)], "01", r"needs 1 for the trainer, 1 for the generator-0, .* sees 2 GPUs \(0, 1\)"),
        (generators(1, 2), "0", r"2 for the generator-0, and sees 1 GPUs"),
        (generators(1, chosen="7"), "01", r"generator.devices names the GPU 7, and this run sees 0, 1"),
        (generators(1, 2, chosen="11"), "01", r"gives the generator-0 1 of the 2 GPUs"),
    ],
)
def test_too_few_gpus_are_refused_with_what_is_needed(needs: list[DeviceNeed], pool: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        assign_devices(needs, pool)


@pytest.mark.parametrize(
    ("said", "ids"), [("3,1", ("3", "1")), ("GPU-8, 2", ("GPU-8", "2")), ("", ()), ("-1", ()), ("0,-1,2", ("0",))]
)
def test_what_the_parent_sees_is_all_there_is(said: str, ids: tuple[str, ...]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": said}) == ids
