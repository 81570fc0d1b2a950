"""Trackers are told what the run's folder says, and whatever is wrong with one of them costs the run nothing."""

from __future__ import annotations

import io
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tailrace.errors import SettingsError
from tailrace.reporting.metrics import metric_spec
from tailrace.reporting.settings import ObservabilitySettings
from tailrace.reporting.sinks import read_jsonl
from tailrace.reporting.trackers.hub import Trackers
from tailrace.reporting.trackers.messages import LATE, Begin, Checkpoint, Metrics, decode_message, frame, read_frame
from tailrace.reporting.trackers.protocol import TrackedRun
from tailrace.reporting.trackers.registry import require_trackers
from tailrace.tracing.background import BackgroundWriter
from tests.reporting.example_run import a_rollout
from tests.reporting.trackers import story
from tests.reporting.trackers.story import LINES, SETTINGS, SUMMARY, entries, tell

OWN = "tests.reporting.trackers.own"
PATIENCE_S = 60.0


def told(folder: Path, tracker: str = "Lines") -> list[list[object]]:
    return [
        msgspec.json.decode(line) for line in (folder / "trackers" / tracker / "told.jsonl").read_bytes().splitlines()
    ]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_tracker_is_told_what_the_folder_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = tell(tmp_path, f"{OWN}:Lines")
    notes = told(tmp_path)
    assert notes[0][:2] == ["run", "story"]
    assert notes[0][3:] == [False, SETTINGS]
    lines = [{"step": step, "wall_s": wall_s, **metrics} for kind, step, wall_s, metrics in _of(notes, "log")]
    assert lines == LINES == [*read_jsonl(tmp_path / "metrics.jsonl")]
    assert [note[1] for note in _of(notes, "histograms")] == [1, 2, 3]
    assert _of(notes, "histograms")[0][2]["histogram/reward"] == 5
    assert _of(notes, "rollouts") == [["rollouts", 2, [["g2/4", 1.0], ["g2/2", 0.5], ["g2/0", 0.0]]]]
    assert _of(notes, "checkpoint") == [["checkpoint", 2, str(tmp_path / "checkpoints/step_000002")]]
    assert notes[-1] == ["end", msgspec.to_builtins(SUMMARY)]
    assert hub.metrics() == {"tracker/Lines/dropped_records": 0, "tracker/Lines/failed_calls": 0}
    assert warnings(caplog) == []


def test_a_tracker_is_told_no_key_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"url": "https://host/mcp", "headers": {"Authorization": "Bearer sesame", "X-Key": "$MCP_KEY"}}
    monkeypatch.setattr(story, "SETTINGS", {"environments": [{"name": "mcp", "args": args}]})
    tell(tmp_path, f"{OWN}:Lines")
    shown = {**args, "headers": {"Authorization": "***", "X-Key": "$MCP_KEY"}}
    assert told(tmp_path)[0][4] == {"environments": [{"name": "mcp", "args": shown}]}


def _of(notes: list[list[object]], kind: str) -> list[list[object]]:
    return [note for note in notes if note[0] == kind]


def test_values_that_no_histogram_can_hold_are_left_out(tmp_path: Path) -> None:
    def story(hub: Trackers, writer: BackgroundWriter) -> None:
        rewards = [1.7e308, -1.7e308, math.inf, math.nan, 0.25, 0.75]
        hub.ended(2, [a_rollout(1, place, reward, []) for place, reward in enumerate(rewards)], writer.submit)
        writer.close()

    tell(tmp_path, f"{OWN}:Lines", story=story)
    assert _of(told(tmp_path), "histograms")[0][2]["histogram/reward"] == 2


def test_a_resumed_run_has_the_same_id(tmp_path: Path) -> None:
    tell(tmp_path, f"{OWN}:Lines")
    tell(tmp_path, f"{OWN}:Lines", is_resumed=True)
    first, second = _of(told(tmp_path), "run")
    assert first[2] == second[2]
    assert (first[3], second[3]) == (False, True)


def test_one_that_cannot_be_made_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell(tmp_path, f"{OWN}:NotMade", f"{OWN}:Lines")
    (warning,) = warnings(caplog)
    assert "the tracker NotMade: it could not be started" in warning
    assert "ConnectionError: nobody is there for story" in warning
    assert "Traceback" in (tmp_path / "logs/tracker-NotMade.log").read_text()
    assert len(_of(told(tmp_path), "log")) == len(LINES)


def test_calls_that_fail_are_counted_and_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = tell(tmp_path, f"{OWN}:Failing")
    assert hub.metrics() == {"tracker/Failing/dropped_records": 0, "tracker/Failing/failed_calls": len(LINES)}
    (warning,) = warnings(caplog)
    assert "a call failed, and more are only counted: ValueError: no step 1" in warning


def test_one_whose_process_dies_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell(tmp_path, f"{OWN}:Dying")
    (warning,) = warnings(caplog)
    assert "the tracker Dying: its process ended" in warning


def test_one_that_hangs_drops_records_and_is_killed_at_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent, pid = 20_000, tmp_path / "trackers/Hanging/pid"

    def story(hub: Trackers, writer: BackgroundWriter) -> None:
        for _ in range(sent):  # more than pipe and queue hold
            hub.logged(LINES[0])
        deadline_s = time.monotonic() + PATIENCE_S
        while not (pid.is_file() and pid.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    hub = tell(tmp_path, f"{OWN}:Hanging", story=story, close_s=0.5, queue_records=4)
    assert 0 < hub.metrics()["tracker/Hanging/dropped_records"] < sent
    (warning,) = warnings(caplog)
    assert "it is slower than this run: records are dropped" in warning
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_it_prints_goes_into_a_log_of_bounded_size_and_is_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub = tell(tmp_path, f"{OWN}:Flooding")
    assert len(_of(told(tmp_path, "Flooding"), "log")) == len(LINES)
    assert sum(hub.metrics().values()) == 0
    assert warnings(caplog) == []
    logs = [*(tmp_path / "logs").iterdir()]
    assert 0 < sum(path.stat().st_size for path in logs) <= 21_000_000


def test_its_process_ends_with_the_run_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "trackers"
    folder.mkdir()
    run = TrackedRun(
        name="r", run_id="1", project="p", run_folder=tmp_path, folder=folder, settings={}, is_resumed=False
    )
    begin = Begin(tracker=f"{OWN}:Hanging", run=run, log=tmp_path / "log", module_path=sys.path, close_s=0.1)
    command = [sys.executable, "-m", "tailrace.reporting.trackers.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(frame(begin) + frame(Metrics(1, 0.0, {})))
        process.stdin.flush()
        assert process.stdout.readline() == b'{"failed":0,"why":"","is_over":false}\n'
        process.stdin.close()
        assert process.wait(PATIENCE_S) == LATE


def test_a_message_that_is_cut_short_is_the_end() -> None:
    whole = frame(Checkpoint(3, "runs/a/checkpoints/step_000003"))
    assert decode_message(read_frame(io.BytesIO(whole))) == Checkpoint(3, "runs/a/checkpoints/step_000003")
    assert [read_frame(io.BytesIO(whole[:cut])) for cut in (0, 2, 4, len(whole) - 1)] == [b""] * 4


def test_an_unknown_one_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'wandbb' is no tracker; did you mean 'wandb'\? Known ones: mlflow, "):
        require_trackers(["wandbb"])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"'mlflow' needs mlflow: pip install .tailrace\[mlflow\]."):
        require_trackers(["mlflow"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{OWN}:Line", "did you mean"),
        ("no_such.module:T", "no module"),
        (f"{OWN}:NOTHING", "no class and no function"),
    ],
)
def test_one_of_your_own_that_is_none_is_refused_before_the_run(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        require_trackers([name])


def test_packages_bring_trackers_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "installed"
    about = installed / "lines_tracker-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-tracker\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[tailrace.trackers]\nlines = {OWN}:Lines\n")
    monkeypatch.syspath_prepend(str(installed))
    require_trackers(["lines"])
    tell(tmp_path, "lines")
    assert len(_of(told(tmp_path, "lines"), "log")) == len(LINES)


def test_names_may_be_given_in_one_text() -> None:
    assert ObservabilitySettings.model_validate({"trackers": "wandb, mine:Csv"}).trackers == ("wandb", "mine:Csv")


def test_two_of_one_class_have_folders_and_metrics_of_their_own(tmp_path: Path) -> None:
    hub = tell(tmp_path, f"{OWN}:Lines", f"{OWN}:Lines")
    assert {name.split("/")[1] for name in hub.metrics()} == {"Lines", "Lines-2"}
    assert told(tmp_path, "Lines")[1:] == told(tmp_path, "Lines-2")[1:]
    assert {metric_spec(name).name for name in hub.metrics()} == {
        "tracker/{tracker}/dropped_records",
        "tracker/{tracker}/failed_calls",
    }


def test_without_trackers_nothing_is_made(tmp_path: Path) -> None:
    hub = tell(tmp_path)
    assert hub.metrics() == {}
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_a_rollout_that_is_too_long_stays_in_the_folder(tmp_path: Path) -> None:
    def story(hub: Trackers, writer: BackgroundWriter) -> None:
        told_of = entries(2)
        told_of[4].rollout.messages[1]["content"] = "x" * 2_000_000
        told_of[4].rollout.messages = [*told_of[4].rollout.messages]
        for entry in told_of[:4]:
            entry.rollout.messages = [{"role": "user", "content": "short"}]
        hub.ended(2, told_of, writer.submit)
        writer.close()

    tell(tmp_path, f"{OWN}:Lines", story=story)
    assert _of(told(tmp_path), "rollouts") == [["rollouts", 2, [["g2/2", 0.5], ["g2/0", 0.0]]]]
