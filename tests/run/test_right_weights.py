"""Rollouts are sampled by the trainer's own model: other weights are replaced or refused, and a difference is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import main
from tailrace.generation.engines.protocol import Engine
from tailrace.generation.settings import ModelSettings
from tailrace.models.identity import ModelIdentity, identify, is_other, other_architecture
from tailrace.models.loading import resolve_model
from tailrace.run import roles
from tailrace.run.engines import engine_factory
from tests.run.runs import TINY, WITHOUT_MODEL, command, environment, records, run_inline
from tests.run.served import address_of, require_refused, serving
from tests.support.bundled_models import BUNDLED as OWN
from tests.support.bundled_models import save_smaller, save_with_other_weights


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_with_other_weights(tmp_path_factory.mktemp("other"))


def test_a_generator_with_other_weights_is_sent_the_runs_own_before_the_first_rollout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, other: str
) -> None:
    with serving("--address", "tcp://127.0.0.1:0", model=other) as process:
        connect = ("--generator.connect", address_of(process))
        with command(tmp_path, "--max_steps", "2", *connect) as run:
            status, printed = run.wait()
            assert status == 0, printed
        assert records(run.folder / "metrics.jsonl")[0]["training/logprob_difference_fresh"] < 1e-3
        assert main(["eval", "quickstart", *TINY, *environment("words"), *connect]) == 2  # which sends no weights
        refused = " ".join(capsys.readouterr().err.split())
        assert f"serves {other}, not the weights of model.name = {OWN}: start it with `tailrace serve {OWN}`" in refused
        smaller = save_smaller(tmp_path / "smaller")
        refusing = (*WITHOUT_MODEL, "--model.name", smaller, "--max_steps", "2")
        with command(tmp_path, *refusing, *connect, name="refused") as run:
            require_refused(*run.wait(), served=other, own=smaller)


async def test_a_trainer_that_disagrees_with_the_generator_raises_an_alarm(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_other_weights(model: ModelSettings, *rest: Any, **others: Any) -> Callable[[], Engine]:
        return engine_factory(model.model_copy(update={"name": other}), *rest, **others)

    assert (await run_inline(tmp_path, "--max_steps", "1", name="right")).mismatched_steps == 0
    monkeypatch.setattr(roles, "engine_factory", with_other_weights)
    summary = await run_inline(tmp_path, "--max_steps", "1")
    assert (summary.mismatched_steps, summary.exit_code) == (1, 0)
    assert (
        "ALARM: in step 1 the trainer's log-probabilities differ"
        in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    )


def test_a_model_is_known_by_its_files_wherever_they_lie(tmp_path: Path, other: str) -> None:
    folder = Path(resolve_model(OWN).location)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    own, copy = identify(OWN), identify(str(tmp_path))
    assert not other_architecture(own.config, copy.config)
    assert not is_other(own, copy)
    assert is_other(own, identify(other))
    assert is_other(ModelIdentity("Qwen/Qwen3-0.6B"), ModelIdentity("Qwen/Qwen3-1.7B"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": 5.0}, ["rope_theta is 5.0 there and 10000.0 here"]),
        ({"transformers_version": "9", "torch_dtype": "bfloat16", "_name_or_path": "elsewhere"}, []),
        ({"rope_parameters": {"factor": 2, "type": "yarn"}}, ["rope_parameters.factor is 2 there and 1 here"]),
        ({"num_hidden_layers": 3, "model_type": "qwen3"}, ["model_type is", "num_hidden_layers is"]),
    ],
)
def test_configurations_are_compared_by_what_the_model_computes(changes: dict[str, object], told: list[str]) -> None:
    own = json.loads(
        """{"model_type": "llama", "rope_theta": 10000.0, "num_hidden_layers": 2, "_name_or_path": "here",
        "torch_dtype": "float32", "transformers_version": "5", "rope_parameters": {"factor": 1}}"""
    )
    found = other_architecture(own, own | changes)
    assert len(found) == len(told)
    assert all(difference.startswith(start) for difference, start in zip(found, told, strict=True))
