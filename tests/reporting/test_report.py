from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from tailrace.errors import DataError
from tailrace.records import RunStatus
from tailrace.reporting.charts import Line, line_chart
from tailrace.reporting.metric_docs import metrics_page
from tailrace.reporting.metrics import metric_spec
from tailrace.reporting.report import write_report
from tailrace.reporting.rollout_records import encode_line, rollout_record
from tailrace.reporting.run_folder import Series, choose_rollouts, read_run_folder
from tailrace.reporting.sinks import read_jsonl, rollouts_path
from tailrace.reporting.summary import RunSummary, read_summary, write_summary
from tests.reporting.example_run import HOSTILE, a_message, a_rollout, write_example_run
from tests.support.long_runs import METRICS, STEPS, write_long_metrics
from tests.support.memory_peaks import at_most_at_once

VOID = {"meta", "link", "img", "br", "input", "hr", "path", "use", "rect"}


class Page(HTMLParser):
    """What a browser would do with the page: its tags, its references and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.shown = ""
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    write_example_run(folder, steps=12)
    write_report(folder)
    return folder


def assert_self_contained(page: Page) -> None:
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.handlers == []
    style = page.source[page.source.index("<style") : page.source.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style


def test_the_report_is_one_whole_page_without_references(run_folder: Path) -> None:
    page = Page(run_folder / "report.html")
    assert_self_contained(page)
    assert "://" not in page.source
    assert page.tags.count("svg") == 13


@pytest.mark.parametrize("title", ["Reward", "Loss", "Gradient norm", "KL", "Entropy", "Staleness", "Throughput"])
def test_the_report_has_a_chart_of(run_folder: Path, title: str) -> None:
    assert f"<figcaption><b>{title}</b>" in (run_folder / "report.html").read_text()


@pytest.mark.parametrize(("cpu_s", "whose"), [(90.0, "all processes"), (None, "processes that it started here")])
def test_the_report_says_whose_memory_it_tells(tmp_path: Path, cpu_s: float | None, whose: str) -> None:
    write_example_run(tmp_path, steps=1)
    summary = read_summary(tmp_path)
    assert summary is not None
    write_summary(tmp_path, msgspec.structs.replace(summary, cpu_s=cpu_s))
    write_report(tmp_path)
    assert f"peak, {whose}" in (tmp_path / "report.html").read_text()


def test_the_report_shows_the_run(run_folder: Path) -> None:
    shown = Page(run_folder / "report.html").shown
    for promised in ("quickstart", "finished", "Best", "Median", "Worst", "Where it began", "Throughput", "Staleness"):
        assert promised in shown
    for promised in (
        "Event-loop lag",
        "Phases",
        "calculator",
        "learning_rate = 1e-3",
        "admitted 4,000 = terminal 4,000",
        "trained to finished; 1 is unbiased",  # as docs/metrics.md defines the length ratio
    ):
        assert promised in shown
    assert (run_folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run_folder.glob("*.part"))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    write_example_run(tmp_path, steps=3, hostile=True)
    write_report(tmp_path)
    page = Page(tmp_path / "report.html")
    assert_self_contained(page)
    assert "<script>alert('x')</script><img src=\"http://evil.example/x.png\">" in page.shown
    assert "{{ 7*7 }}" in page.shown
    assert "49" not in page.source[page.source.index("<h1>") : page.source.index("</h1>")]
    assert "\x1b" not in page.source
    assert "\u202e" not in page.source
    assert HOSTILE not in page.source


def test_the_page_forbids_scripts_and_requests_itself(run_folder: Path) -> None:
    assert "default-src 'none'; style-src 'unsafe-inline'" in (run_folder / "report.html").read_text()


def test_a_run_that_trained_nothing_and_left_no_summary_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lag/max_s": null}\n')
    write_report(tmp_path)
    page = Page(tmp_path / "report.html")
    assert_self_contained(page)
    assert "No step was trained" in page.shown
    assert "left no summary" in page.shown
    assert not (tmp_path / "reward.png").exists()


def test_a_run_of_a_single_step_has_a_report(tmp_path: Path) -> None:
    write_example_run(tmp_path, steps=1)
    write_report(tmp_path)
    assert_self_contained(Page(tmp_path / "report.html"))


def test_a_run_whose_lag_or_phases_are_all_zero_has_a_report_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    lines = [{"step": step, "reward/mean": 0.0, "lag/max_s": 0.0, "phase/train/lag_max_s": 0.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    assert "Event-loop lag" in Page(tmp_path / "report.html").shown
    assert [str(one.message) for one in recwarn] == []


def test_rates_and_staleness_are_of_the_whole_run_and_what_its_summary_says(tmp_path: Path) -> None:
    """As many tokens in ten times the time weigh as much."""
    steps = [
        {"wall_s": 10.0, "generation/tokens_per_s": 100.0, "batch/loss_tokens": 900, "staleness/mean": 0.0},
        {"wall_s": 11.0, "generation/tokens_per_s": 1000.0, "batch/loss_tokens": 100, "staleness/mean": 1.0},
        {"wall_s": 11.0, "policy/skipped_steps": 1.0, "batch/loss_tokens": 500, "staleness/mean": 4.0},
    ]
    tokens = (1000, 1000, 0)
    lines = [
        {"step": step, "rollout/generated_tokens": count, **line}
        for step, (count, line) in enumerate(zip(tokens, steps, strict=True), 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    shown = Page(tmp_path / "report.html").shown
    assert "Generated182tokens/s, mean" in shown
    assert "Staleness0.10at most" in shown
    figures = RunSummary(name="a", status=RunStatus.FINISHED, generation_tokens_per_s=190.0, staleness_mean=0.25)
    write_summary(tmp_path, figures)
    write_report(tmp_path)
    shown = Page(tmp_path / "report.html").shown
    assert "Generated190tokens/s, mean" in shown
    assert "Staleness0.25at most" in shown


def test_lines_beyond_the_colours_are_drawn_in_another_stroke() -> None:
    chart = line_chart("Reward by environment", "", [Line(f"{n}", Series((1, 2), (0.1 * n, 0.2))) for n in range(7)])
    assert chart is not None
    assert [(entry.label, entry.css_class) for entry in chart.legend] == [
        *((f"{n}", f"series-{n + 1} stroke-0") for n in range(5)),
        *((f"{n + 5}", f"series-{n + 1} stroke-1") for n in range(2)),
    ]
    drawn = re.findall(r"<path [^>]*stroke: var\(--series-(\d)\)[^>]*>", chart.svg)
    dashed = re.findall(r"<path [^>]*stroke-dasharray[^>]*stroke: var\(--series-(\d)\)[^>]*>", chart.svg)
    assert (drawn, dashed) == (["1", "2", "3", "4", "5", "1", "2"], ["1", "2"])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        write_report(tmp_path)


def test_a_long_run_is_read_as_columns_of_numbers(tmp_path: Path) -> None:
    write_long_metrics(tmp_path / "metrics.jsonl")
    with at_most_at_once(2 * 16 * STEPS * METRICS):
        run = read_run_folder(tmp_path)
    column = run.series("phase/part_7/wall_s")
    assert ([*column.steps], column.last) == ([*range(1, STEPS + 1)], STEPS / 7)


def test_a_metric_is_of_the_lines_that_have_a_number_of_it(tmp_path: Path) -> None:
    lines = ['{"step": 1, "reward/mean": 0.5}', '{"step": 2, "reward/mean": null, "staleness/max": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "reward/mean": 1}', '{"step": 4, "rew']))
    run = read_run_folder(tmp_path)
    reward = run.series("reward/mean")
    assert ([*reward.steps], [*reward.values]) == ([1, 3], [0.5, 1])
    assert run.latest() == {"reward/mean": 1, "staleness/max": 3, "step": 3}
    assert (run.names("reward/", "/mean"), run.series("training/loss").last) == (["reward/mean"], None)


def test_best_median_and_worst_come_from_the_newest_steps(run_folder: Path) -> None:
    chosen = choose_rollouts(run_folder / "rollouts")
    assert [rollout.title for rollout in chosen] == ["Best", "Median", "Worst", "Where it began"]
    rewards = [rollout.record.reward or 0.0 for rollout in chosen]
    assert rewards[0] >= rewards[1] >= rewards[2]
    assert all(rollout.record.step > 7 for rollout in chosen[:3])
    assert chosen[3].record.step == 1


def test_files_of_long_conversations_are_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    rewards = [place / 50 for place in range(50)]
    random.Random(0).shuffle(rewards)
    for step in range(1, 6):
        messages = [a_message("user", "x" * 100_000)]
        entries = [a_rollout(step, place, rewards[10 * step + place - 10], messages) for place in range(10)]
        lines = [encode_line(rollout_record(entry, step)) for entry in entries]
        rollouts_path(tmp_path / "rollouts", step).write_bytes(b"".join(lines))
    with at_most_at_once(1_000_000):  # of 5 million
        chosen = choose_rollouts(tmp_path / "rollouts")
    assert [(one.title, one.record.reward) for one in chosen] == [("Best", 0.98), ("Median", 0.5), ("Worst", 0.0)]


def test_lines_that_are_no_records_are_not_chosen(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    lines = [encode_line(rollout_record(a_rollout(1, place, 0.5, []), 1)) for place in range(3)]
    strangers = [b'{"reward": 2.0}\n', b'{"reward": "many"}\n', b"\n", b'{"reward": 3']
    rollouts_path(tmp_path / "rollouts", 1).write_bytes(b"".join(lines + strangers))
    assert [(one.title, one.record.rollout_id) for one in choose_rollouts(tmp_path / "rollouts")] == [
        ("Worst", "g1/0"),
        ("Median", "g1/1"),
        ("Best", "g1/2"),
    ]


def test_files_that_somebody_left_beside_those_of_rollouts_cost_nothing(tmp_path: Path) -> None:
    write_example_run(tmp_path, steps=12)
    chosen = choose_rollouts(tmp_path / "rollouts")
    for name in ("step_000012 copy.jsonl", "step_.jsonl", "step_000012.old.jsonl", "step_13.jsonl"):
        (tmp_path / "rollouts" / name).write_bytes((tmp_path / "rollouts/step_000001.jsonl").read_bytes())
    (tmp_path / "rollouts" / "step_000014.jsonl").mkdir()
    assert choose_rollouts(tmp_path / "rollouts") == chosen
    write_report(tmp_path)


def test_tokens_of_an_evaluation_are_none_of_the_step_that_it_was_due_at(tmp_path: Path) -> None:
    write_example_run(tmp_path, steps=12)
    (tmp_path / "tokens").mkdir()
    for name in ("step_000009.parquet", "evaluation_000011.parquet"):
        (tmp_path / "tokens" / name).touch()
    assert {chosen.record.step for chosen in read_run_folder(tmp_path).rollouts} == {1, 9}  # the first: where it began


def test_rollouts_are_chosen_of_steps_whose_tokens_are_there(run_folder: Path) -> None:
    def steps(*with_tokens: int) -> list[int]:
        return [rollout.record.step for rollout in choose_rollouts(run_folder / "rollouts", with_tokens)]

    assert steps(4, 7, 10) == [10, 10, 10, 1]
    assert steps(2, 6) == [6, 6, 6, 1]  # none of the newest five


def test_the_examples_metrics_are_in_the_table(run_folder: Path) -> None:
    for row in read_jsonl(run_folder / "metrics.jsonl"):
        for name in row.keys() - {"step", "wall_s"}:
            assert metric_spec(name).description


def test_docs_metrics_md_is_in_step_with_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_page(), "run `make docs`"
