"""What each tool's own reader finds is what `metrics.jsonl` says. Nothing here needs a network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.reporting.metrics import METRICS
from tailrace.reporting.sinks import read_jsonl
from tailrace.reporting.trackers.hub import Trackers
from tailrace.tracing.background import BackgroundWriter
from tests.reporting.trackers.story import LINES, SUMMARY, tell

pytestmark = pytest.mark.xdist_group("trackers")
Points = dict[str, list[tuple[int, float]]]
"""Step and value of each metric, in order."""


def written(folder: Path) -> Points:
    points: Points = {}
    for line in read_jsonl(folder / "metrics.jsonl"):
        for name, value in line.items():
            if name not in ("step", "wall_s"):
                points.setdefault(name, []).append((int(line["step"]), value))  # type: ignore[arg-type]
    assert points
    return points


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing goes wrong unseen, and no tool finds another one's settings."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_DIR", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()] == []


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    tell(tmp_path, "tensorboard")
    found = _tensorboard(tmp_path)
    points = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    expected = written(tmp_path)
    assert points.keys() == expected.keys()
    for name, values in expected.items():
        assert [step for step, _ in points[name]] == [step for step, _ in values]
        assert [value for _, value in points[name]] == pytest.approx([value for _, value in values])  # float32
    about = found.SummaryMetadata("reward/mean").summary_description
    assert about == f"{METRICS['reward/mean'].description} [1; mean over a step]"
    assert _text(found, "settings", 0).count("trainer.learning_rate = 0.0001") == 1
    assert "&lt;b>&amp;\\|<br>" in _text(found, "rollouts", 2)
    assert _text(found, "checkpoint", 2).endswith("checkpoints/step_000002")
    assert '"reward_last": 0.625' in _text(found, "summary", 3)
    assert _plugin(found, "histogram/reward") == "histograms"
    assert len(found.Tensors("histogram/reward")) == 3
    assert _plugin(found, "_hparams_/session_start_info") == "hparams"


def test_tensorboard_is_told_the_settings_where_a_resume_asks_for_it_first(tmp_path: Path) -> None:
    for _ in range(2):
        tell(tmp_path, "tensorboard", is_resumed=True)
    found = _tensorboard(tmp_path)
    assert "trainer.learning_rate = 0.0001" in _text(found, "settings", 0)
    assert _plugin(found, "_hparams_/session_start_info") == "hparams"


def test_tensorboard_shows_the_newest_start_of_steps_told_twice(tmp_path: Path) -> None:
    tell(tmp_path, "tensorboard")
    tell(tmp_path, "tensorboard", is_resumed=True)
    found = _tensorboard(tmp_path)
    assert [one.step for one in found.Scalars("reward/mean")] == [1, 2, 3]


def test_tensorboard_keeps_the_step_that_was_resumed_from_when_an_evaluation_of_it_comes_first(tmp_path: Path) -> None:
    def resumed(hub: Trackers, writer: BackgroundWriter) -> None:
        hub.logged({"step": 2, "wall_s": 3.25, "eval/sort/reward/mean": 0.5})
        hub.logged(LINES[-1])

    tell(tmp_path, "tensorboard")
    tell(tmp_path, "tensorboard", is_resumed=True, story=resumed)
    found = _tensorboard(tmp_path)
    assert [one.step for one in found.Scalars("training/loss")] == [1, 2, 3]
    assert [one.step for one in found.Scalars("eval/sort/reward/mean")] == [1, 2]


def _tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "trackers/tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


def _plugin(found: Any, tag: str) -> str:
    return str(found.SummaryMetadata(tag).plugin_data.plugin_name)


def _text(found: Any, tag: str, step: int) -> str:
    (text,) = [one.tensor_proto.string_val[0].decode() for one in found.Tensors(tag) if one.step == step]
    return str(text)


def test_wandb_writes_its_offline_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.reporting.trackers.wandb_files import config, history, read_records, summary

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    (checkpoint := tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    tell(tmp_path, "wandb")
    expected = written(tmp_path)
    tell(tmp_path, "wandb", is_resumed=True)
    files = sorted((tmp_path / "trackers/wandb").glob("wandb/offline-run-*/*.wandb"))
    records = [read_records(path) for path in files]
    runs = [one.run for start in records for one in start if one.HasField("run")]
    assert {run.run_id for run in runs} == {(tmp_path / "trackers/run_id").read_text()}
    assert {(run.project, run.display_name) for run in runs} == {("tailrace", "story")}
    assert config(records[0])["trainer"] == {"learning_rate": 1e-4}
    metrics = [one.metric for one in records[0] if one.HasField("metric")]
    assert ("*", "step") in {(metric.glob_name, metric.step_metric) for metric in metrics}
    points: Points = {}
    for line in history(records[0]):
        for name, value in line.items():
            if isinstance(value, int | float) and name != "wall_s" and not name.startswith(("_", "step")):
                points.setdefault(name, []).append((line["step"], value))
    assert points == expected
    logged = {name: value for line in history(records[0]) for name, value in line.items() if isinstance(value, dict)}
    assert logged["rollouts"]["_type"] == "table-file"
    assert sum(logged["histogram/reward"]["values"]) == 5
    assert (logged["rollouts"]["nrows"], logged["rollouts"]["ncols"]) == (3, 11)
    told = summary(records[0])
    assert (told["run/reward_last"], told["checkpoint"]) == (0.625, str(tmp_path / "checkpoints/step_000002"))
    artifacts = [one.request.log_artifact.artifact for one in records[0] if one.request.HasField("log_artifact")]
    artifacts += [one.artifact for one in records[0] if one.HasField("artifact")]
    references = [entry.ref for one in artifacts if one.type == "model" for entry in one.manifest.contents]
    assert references == [(checkpoint / "model.safetensors").as_uri()]


def test_wandb_without_an_account_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    tell(tmp_path, "wandb")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "the tracker wandb: it could not be started" in warning
    caplog.clear()


def test_trackio_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tell(tmp_path, "trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    import trackio.sqlite_storage as storage  # isort: skip

    for module in (utils, storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    name = f"story-{(tmp_path / 'trackers/run_id').read_text()[:6]}"
    assert SQLiteStorage.get_runs("tailrace") == [name]
    logs = SQLiteStorage.get_logs("tailrace", name)
    points: Points = {}
    for line in logs:
        for metric, value in line.items():
            if isinstance(value, int | float) and metric not in ("step", "wall_s"):
                points.setdefault(metric, []).append((line["step"], value))
    assert points == written(tmp_path)
    config = SQLiteStorage.get_run_config("tailrace", name)
    assert config is not None
    assert (config["trainer.learning_rate"], config["environments.0.name"]) == (1e-4, "sort")
    traces = SQLiteStorage.get_traces("tailrace", name)
    assert {trace["metadata"]["rollout_id"] for trace in traces} == {"g2/4", "g2/2", "g2/0"}
    assert {message["content"] for trace in traces for message in trace["messages"]} >= {"sort 2"}
    kinds = {metric: value["_type"] for line in logs for metric, value in line.items() if isinstance(value, dict)}
    assert kinds["histogram/reward"] == "trackio.histogram"
    assert kinds["checkpoints"] == kinds["summary"] == "trackio.table"


def test_mlflow_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_resumed in (False, True):
        tell(tmp_path, "mlflow", is_resumed=is_resumed)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "trackers/mlflow/mlruns").as_uri())
    experiment = client.get_experiment_by_name("tailrace")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    run_id = run.info.run_id
    points = {
        name: sorted({(one.step, one.value) for one in client.get_metric_history(run_id, name)})
        for name in run.data.metrics
        if name != "wall_s"
    }
    assert points == {name: sorted(set(values)) for name, values in written(tmp_path).items()}
    assert (run.info.run_name, run.info.status) == ("story", "FINISHED")
    assert (run.data.params["trainer.learning_rate"], run.data.params["environments.0.name"]) == ("0.0001", "sort")
    assert run.data.tags["tailrace.run_id"] == (tmp_path / "trackers/run_id").read_text()
    assert run.data.tags["checkpoint"] == str(tmp_path / "checkpoints/step_000002")
    table = msgspec.json.decode(Path(client.download_artifacts(run_id, "rollouts/step_000002.json")).read_bytes())
    place = table["columns"].index("rollout_id")
    assert [row[place] for row in table["data"]] == ["g2/4", "g2/2", "g2/0"]
    summary = msgspec.json.decode(Path(client.download_artifacts(run_id, "summary.json")).read_bytes())
    assert summary == msgspec.to_builtins(SUMMARY)
    histograms = msgspec.json.decode(
        Path(client.download_artifacts(run_id, "histograms/step_000003.json")).read_bytes()
    )
    assert sum(histograms["histogram/reward"]["counts"]) == 5
    assert not math.isnan(histograms["histogram/reward"]["edges"][0])


@pytest.mark.parametrize("how", ["is at another server", "deleted its run"])
def test_mlflow_begins_a_run_where_a_resume_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    stores = [(tmp_path / name).as_uri() for name in ("first", "second")]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stores[0])
    tell(tmp_path / "run", "mlflow")
    known = tmp_path / "run/trackers/mlflow/run_id"
    first = known.read_text()
    from mlflow.tracking import MlflowClient

    if how == "deleted its run":
        MlflowClient(tracking_uri=stores[0]).delete_run(first)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", stores[1])
    tell(tmp_path / "run", "mlflow", is_resumed=True)
    assert known.read_text() != first
    run = MlflowClient(tracking_uri=stores[how != "deleted its run"]).get_run(known.read_text())
    assert (run.info.run_name, run.info.status) == ("story", "FINISHED")
    assert run.data.params["trainer.learning_rate"] == "0.0001"
    assert run.data.metrics["reward/mean"] == 0.625
