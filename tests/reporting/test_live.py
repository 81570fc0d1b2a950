from __future__ import annotations

import asyncio
import io
import itertools
import logging
import math
import re
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailrace.lifecycle.standard_streams import give_up
from tailrace.records import TaskId
from tailrace.reporting import live
from tailrace.reporting.conversations import conversation_lines
from tailrace.reporting.curves import Curve
from tailrace.reporting.live import LiveView, QuietLines, progress_line, wants_live_view
from tailrace.reporting.live_rendering import run_screen
from tailrace.reporting.logs import Terminal, keep_log_within_size, logging_as_it_was, setup_logging
from tailrace.reporting.run_view import Pace, RunView, Stage
from tailrace.tracing.lag import LagStatistics
from tests.reporting.example_run import HOSTILE, a_conversation, a_message, a_rollout
from tests.support.lost_output import closed_pipe, full_disk


def a_view(step: int = 38, elapsed_s: float = 72.0) -> RunView:
    return RunView(
        name="quickstart-2",
        model="tailrace-tiny",
        environments=["alphabet-sort"],
        stage=Stage.TRAINING,
        elapsed_s=elapsed_s,
        step=step,
        max_steps=60,
        rewards=Curve.of([0.25, 0.5, 0.745]),
        reward_std=0.143,
        completion_tokens=84.2,
        turns=2.4,
        learning_rate=8e-4,
        curves={
            "training/kl": Curve.of([0.001, 0.002]),
            "training/entropy": Curve.of([0.9, 0.83]),
            "training/grad_norm": Curve.of([0.4, 0.31]),
        },
        sample=a_rollout(38, 0, 0.75, a_conversation(True)).rollout,
        held_out={"alphabet-sort": 0.813},
        evaluating_step=30,
        evaluated_rollouts=12,
        policy_version=38,
        staleness_mean=0.8,
        staleness_max=2,
        max_staleness=4,
        generation_tokens_per_s=Curve.of([4000, 3958]),
        training_tokens_per_s=Curve.of([2700, 2770]),
        in_flight=96,
        in_flight_limit=160,
        ready_groups=2,
        groups_per_batch=8,
        queued_batches=1,
        running_rollouts=64,
        phases_s={"generate": 1.42, "train": 0.9},
        lag=LagStatistics(0.0002, 0.001, 0.003, 0.012, stalls=1),
        failures={"timeout": 2},
        rollouts_trained=2432,
        rollouts_filtered=120,
        rss_bytes=1.3e9,
    )


def text_of(view: RunView, width: int, height: int = 24, **more: object) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(run_screen(view, width, height, **more))  # type: ignore[arg-type]
    return console.export_text()


LOG_LINES = [f"12:00:0{second} checkpoint written" for second in range(4)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (120, 30), (160, 50), (200, 60)])
def test_the_live_view_fits_the_terminal(width: int, height: int) -> None:
    lines = text_of(a_view(), width, height, remaining_s=41.0, log_lines=LOG_LINES).rstrip("\n").splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) < height


def test_a_wide_and_tall_terminal_is_used_for_curves_and_a_conversation() -> None:
    text = text_of(a_view(), 160, 50, log_lines=LOG_LINES)
    for promised in (
        *("reward 0.745  0.25 to 0.745", "KL 0.002  0.001 to 0.002", "entropy 0.83  0.83 to 0.9", "gradient 0.31"),
        *("alphabet-sort/38: reward 0.750", "Sort these names: Curie, Ada, Dirac, Boole", "assistant  "),
    ):
        assert promised in text
    assert sum(line.startswith("12:00:0", 2) for line in text.splitlines()) == 4
    assert len(text.rstrip("\n").splitlines()) == 39


def test_a_conversation_is_cut_to_the_rows_that_are_left() -> None:
    said = [a_message("assistant", "word " * 400), a_message("user", HOSTILE), a_message("assistant", "long " * 4000)]
    view = replace(a_view(), sample=a_rollout(38, 0, 0.75, said).rollout)
    text = text_of(view, 160, 34)
    assert len(text.rstrip("\n").splitlines()) < 34
    assert "…" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_roles_and_names_of_tasks_do_not_steer_the_terminal() -> None:
    rollout = a_rollout(38, 0, 0.75, [a_message("a\x1b[2J\ntool", "84")]).rollout
    rollout.task = replace(rollout.task, task_id=TaskId("sort/\x1b[2J\u202e"))
    assert [*conversation_lines(rollout)] == [
        r"sort/\x1b[2J\u202e: reward 0.750",
        r"  a\x1b[2J ⏎ tool  84",
    ]


def test_of_a_long_conversation_only_what_fits_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: Counter[str] = Counter()

    def category(character: str) -> str:
        looked_at[character] += 1
        return "Ll"

    said = [a_message("assistant", "слово " * 1200) for _ in range(200)]
    view = replace(a_view(), sample=a_rollout(38, 0, 0.75, said).rollout)
    monkeypatch.setattr(unicodedata, "category", category)
    assert "слово слово" in text_of(view, 160, 50)
    assert 600 < looked_at.total() < 50 * 160


@pytest.mark.parametrize("width", [80, 160, 200])
def test_the_live_view_shows_every_figure(width: int) -> None:
    text = text_of(a_view(), width, remaining_s=41.0, log_lines=["12:00:01 checkpoint written"])
    for promised in (
        "step 38 of 60 · 1:12 · 0:41 left",
        "0.745 ± 0.143",
        "version 38",
        "held out   0.813",
        "step 30: 12 rollouts done",
        "0.8 mean · 2 max",
        "3,958 tokens/s",
        "2,770 tokens/s",
        "96 of 160 rollouts",
        "2 of 8 groups",
        "1 batch",
        "64 rollouts",
        "generate 1.4 s",
        "12 ms max",
        "2 timeout",
        "checkpoint written",
        "▁▅█",
        "rate 0.0008",
        "entropy 0.83",
        "KL 0.002  gradient 0.31",
    ):
        assert promised in text


@pytest.mark.parametrize("width", [80, 96, 112, 120, 160])
def test_figures_of_a_run_of_the_usual_size_and_what_is_drawn_beside_them_are_whole(width: int) -> None:
    view = replace(a_view(), in_flight=280, in_flight_limit=320, rewards=Curve.of(step / 99 for step in range(100)))
    text = text_of(view, width)
    assert re.search(r"280 of 320 rollouts +[━╸]+ *$", text, flags=re.MULTILINE)
    assert re.search(r"1\.000 ± 0\.143 +▁[▁-█]+█( |$)", text, flags=re.MULTILINE)


def test_small_figures_of_the_policy_and_what_the_run_waits_for_are_whole_at_80_columns() -> None:
    names = ("training/kl", "training/entropy", "training/grad_norm")
    small = {name: Curve.of([value]) for name, value in zip(names, (-1.2e-09, 1.2e-05, 1.2e-05), strict=True)}
    waiting_for = "the trainer to finish step 2 (enough finished groups wait for it) and 64 rollouts to finish"
    view = replace(a_view(), learning_rate=0.000796, curves=small, waiting_for=waiting_for)
    text = text_of(view, 80, remaining_s=41.0, log_lines=LOG_LINES)
    assert "…" not in text
    assert "KL -1.2e-09  gradient 1.2e-05" in text
    assert "entropy 1.2e-05" in text
    assert waiting_for in " ".join(text.split())
    assert len(text.rstrip("\n").splitlines()) < 24


def test_what_has_no_room_beside_another_column_is_left_out_whole() -> None:
    assert "KL 0.002   " in (text := text_of(a_view(), 112))
    assert "gradient" not in text


def test_the_figures_of_a_large_run_are_whole_where_there_is_room() -> None:
    view = replace(a_view(), in_flight=1024, in_flight_limit=10_240)
    assert "1,024 of 10.2 k rollouts" in text_of(view, 80)


def test_the_live_view_tells_evaluations_of_several_environments_apart() -> None:
    view = RunView(name="two", held_out={"alphabet-sort": 0.5, "arithmetic": 0.25}, evaluating_step=8)
    text = text_of(view, 160)
    assert "0.500 alphabet-sort  0.250 arithmetic" in text
    assert "held-out alphabet-sort 0.500 · held-out arithmetic 0.250" in progress_line(view)


def test_the_line_of_a_step_counts_those_that_were_skipped() -> None:
    assert "skipped" not in progress_line(a_view())
    assert progress_line(replace(a_view(), skipped_steps=3)).startswith("step 38 of 60 · 3 steps skipped · reward")


def test_the_live_view_shows_a_run_that_has_nothing_to_show_yet() -> None:
    text = text_of(RunView(name="new", waiting_for="the trainer loads the model"), 80)
    assert "the trainer loads the model" in text


def test_a_run_that_goes_on_does_not_seem_to_begin_anew_until_its_step_is_known() -> None:
    view = RunView(name="on", waiting_for="the trainer to load the model", max_steps=60, elapsed_s=31.0)
    assert "starting · 0:31 · the trainer to load the model" in text_of(view, 80)
    assert QuietLines(2.0).next(view, None) == "starting · 0:31 · waiting: the trainer to load the model"
    known = replace(view, step=38, waiting_for="the generator to load the model")
    assert "step 38 of 60 · 0:31 · the generator" in text_of(known, 100)
    assert "step 0 of 60" in text_of(replace(view, stage=Stage.TRAINING), 80)


def test_a_diverged_run_can_be_shown() -> None:
    view = RunView(
        name="bad",
        rewards=Curve.of([math.nan]),
        generation_tokens_per_s=Curve.of([math.nan]),
        step=1,
        completion_tokens=math.nan,
    )
    assert "nan" in text_of(view, 100)


async def test_the_terminal_view_draws_and_leaves_the_last_state() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    async with LiveView(a_view, terminal=True, console=console) as view:
        await asyncio.sleep(0.05)
        view.release_terminal()
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "0.745" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l"), "the cursor is given back"


async def test_a_terminal_that_takes_nothing_is_left_at_once(tmp_path: Path) -> None:
    is_stuck, may_go_on = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def fileno(self) -> int:
            return terminal.fileno()

        def write(self, text: str) -> int:
            if threading.current_thread() is not threading.main_thread():
                is_stuck.set()
                may_go_on.wait()
            return len(text)

    with (tmp_path / "terminal").open("wb") as terminal:
        console = Console(file=Stuck(), force_terminal=True, width=100)
        async with LiveView(a_view, terminal=True, console=console) as view:
            await asyncio.to_thread(is_stuck.wait)  # with the locks of the view and the console
            view.abandon_terminal()
            may_go_on.set()
    assert (tmp_path / "terminal").read_bytes() == b"\n\x1b[?25h"


async def test_a_stream_that_is_closed_keeps_no_process_from_ending_at_once(tmp_path: Path) -> None:
    file = (tmp_path / "terminal").open("w")
    view = LiveView(a_view, terminal=True, console=Console(file=file, force_terminal=True))
    file.close()
    view.abandon_terminal()


async def test_a_terminal_that_went_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise OSError("Input/output error")

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    async with LiveView(a_view, terminal=True, console=console):
        console.file = Gone()


@pytest.mark.parametrize("lost", [closed_pipe, full_disk])
@pytest.mark.parametrize("is_terminal", ["0", "1"])
async def test_a_view_that_nobody_takes_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, lost: Callable[[], AbstractContextManager[Any]], is_terminal: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", is_terminal)
    with lost() as nowhere:
        number = nowhere if isinstance(nowhere, int) else nowhere.fileno()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False))))
        async with LiveView(a_view, terminal=True):
            await asyncio.sleep(0)
        give_up(sys.stdout)


async def test_hours_in_which_a_process_was_suspended_are_none_without_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "_REFRESHES_PER_S", 100.0)
    looks, has_looked_again = itertools.count(), asyncio.Event()

    def view() -> RunView:
        number = next(looks)
        asleep_s = 4 * 3600.0 if number > 3 else 0.0
        if number > 6:
            has_looked_again.set()
        return RunView(name="demo", waiting_for="8 rollouts to finish", elapsed_s=number / 100 + asleep_s)

    async with asyncio.timeout(60), LiveView(view, terminal=False, no_progress_s=60.0):
        await has_looked_again.wait()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_without_a_terminal_it_logs_the_last_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tailrace"):
        async with LiveView(a_view, terminal=False):
            pass
    assert [record.message for record in caplog.records] == [progress_line(a_view())]


def test_quiet_lines_come_once_a_step_and_not_too_often() -> None:
    lines = QuietLines(every_s=2.0)
    said = [
        lines.next(a_view(step, elapsed_s), None, last=last) is not None
        for step, elapsed_s, last in [
            (0, 0.0, False),
            (1, 1.0, False),
            (1, 1.5, False),
            (2, 2.0, False),
            (3, 3.5, False),
            (4, 3.6, False),
            (5, 3.7, True),
            (5, 3.8, True),
        ]
    ]
    assert said == [False, True, False, False, True, False, True, False]


def test_quiet_lines_say_what_a_stuck_run_waits_for() -> None:
    lines = QuietLines(every_s=2.0)
    stuck = [RunView(name="x", step=1, elapsed_s=at_s, waiting_for="the trainer") for at_s in (1.0, 20.0, 40.0, 50.0)]
    said = [lines.next(view, None) for view in stuck]
    assert [line is not None for line in said] == [True, False, True, False]
    assert "waiting: the trainer" in str(said[2])


def test_pace_ignores_start_up_and_counts_down() -> None:
    pace = Pace()
    assert pace.remaining_s(10, 0.0) is None
    for step, elapsed_s in [(0, 0.0), (1, 50.0), (2, 52.0), (3, 54.0)]:
        pace.observe(step, elapsed_s)
    assert pace.remaining_s(10, 54.0) == pytest.approx(14.0)
    assert pace.remaining_s(10, 55.0) == pytest.approx(13.0)
    assert pace.remaining_s(10, 99.0) == pytest.approx(12.0)
    assert pace.remaining_s(None, 54.0) is None


def test_the_setting_decides_about_the_terminal() -> None:
    assert wants_live_view("on")
    assert not wants_live_view("off")
    assert not wants_live_view("auto")  # pytest captures standard output: no terminal


def test_each_process_logs_to_its_own_file_and_the_live_view_keeps_the_last_lines(tmp_path: Path) -> None:
    recent = setup_logging("trainer", tmp_path / "logs", Terminal.LIVE, level="debug")
    logger = logging.getLogger("tailrace.training")
    for number in range(9):
        logger.info("line %d\nand more", number)
    logger.debug("a detail")
    logging.getLogger("somebody.else").info("noise")
    logging.shutdown()
    assert recent is not None
    assert [line.split("  ")[1] for line in recent.lines] == ["line 5", "line 6", "line 7", "line 8"]
    written = (tmp_path / "logs" / "trainer.log").read_text()
    assert "tailrace.training: line 0" in written
    assert "a detail" in written
    assert "noise" not in written


class _Untold:
    def __str__(self) -> str:
        raise KeyError("no text")


def test_a_message_that_cannot_be_written_is_shown_and_fails_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with logging_as_it_was():
        recent = setup_logging("orchestrator", tmp_path, Terminal.LIVE)
        logger = logging.getLogger("tailrace.run")
        for argument in (_Untold(), {}, "neither"):
            logger.info("%(name)s", argument)
            logger.info("%s", argument)
        logger.info("step 1")
    assert recent is not None
    assert recent.lines[-1].endswith("  step 1")
    assert "KeyError: 'no text'" in capfd.readouterr().err


@pytest.mark.parametrize("terminal", [Terminal.LINES, Terminal.LIVE])
def test_what_a_model_wrote_into_a_message_does_not_steer_the_terminal(
    terminal: Terminal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_as_it_was():
        recent = setup_logging("orchestrator", tmp_path, terminal)
        logging.getLogger("tailrace.run").warning("a rollout failed: %s", "é\t\x1b[2J\x9b\u202e\r")
    shown = capsys.readouterr().err if recent is None else "".join(recent.lines)
    assert shown.removesuffix("\n").endswith("a rollout failed: é\t" + r"\x1b[2J\x9b\u202e\x0d")
    assert "a rollout failed: é\t\x1b[2J\x9b\u202e" in (tmp_path / "orchestrator.log").read_text()


def test_the_log_level_is_of_the_file_alone(tmp_path: Path) -> None:
    recent = setup_logging("orchestrator", tmp_path, Terminal.LIVE, level="error")
    logger = logging.getLogger("tailrace.run")
    logger.debug("a detail")
    logger.info("step 1")
    logger.error("step 2 failed")
    logging.shutdown()
    assert recent is not None
    assert [line.split("  ")[1] for line in recent.lines] == ["step 1", "step 2 failed"]
    written = (tmp_path / "orchestrator.log").read_text()
    assert [line.split(": ")[1] for line in written.splitlines()] == ["step 2 failed"]


def test_a_log_file_is_bounded_and_what_its_process_prints_goes_on_into_it(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    with log.open("ab", buffering=0) as printed:
        setup_logging("trainer", tmp_path, max_bytes=10_000)
        logger = logging.getLogger("tailrace.training")
        for number in range(500):
            logger.info("line %d of a loss that has much to tell", number)
        printed.write(b"printed\n")
        logger.info("the last line")
        logging.shutdown()
    assert {path.name for path in tmp_path.iterdir()} == {"trainer.log", "trainer.log.1"}
    assert all(path.stat().st_size <= 10_000 for path in tmp_path.iterdir())
    assert "printed\n" in log.read_text()
    assert log.read_text().endswith("the last line\n")


def test_a_log_file_into_which_only_others_write_is_bounded_and_keeps_their_last_lines(tmp_path: Path) -> None:
    log, before = tmp_path / "trainer.log", tmp_path / "trainer.log.1"
    with logging_as_it_was(), log.open("ab", buffering=0) as printed:
        setup_logging("trainer", tmp_path, max_bytes=10_000)
        for number in range(10_000):
            printed.write(b"%09d\n" % number)
        keep_log_within_size()
        assert (log.stat().st_size, before.stat().st_size) == (0, 10_000)
        assert before.read_text().splitlines() == [f"{number:09}" for number in range(9000, 10_000)]
        printed.write(b"and on\n")
        keep_log_within_size()
    assert (log.read_text(), before.stat().st_size) == ("and on\n", 10_000)
