"""Sizes that no memory holds are refused with the figure, before anything is made, and cost nobody a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.errors import SettingsError
from tailrace.run import limits
from tailrace.run.limits import require_room, total_memory
from tests.run.runs import IMPORTS, run_inline, tiny_settings

MEMORY = 24 * 10**9
LONG = ("--generator.max_cache_tokens", str(2**24), "--model.max_model_tokens", str(2**24))


def test_settings_of_every_day_are_accepted() -> None:
    require_room(tiny_settings(), MEMORY)
    require_room(tiny_settings("--generator.replicas", "4", "--rollouts.workers", "16"), MEMORY)
    assert total_memory() > 1e9


@pytest.mark.parametrize(
    ("overrides", "memory", "message"),
    [
        (
            ("--scheduling.batch_size", str(2**20)),
            4 * 10**9,
            r"1,048,576 rollouts would take about 5\.4 GB.*batch_size",
        ),
        (
            ("--generator.replicas", "1024"),
            MEMORY,
            r"1,024 processes of generators would take about 107\.4 GB.*24\.0 GB",
        ),
        (("--rollouts.workers", "1024"), 10**10, r"1,024 rollout workers .* lower rollouts\.workers"),
        (
            (*LONG, "--generator.slots", "65536", "--scheduling.row_tokens", str(2**24)),
            MEMORY,
            r"keys and values of 65,536 requests of 16,777,216 tokens would take about .* TB .* lower generator\.slots",
        ),
        (
            ("--scheduling.row_tokens", str(2**24)),
            5 * 10**9,
            r"layers' inputs of a row of 16,777,216 tokens would take about 25\.8 GB .* lower scheduling\.row_tokens",
        ),
    ],
)
def test_what_no_memory_holds_is_refused_with_the_figure(overrides: tuple[str, ...], memory: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        require_room(tiny_settings(*overrides), memory)


def test_a_data_set_whose_order_no_memory_holds_is_refused() -> None:
    require_room(tiny_settings(), MEMORY, tasks=[10_000, 10**9])
    with pytest.raises(SettingsError, match=r"the order of 4,000,000,000 tasks would take about 32\.0 GB .* lower env"):
        require_room(tiny_settings(), MEMORY, tasks=[10_000, 4 * 10**9])


async def test_it_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "total_memory", lambda: 10**8)
    with pytest.raises(SettingsError, match="would take about"):
        await run_inline(tmp_path, "--max_steps", "1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("--scheduling.batch_size", "1000000000"), "scheduling.batch_size = 1000000000"),
        (("--generator.slots", "1000000000"), "generator.slots = 1000000000"),
        (("--environment.args.num_train_tasks", "1000000000000"), "the order of 1,000,000,000,000 tasks"),
        (("--scheduling.row_tokens", "1000000000"), "scheduling.row_tokens = 1000000000"),
        (("--rollouts.max_tokens", "1000000000"), "rollouts.max_tokens = 1000000000"),
        (("--seed", str(2**64)), "smaller than 2^63"),
        (("--trainer.learning_rate", "inf"), "trainer.learning_rate = inf"),
        (("--trainer.max_grad_norm", "nan"), "trainer.max_grad_norm = nan"),
        (("--rollouts.timeout_s", "inf"), "it must be a finite number"),
    ],
)
def test_numbers_that_are_none_or_too_large_are_refused_by_their_setting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", *override]) == 2
    printed, said = capsys.readouterr()
    assert (printed, message in said) == ("", True), said
    assert not list(tmp_path.iterdir())


def test_so_is_a_device_that_is_not_there(tmp_path: Path) -> None:
    cuda = ("--trainer.device", "cuda", "--generator.connect", "tcp://127.0.0.1:1")
    command = [sys.executable, "-m", "tailrace", "train", "quickstart", *cuda]
    environment = {**IMPORTS, "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "trainer.device = 'cuda'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_more_ids_of_supports_than_a_batch_can_name_are_refused() -> None:
    chosen = ("--rollouts.top_k", "65536", "--scheduling.batch_size", "65536")
    with pytest.raises(SettingsError, match=r"rollouts.top_k = 65,536 .* of 512 tokens, .* are 2,199,023,255,552 ids"):
        tiny_settings(*chosen)
    tiny_settings("--rollouts.top_k", "32", "--scheduling.batch_size", "65536")
