"""The pages in a real browser, over run folders that real writers made."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import numpy as np
import pytest

from tailrace.records import Branch, Completion, FinishReason, Message, Reward, RunStatus
from tailrace.reporting.rollout_records import RolloutEntry
from tests.dashboard.test_others_files import write_traces
from tests.support.browsers import Watched, browser, dashboard, watched
from tests.support.made_runs import MadeRun, write_export
from tests.support.networks import needs_ipv6

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.xdist_group("browser")

EVIL = "<script>window.evil = 1</script><img src=x onerror='window.evil = 2'><b>bold</b>"
ANSI = "\x1b[31mred\x1b[0m and \x07 bell, \u202eturned\u202c, \U0001f600, \u0000 nothing"
HEBREW = "שלום עולם, مرحبا بالعالم"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[tuple[str, Path]]:
    """Three finished runs, and the link to their dashboard."""
    runs = tmp_path_factory.mktemp("site") / "runs"
    for name, seed, rate in (("a", 0, 1e-3), ("a-seed-1", 1, 1e-3), ("b", 0, 2e-3)):
        settings = {"trainer": {"learning_rate": rate}}
        made = MadeRun(folder=runs / name, steps=8, seed=seed, settings=settings, num_branches=2).write_all()
        made.write_tokens([3, 8])
    with dashboard(runs) as link:
        yield link, runs


@pytest.fixture
def page(chromium: Browser) -> Iterator[Watched]:
    with watched(chromium) as found:
        yield found
        assert found.complaints == []


def test_from_the_list_of_runs_down_to_a_rollout_and_back(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    assert page.page.locator("tbody tr").count() == 3
    page.page.wait_for_selector(".u-over")
    page.page.get_by_role("link", name="a", exact=True).click()
    page.see("curves")
    page.page.wait_for_selector(".chart .u-over")
    assert page.page.locator(".chart").count() > 8
    page.page.locator(".chart .u-over").first.click()
    page.see("groups")
    assert re.search(r"step=\d", page.page.url)
    assert page.page.locator(".strip").count() == 3
    assert page.page.get_by_text("no spread").count() == 1
    page.page.locator(".strip").first.click()
    page.see("group")
    assert page.page.locator(".side section").count() == 4
    page.page.get_by_role("link", name=re.compile("^rollout 1")).click()
    page.see("rollout")
    assert page.page.get_by_text("Sort these names: Ida, Tom, Piper").count() == 1
    page.page.locator("nav").get_by_text("Groups").click()
    page.see("groups")
    page.page.get_by_label("Step", exact=True).fill("8")
    page.page.keyboard.press("Enter")
    page.until("location.hash.includes('step=8')")
    page.see("groups")
    page.page.locator(".strip").first.click()
    page.see("group")
    page.page.get_by_role("link", name=re.compile("^rollout 1")).click()
    page.see("rollout")
    page.page.get_by_role("link", name="Tokens").click()
    page.see("tokens")
    page.page.locator(".viewport").focus()
    for _ in range(22):  # the context has 20
        page.page.keyboard.press("ArrowRight")
    told = page.page.get_by_label("The token").inner_text()
    assert re.search(r"from\s+sampled", told)
    assert re.search(r"ratio\s+[01]\.\d+", told)
    for view in ("rollout", "group", "groups", "groups", "rollout", "group", "groups", "curves", "runs"):
        page.page.go_back()
        page.see(view)


def test_every_view_can_be_linked_to_and_is_drawn(site: tuple[str, Path], page: Watched) -> None:
    rollout = quote("sort/train/300#3.1.0", safe="")
    for view, shows in (
        ("curves?x=wall&smooth=0.9", ".u-over"),
        ("groups?step=3&reward=0.5..1&sort=best", ".strip"),
        (f"group?step=3&id={quote('sort/train/300#3', safe='')}", ".side section"),
        (f"rollout?step=3&id={rollout}", ".message.assistant"),
        (f"tokens?step=3&id={rollout}&by=ratio", ".viewport canvas"),
        (f"tokens?step=3&id={rollout}&branch=1", ".viewport canvas"),
        ("groups?kind=evaluation&step=8", ".strip"),
        ("phases?step=3", ".phase.gap"),
        ("schedule?from=1&to=4", "canvas"),
        ("events", "tbody tr"),
        ("settings", "pre.code"),
        ("chat", "pre.code"),
    ):
        page.open(f"{site[0]}#/run/a/{view}")
        assert page.page.locator(shows).count() > 0, view
        page.page.goto("about:blank")


def test_what_is_not_there_is_said_on_the_page(site: tuple[str, Path], chromium: Browser) -> None:
    with watched(chromium) as page:
        for place in ("#/run/none/curves", "#/run/a/nonsense", "#/run/a/rollout?step=3&id=none"):
            page.page.goto(site[0] + place)
            page.page.wait_for_selector(".error")
            page.page.goto("about:blank")
        assert not [said for said in page.complaints if "status of 404" not in said and "no view" not in said]


def test_groups_are_filtered_by_the_histogram_and_searched(site: tuple[str, Path], page: Watched) -> None:
    page.open(f"{site[0]}#/run/a/groups?step=4")
    bars = page.page.locator(".histogram button")
    full = bars.evaluate_all("bars => bars.findIndex(bar => !bar.title.endsWith(': 0 rollouts'))")
    bars.nth(full).click()
    assert "reward=" in page.page.url
    assert page.page.locator(".cell.dim").count() > 0
    bars.nth(full).click()
    assert page.page.locator(".cell.dim").count() == 0
    page.page.get_by_label("Search texts and tasks").fill("piper (4.5)")
    page.page.keyboard.press("Enter")
    page.until("document.querySelectorAll('.cell:not(.dim)').length === 1")
    assert page.page.locator(".strip").count() == 1
    page.page.get_by_label("Search texts and tasks").fill("")
    page.page.keyboard.press("Enter")
    page.until("document.querySelectorAll('.strip').length === 3")
    page.page.get_by_label("outcome", exact=True).select_option("timeout")
    page.page.get_by_role("button", name="in all steps").click()
    page.page.get_by_text("1 rollouts of this step fit, 7 of other steps").wait_for()


class Twelfths(MadeRun):
    """Rewards of thirds, sixths and the like, which no few digits are equal to."""

    def entries(self, step: int, *, held_out: bool = False) -> list[RolloutEntry]:
        made = super().entries(step, held_out=held_out)
        for number, entry in enumerate(made):
            entry.rollout.reward = Reward(number / len(made))
        return made


def test_every_bar_of_the_histogram_keeps_its_own_rollouts(tmp_path: Path, page: Watched) -> None:
    run = Twelfths(folder=tmp_path / "run")
    run.write_steps(1)
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/groups?step=1")
        bars = page.page.locator(".histogram button:not(:disabled)")
        assert bars.count() == 12
        for number in range(12):
            bars.nth(number).click()
            page.until("document.querySelectorAll('.cell:not(.dim)').length === 1")
            assert re.search(rf"mean reward\s+{number / 12:.3f}", page.page.locator("dl.facts").inner_text())
            bars.nth(number).click()
            page.until("document.querySelectorAll('.cell:not(.dim)').length === 12")
        page.leave()


def test_a_bar_s_range_has_no_reward_of_its_neighbour_s(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = """rewards => import('./grouping.js').then(({ histogram, passes }) => {
      const rollouts = rewards.map((reward) => ({ reward, completion_tokens: 1 }));
      const { parts } = histogram(rollouts);
      return parts.filter(({ count }) => count).map(({ count, range }) =>
        [count, rollouts.filter((rollout) => passes(rollout, { reward: range })).length]);
    })"""
    for rewards in (
        [0.66666, 0.66667],
        [2 / 3 - 1e-9, 2 / 3 + 1e-9],
        [-1 / 3, -0.25, 1e-7, 1e6 / 7],
        [0.57, 0.29, 1.15],
    ):
        kept = page.page.evaluate(ask, rewards)
        assert sum(count for count, _ in kept) == len(rewards)
        assert all(count == passing for count, passing in kept), rewards


def test_a_bar_s_range_is_that_of_the_bar_also_in_the_next_step(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = """rewards => import('./grouping.js').then(({ histogram }) =>
      histogram(rewards.map((reward) => ({ reward }))).parts.filter(({ count }) => count).map(({ range }) => range))"""
    assert page.page.evaluate(ask, [0.64]) == page.page.evaluate(ask, [0.65]) == ["0.625..0.6667"]
    assert page.page.evaluate(ask, [2 / 3]) == ["0.66..0.67"]  # its bar begins there, in four digits above it


def test_a_text_is_searched_anew_where_another_filter_is_widened(site: tuple[str, Path], page: Watched) -> None:
    page.open(f"{site[0]}#/run/a/groups?step=4&reward=0.9..&text=piper")
    cells = "document.querySelectorAll('.cell:not(.dim)').length"
    narrow = page.page.evaluate(cells)
    assert 0 < narrow < 11
    page.page.get_by_label("Range of reward").fill("0..")
    page.page.keyboard.press("Enter")
    page.until(f"{cells} === 11")  # all but the failed one


def test_a_search_goes_on_where_it_had_found_enough(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "run", groups=60)
    run.write_steps(3)
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/groups?step=1&text=piper")
        page.page.get_by_text("240 rollouts of this step fit, 0 of other steps; 2 files were not searched").click()
        page.page.get_by_role("button", name="search on").click()
        page.page.get_by_text("240 of other steps; 1 files were not searched").wait_for()
        page.page.get_by_role("button", name="search on").click()
        page.page.get_by_text("240 rollouts of this step fit, 480 of other steps", exact=True).wait_for()
        assert page.page.get_by_role("button", name="search on").count() == 0
        page.leave()


def test_a_page_of_a_large_file_says_what_it_leaves_out(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "run")
    run.write_steps(1)
    run.write_large_file(1, 8_195)
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/groups?step=1&text=piper")
        shown = page.page.locator("main").inner_text()
        assert "The file has 8,195 rollouts. Groups, counts and searches are of the first 8,192." in shown
        assert "8192 rollouts of this step fit, 0 of other steps; 3 rollouts of large files were not searched" in shown
        page.leave()


def test_a_file_that_is_taken_in_little_by_little_is_shown_whole_in_the_end(tmp_path: Path, page: Watched) -> None:
    write_traces(tmp_path / "large", [1.0] * 8)
    page.page.clock.install()
    a_line_each = "import tailrace.dashboard.application as pages; pages._TAKE_IN_S = -1.0"
    with dashboard(tmp_path, first=a_line_each) as link:
        page.open(f"{link}#/run/large/groups")
        assert page.page.locator(".cell").count() < 8
        page.page.get_by_label("Search texts and tasks").focus()
        page.page.keyboard.type("ida")
        page.page.evaluate("document.activeElement.isSame = true")
        look_again(page, "/api/runs/large")
        assert page.page.evaluate("document.activeElement.isSame") is True
        page.page.keyboard.press("Enter")
        page.until("location.hash.includes('text=ida')")
        for _ in range(8):
            with page.page.expect_response(lambda response: response.url.endswith("/api/runs/large")):
                page.page.clock.run_for(2_500)
        page.until("document.querySelectorAll('.cell').length === 8")
        page.leave()


def test_a_search_in_all_steps_stays_while_more_of_a_file_is_taken_in(tmp_path: Path, page: Watched) -> None:
    write_traces(tmp_path / "large", [1.0] * 8)
    page.page.clock.install()
    a_line_each = "import tailrace.dashboard.application as pages; pages._TAKE_IN_S = -1.0"
    with dashboard(tmp_path, first=a_line_each) as link:
        page.open(f"{link}#/run/large/groups?reward=0.5..")
        page.page.get_by_role("button", name="in all steps").click()
        page.page.get_by_text(re.compile("[0-7] rollouts of this step fit")).wait_for()
        for _ in range(8):
            with page.page.expect_response(lambda response: response.url.endswith("/api/runs/large")):
                page.page.clock.run_for(2_500)
        page.page.get_by_text("8 rollouts of this step fit").wait_for()
        page.page.get_by_label("Range of reward").fill("")
        page.page.keyboard.press("Enter")
        page.until("document.querySelector('main details') === null && !location.hash.includes('rounds')")
        page.leave()


def test_what_has_gone_on_searching_is_as_far_when_it_is_drawn_anew(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "run", groups=60)
    run.write_steps(3)
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/groups?step=1&outcome=trained&rounds=2")
        page.page.get_by_text("236 of other steps; 1 files were not searched").wait_for()
        page.page.get_by_role("button", name="search on").click()
        page.until("location.hash.includes('rounds=3')")
        page.leave()


@pytest.mark.parametrize("view", ["phases", "schedule"])
def test_nobody_asks_for_the_trace_of_another_library_s_file(tmp_path: Path, page: Watched, view: str) -> None:
    write_traces(tmp_path / "large", [1.0] * 8)
    asked: list[str] = []
    page.page.clock.install()
    page.page.on("request", lambda request: asked.append(request.url))
    with dashboard(tmp_path) as link:
        page.open(f"{link}#/run/large/{view}")
        assert page.page.get_by_text("This is another library's file, which has no trace.").count() == 1
        look_again(page, "/api/runs/large")
        assert not [url for url in asked if "/api/runs/large/" in url]
        page.leave()


def test_runs_are_sorted_filtered_and_chosen(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    page.page.get_by_role("button", name="run", exact=True).click()
    assert page.page.locator("tbody tr td:nth-child(2)").all_inner_texts() == ["a", "a-seed-1", "b"]
    page.page.get_by_label("Filter runs").fill("learning_rate=0.002")
    assert page.page.locator("tbody tr").count() == 1
    page.page.get_by_label("Filter runs").fill("")
    page.page.get_by_label("Show the curve of b").uncheck()
    page.until("!document.querySelector('.legend').textContent.includes(' b ')")
    page.page.get_by_text("one band for the seeds").click()
    page.until("document.querySelector('.legend').textContent.includes('and 1 more seeds')")


_SWATCHES = """rows => Object.fromEntries(rows.filter((row) => row.querySelector(".swatch")).map((row) =>
  [(row.querySelector("a") ?? row).textContent.trim().split(" ")[0], row.querySelector(".swatch").style.background]))"""


def test_a_run_has_the_colour_of_its_curve_where_another_that_was_chosen_is_gone(
    site: tuple[str, Path], page: Watched
) -> None:
    page.open(f"{site[0]}#/?runs=gone,a,b")
    page.page.wait_for_selector(".legend .swatch")
    rows = page.page.locator("tbody tr").evaluate_all(_SWATCHES)
    assert rows == page.page.locator(".legend > span").evaluate_all(_SWATCHES)
    assert set(rows) == {"a", "b"}


def test_the_last_steps_of_a_run_are_in_the_chart_of_all_runs(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "run")
    run.write_steps(3)
    run.own(os.getpid())
    page.page.clock.install()
    with dashboard(tmp_path) as link:
        page.open(f"{link}#/?smooth=0")
        page.page.wait_for_selector(".legend .swatch")
        before = page.page.locator(".legend").inner_text()
        run.write_steps(1)
        run.finish()
        (run.folder / "owner.json").unlink()
        look_again(page, "/api/runs")
        assert page.page.locator("tbody .badge").inner_text() == "finished"
        page.until("before => document.querySelector('.legend').innerText !== before", arg=before)
        page.leave()


def test_a_click_on_the_tab_one_is_in_shows_it_as_it_was_before_anything_was_chosen(
    site: tuple[str, Path], page: Watched
) -> None:
    page.open(f"{site[0]}#/run/a/curves")
    page.page.get_by_label("Axis").select_option("wall")
    page.until("location.hash.endsWith('?x=wall')")
    page.page.locator("nav").get_by_text("Curves").click()
    page.until("location.hash.endsWith('/curves') && document.querySelector('[aria-label=Axis]')?.value === 'step'")
    page.see("curves")


def test_keys_lead_everywhere(site: tuple[str, Path], page: Watched) -> None:
    page.open(f"{site[0]}#/run/a/curves")
    press = page.page.keyboard.press
    press("2")
    page.see("groups")
    newest = page.page.get_by_label("Step", exact=True).input_value()
    press("[")
    page.until("document.querySelector('.view[data-ready] input[aria-label=Step]')?.value === '7'")
    assert newest == "8"
    press("/")
    page.until("document.activeElement.type === 'search'")
    page.page.locator(".strip").first.focus()
    press("Enter")
    page.see("group")
    before = page.page.url
    press("ArrowRight")
    page.until("before => location.href !== before", arg=before)
    page.see("group")
    press("u")
    page.see("groups")
    press("?")
    page.page.wait_for_selector("dialog")
    press("Escape")
    press("g")
    press("r")
    page.see("runs")


def test_tokens_by_what_is_known_of_them_and_branches_beside_each_other(site: tuple[str, Path], page: Watched) -> None:
    page.open(f"{site[0]}#/run/a/tokens?step=3&id={quote('sort/train/300#3.1.0', safe='')}")
    colour = page.page.get_by_label("Colour tokens by")
    pictures = set()
    for by in ("logprob", "ratio", "advantage", "entropy", "version", "mask"):
        colour.select_option(by)
        page.page.wait_for_timeout(50)  # a frame
        pictures.add(page.page.locator(".viewport canvas").first.evaluate("canvas => canvas.toDataURL()"))
    assert len(pictures) == 6
    page.page.get_by_label("Beside it").select_option("1")
    page.page.wait_for_selector(".viewport >> nth=1")
    page.page.get_by_role("button", name="least likely").click()
    least = page.page.get_by_label("The token").inner_text()
    assert "generator" in least
    page.page.get_by_label("Find a text").fill("Piper")
    page.page.keyboard.press("Enter")
    page.until("document.querySelector('aside').textContent.includes('Piper')")
    page.page.get_by_label("Find a text").fill("Piper and")
    page.page.keyboard.press("Enter")
    page.page.get_by_text("not found", exact=True).wait_for()


def test_only_what_was_trained_has_a_staleness(site: tuple[str, Path], page: Watched) -> None:
    for step, rollout, is_trained in (
        ("step=3", "sort/train/300#3.1.0", True),
        ("step=3", "sort/train/302#3.0.0", False),  # its group's rewards are all equal
        ("kind=evaluation&step=8", "sort/held-out/0#8.0.0", False),
    ):
        page.open(f"{site[0]}#/run/a/rollout?{step}&id={quote(rollout, safe='')}")
        assert "policy version" in page.page.locator("dl.facts").inner_text()
        assert ("staleness" in page.page.locator("dl.facts").inner_text()) == is_trained
        if step == "step=3":
            page.page.get_by_role("link", name="Tokens").click()
            page.see("tokens")
            page.page.locator(".viewport").focus()
            page.page.keyboard.press("End")
            told = page.page.get_by_label("The token").inner_text()
            assert re.search(r"policy version\s+1", told)
            assert ("1 behind when trained" in told) == is_trained


def test_a_text_is_found_wherever_in_tokens_it_begins_and_ends(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = """([text, after]) => import('./token_canvas.js').then(({ Tokens }) => {
      const tokens = new Tokens();
      tokens.append({ texts: ["The", " dri", "ft", "", " of", " the", " drift"] });
      return tokens.find(text, after);
    })"""
    for text, after, found in (
        ("drift", -1, [1, 2]),
        ("drift", 1, [6, 6]),
        ("drift", 6, [1, 2]),  # from the first again
        ("rift of", -1, [1, 4]),
        ("the", -1, [5, 5]),
        ("drifts", -1, None),
    ):
        assert page.page.evaluate(ask, [text, after]) == found


class Forking(MadeRun):
    """Of three branches the last one forks from the first later than from the second."""

    def branches(self, step: int) -> list[Branch]:
        made = [Branch() for _ in range(3)]
        for branch, fork in zip(made, (30, 5, 12), strict=True):
            branch.extend_context(np.where(np.arange(30) < fork, 7, 7 + fork).astype(np.int32))
            ids = np.arange(4, dtype=np.int32)
            branch.extend_completion(Completion(ids, np.zeros(4, np.float32), ids * 0, FinishReason.STOP))
        return made


def test_two_branches_stand_beside_each_other_where_these_two_fork(tmp_path: Path, page: Watched) -> None:
    run = Forking(folder=tmp_path / "run")
    run.write_steps(1)
    run.write_tokens([1], exported=False)
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/tokens?step=1&branch=2&id={quote('sort/train/100#1.1.0', safe='')}")
        for beside, forks_at in (("0", 12), ("1", 5), ("", 5)):  # alone: from the one before it
            page.page.get_by_label("Beside it").select_option(beside)
            page.until("count => document.querySelectorAll('.viewport').length === count", arg=1 + bool(beside))
            page.page.get_by_role("button", name="to the fork").click()
            assert re.search(rf"position\s+{forks_at}\s", page.page.get_by_label("The token").inner_text())
        page.leave()


def test_a_line_has_points_while_it_is_too_short_to_be_drawn(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = """lengths => import('./charts.js').then(({ Chart }) => {
      if (!window.chart) {
        window.chart = new Chart({ title: "made up" });
        document.body.append(window.chart.element);
      }
      const line = (length, label) => ({ label, xs: [1, 2, 3].slice(0, length), ys: [1, null, 2].slice(0, length) });
      window.chart.update([...lengths.map(line), { ...line(lengths[0], "high"), hidden: true, width: 0 }]);
      const { plot } = window.chart;
      return plot.series.slice(1).map((series, at) => Boolean(series.points.show(plot, at + 1)));
    })"""
    assert page.page.evaluate(ask, [1, 1]) == [True, True, False]
    assert page.page.evaluate(ask, [3, 2]) == [False, True, False]
    assert page.page.evaluate(ask, [3, 3]) == [False, False, False]


def test_curves_that_were_opened_at_the_first_step_look_as_those_opened_later(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "run", steps=50)
    run.write_steps(1, rollouts=False)
    run.own(os.getpid())
    picture = "document.querySelector('.chart canvas').toDataURL()"
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/curves")
        page.page.wait_for_selector(".chart .u-over")
        run.write_steps(5, rollouts=False)
        page.until("[...document.querySelectorAll('.tile')].some(one => one.textContent.startsWith('Steps6'))")
        grown = page.page.evaluate(picture)
        page.page.reload()
        page.see("curves")
        page.page.wait_for_selector(".chart .u-over")
        assert page.page.evaluate(picture) == grown
        page.leave()


def test_an_axis_of_nearly_equal_values_has_room_for_ticks(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    low, high = page.page.evaluate("import('./charts.js').then(({ padded }) => padded(0.2, 0.2 + 3e-17))")
    assert (low, high) == pytest.approx((0.18, 0.22))


def test_what_nobody_would_see_is_written_out(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = "codes => import('./dom.js').then(({ visible }) => visible(String.fromCodePoint(...codes)))"
    for code, written in (
        (0x1B, "\\x1b"),
        (0xAD, "\\xad"),
        (0x61C, "\\u061c"),
        (0x2028, "\\u2028"),
        (0x202E, "\\u202e"),
        (0xD800, "\\ud800"),
        (0xE0041, "\\u{e0041}"),
    ):
        assert page.page.evaluate(ask, [0x61, code, 0x62]) == f"a{written}b"
    for text in ("a\n\tb", "\u0645\u06cc\u200c\u062e", "\U0001f469\u200d\U0001f467", HEBREW):
        assert page.page.evaluate(ask, [ord(one) for one in text]) == text


def test_a_rollout_without_a_reward_is_in_no_range_of_rewards(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = """reward => import('./grouping.js').then(({ passes }) =>
      [null, 0, 1].map((value) => passes({ reward: value, completion_tokens: 1 }, { reward })))"""
    assert page.page.evaluate(ask, "0..") == [False, True, True]
    assert page.page.evaluate(ask, "..0.5") == [False, True, False]
    assert page.page.evaluate(ask, "") == [True, True, True]


def test_a_group_of_equal_rewards_is_left_out_by_what_became_of_it(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = """reasons => import('./grouping.js').then(({ groupsOf }) =>
      groupsOf(reasons.map((reason) => ({ group_id: "g", reward: 1, completion_tokens: 1, outcome: { reason } })))
        .map(({ isFlat, isLeftOut }) => [isFlat, isLeftOut]))"""
    assert page.page.evaluate(ask, ["zero_spread", "zero_spread"]) == [[True, True]]
    assert page.page.evaluate(ask, ["", ""]) == [[True, False]]  # a teacher's, or a part that was released early
    assert page.page.evaluate(ask, ["", "zero_spread"]) == [[True, True]]


def test_keys_with_modifiers_are_the_browser_s(site: tuple[str, Path], page: Watched) -> None:
    page.open(site[0])
    ask = "options => import('./dom.js').then(({ isOurs }) => isOurs(new KeyboardEvent('keydown', options)))"
    assert page.page.evaluate(ask, {"key": "ArrowLeft"}) is True
    for modifier in ("altKey", "ctrlKey", "metaKey"):
        assert page.page.evaluate(ask, {"key": "ArrowLeft", modifier: True}) is False


def test_a_metric_that_comes_to_be_is_asked_for_whole(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "runs" / "live", extra_metrics=6)
    run.write_steps(3)
    with dashboard(tmp_path / "runs") as link:
        page.open(link)
        follow = """async () => {
          const { CurveStore } = await import("./curve_store.js");
          window.store ??= new CurveStore("live", ["reward/mean", "eval/*/reward/mean", "phase/*/wall_s:7"]);
          await window.store.update();
          return Object.values(window.store.columns).map((values) => values.length);
        }"""
        assert page.page.evaluate(follow) == [3] * 9
        with (run.folder / "metrics.jsonl").open("ab") as file:
            file.write(
                b'{"step":4,"wall_s":9,"eval/sort/reward/mean":0.5,"phase/new/wall_s":100,"phase/newer/wall_s":99}\n'
            )
        assert page.page.evaluate(follow) == [4] * 11
        assert page.page.evaluate("window.store.values('eval/sort/reward/mean')") == [None, None, None, 0.5]
        page.leave()


def test_the_tile_of_memory_is_of_the_processes_that_are_there(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "run")
    first, left = '"memory/trainer_rss_bytes":1073741824', '"memory/generator-1_rss_bytes":1073741824'
    lines = (
        f'{{"step":1,"policy/version":1,{first},{left}}}',
        f'{{"step":2,"policy/version":2,{first}}}',
        '{"step":2,"eval/sort/reward/mean":0.5}',
    )
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/curves")
        assert page.page.locator(".tile").filter(has_text="Memory").inner_text().split("\n")[1] == "1.0 GiB"
        page.leave()


def test_the_end_of_a_run_has_the_colour_of_how_it_ended(tmp_path: Path, page: Watched) -> None:
    for status in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.CANCELLED):
        MadeRun(folder=tmp_path / status).finish(status)
    with dashboard(tmp_path) as link:
        for status, colour in (("finished", "good"), ("failed", "bad"), ("cancelled", "warn")):
            page.open(f"{link}#/run/{status}/events")
            badge = page.page.locator(".badge", has_text="TrainerEnded")
            assert badge.get_attribute("class") == f"badge {colour}"
        page.leave()


def test_the_schedule_moves_by_keys(site: tuple[str, Path], page: Watched) -> None:
    page.open(f"{site[0]}#/run/a/schedule?from=2&to=6")
    page.page.locator("canvas").focus()
    page.page.keyboard.press("+")
    page.until("!location.hash.includes('from=2&')")
    page.page.keyboard.press("ArrowRight")
    page.until("document.querySelector('[aria-live]').textContent.includes('2.4 s of')")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_both_colour_schemes_and_narrow_windows(site: tuple[str, Path], chromium: Browser, scheme: str) -> None:
    size = {"width": 390, "height": 780}
    with watched(chromium, color_scheme=scheme, viewport=size) as page:
        for place in ("", "#/run/a/curves", "#/run/a/groups", "#/run/a/schedule", "#/run/a/phases", "#/run/a/settings"):
            page.open(site[0] + place)
            wide = page.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= size["width"], place
            page.page.goto("about:blank")
        page.open(site[0])
        back, text = page.page.evaluate(
            "(one => [one.backgroundColor, one.color])(getComputedStyle(document.documentElement))"
        )
        assert (_light(back) > _light(text)) == (scheme == "light")
        page.page.get_by_label("Light or dark").click()
        page.see("runs")
        assert page.page.evaluate("document.documentElement.dataset.theme") == ("light" if scheme == "dark" else "dark")
        assert page.complaints == []


def _light(color: str) -> int:
    return sum(map(int, re.findall(r"\d+", color)[:3]))


def test_hostile_conversations_are_text_and_nothing_else(tmp_path: Path, page: Watched) -> None:
    long = "word " * 220_000  # over 1 MB

    def conversation(step: int, number: int) -> list[Message]:
        return [
            {"role": "user", "content": EVIL},
            {"role": "assistant", "content": ANSI + HEBREW, "reasoning_content": EVIL},
            {"role": "tool", "content": long},
            {"role": EVIL, "content": EVIL},
        ]

    made = MadeRun(folder=tmp_path / "runs" / "evil", groups=1, conversation=conversation, environment="<i>x</i>")
    made.write_steps(1)
    made.write_trace()
    rollout = quote("<i>x</i>/train/100#1.0.0", safe="")
    with dashboard(tmp_path / "runs") as link:
        for view in ("groups?step=1", f"rollout?step=1&id={rollout}", f"group?step=1&id={rollout[:-6]}", "schedule"):
            page.open(f"{link}#/run/evil/{view}")
            assert (
                page.page.locator("main script, main img, main i:not([class]):not(.histogram i), main b b").count() == 0
            )
            page.page.goto("about:blank")
        page.open(f"{link}#/run/evil/rollout?step=1&id={rollout}")
        assert page.page.evaluate("window.evil") is None
        shown = page.page.locator(".message pre").all_inner_texts()
        assert shown[0] == EVIL
        assert any("\\x1b[31mred" in text and "\\u202eturned\\u202c" in text and HEBREW in text for text in shown)
        assert max(map(len, shown)) < 25_000
        page.page.get_by_role("button", name=re.compile("Show all")).click()
        page.until(
            "length => [...document.querySelectorAll('.message pre')].some(one => one.textContent.length === length)",
            arg=len(long),
        )
        page.leave()


def test_a_live_run_grows_on_the_page_and_its_end_by_a_kill_is_seen(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "runs" / "live", steps=50)
    run.write_steps(3)
    run.write_trace(joined=False)
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    run.own(holder.pid)
    try:
        with dashboard(tmp_path / "runs") as link:
            page.open(f"{link}#/run/live/curves")
            page.page.wait_for_selector(".badge.live")
            run.write_steps(4)
            page.until("[...document.querySelectorAll('.tile')].some(one => one.textContent.startsWith('Steps7'))")
            with (run.folder / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step":8,"reward/mean":0.5,"policy/ver')
            holder.kill()
            holder.wait()
            page.until("document.querySelector('#state').textContent === 'crashed'")
            page.page.reload()
            page.see("curves")
            tiles = page.page.locator(".tile").all_inner_texts()
            assert any(re.match(r"Steps\s+7", tile) for tile in tiles), tiles
            for view in ("groups", "phases", "schedule", "events"):
                page.open(f"{link}#/run/live/{view}")
                page.see(view)
            page.leave()
    finally:
        holder.kill()
        holder.wait()


def test_a_step_that_was_chosen_stays_while_its_run_goes_on(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "live")
    run.write_steps(3)
    run.write_trace(joined=False)
    run.own(os.getpid())
    asked: list[str] = []
    page.page.clock.install()
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/live/phases")
        assert page.page.get_by_label("Step", exact=True).input_value() == "3"
        page.page.keyboard.press("[")
        page.until("document.querySelector('input[aria-label=Step]').value === '2'")
        page.page.on("request", lambda request: asked.append(request.url))
        with page.page.expect_response(lambda response: response.url.endswith("/api/runs/live")):
            page.page.clock.run_for(2_500)  # past the next look at what is new
        assert not [url for url in asked if "waterfall" in url]
        assert page.page.get_by_label("Step", exact=True).input_value() == "2"
        page.leave()


@pytest.mark.parametrize("place", ["", "#/run/live/curves"])
def test_a_page_whose_server_is_gone_does_not_say_that_a_run_goes_on(
    tmp_path: Path, chromium: Browser, place: str
) -> None:
    run = MadeRun(folder=tmp_path / "live", steps=50)
    run.write_steps(3)
    run.own(os.getpid())
    MadeRun(folder=tmp_path / "other").write_all()
    with watched(chromium) as page:
        page.page.clock.install()
        with dashboard(tmp_path) as link:
            page.open(link + place)
            page.page.wait_for_selector(".badge.live")
        page.page.clock.run_for(2_500)
        page.page.get_by_text("the server does not answer").wait_for()
        assert page.page.locator(".badge.live").count() == 0
        badges = page.page.locator("tbody .badge, #state .badge").all_inner_texts()
        assert sorted(badges) == (["not known"] if place else ["finished", "not known"])
        assert not [said for said in page.complaints if "Failed to load resource" not in said]


def test_a_page_whose_run_s_folder_is_gone_says_so_until_it_is_there_again(tmp_path: Path, chromium: Browser) -> None:
    run = MadeRun(folder=tmp_path / "runs" / "live", steps=50)
    run.write_steps(3)
    run.own(os.getpid())
    state = "document.querySelector('#state').textContent"
    with watched(chromium) as page, dashboard(tmp_path / "runs") as link:
        page.page.clock.install()
        page.open(f"{link}#/run/live/events")
        assert page.page.evaluate(state) == "running"
        run.folder.rename(tmp_path / "elsewhere")
        page.page.clock.run_for(2_500)
        page.page.get_by_text("there is no run 'live'").wait_for()
        assert page.page.evaluate(state) == "not known"
        (tmp_path / "elsewhere").rename(run.folder)
        page.page.clock.run_for(2_500)
        page.until(f"{state} === 'running'")
        assert page.page.get_by_text("there is no run 'live'").count() == 0
        page.leave()
        assert not [said for said in page.complaints if "status of 404" not in said]


def test_a_page_goes_on_asking_after_an_answer_that_was_cut(tmp_path: Path, chromium: Browser) -> None:
    run = MadeRun(folder=tmp_path / "runs" / "run")
    run.write_steps(2)
    cut = tmp_path / "cut"
    cut_while_it_is_there = f"""
import pathlib, tailrace.dashboard.application as pages
whole = pages._json
def shorter(value, status=200):
    answer = whole(value, status)
    if pathlib.Path({str(cut)!r}).exists():
        answer.headers["content-length"] = str(len(answer.body) + 1)
    return answer
pages._json = shorter
"""
    with watched(chromium) as page, dashboard(tmp_path / "runs", first=cut_while_it_is_there) as link:
        page.page.clock.install()
        page.open(link)
        cut.touch()
        page.page.clock.run_for(2_500)
        page.page.get_by_text("the server does not answer").wait_for()
        cut.unlink()
        run.write_steps(1)
        page.page.clock.run_for(2_500)
        page.until("document.querySelector('tbody td:nth-child(6)').textContent === '3'")
        assert page.page.get_by_text("the server does not answer").count() == 0
        page.leave()
        assert not [said for said in page.complaints if "CONTENT_LENGTH_MISMATCH" not in said]


@pytest.mark.parametrize("view", ["curves", "groups", "phases"])
def test_an_open_page_notices_that_its_run_is_resumed(tmp_path: Path, page: Watched, view: str) -> None:
    run = MadeRun(folder=tmp_path / "run", steps=50)
    run.write_steps(3)
    run.write_trace(joined=False)
    run.finish()
    page.page.clock.install()
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/{view}")
        assert page.page.evaluate("document.querySelector('#state').textContent") == "finished"
        run.own(os.getpid())
        page.page.clock.run_for(21_000)
        page.until("document.querySelector('#state').textContent === 'running'")
        run.write_steps(1)
        run.write_trace(joined=False)
        page.page.clock.run_for(2_500)
        if view == "curves":
            page.until("[...document.querySelectorAll('.tile')].some(one => one.textContent.startsWith('Steps4'))")
        else:
            page.until("document.querySelector('.view input[aria-label=Step]').value === '4'")
        page.leave()


def look_again(page: Watched, path: str, seconds: float = 2.5) -> None:
    """Let an open page ask what is new, twice: by the second answer it has drawn the first."""
    for _ in range(2):
        with page.page.expect_response(lambda response: response.url.endswith(path)):
            page.page.clock.run_for(int(1_000 * seconds))


def test_the_table_of_runs_leaves_the_focus_where_it_is(tmp_path: Path, page: Watched) -> None:
    runs = [MadeRun(folder=tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    for run in runs:
        run.write_steps(2)
    page.page.clock.install()
    with dashboard(tmp_path) as link:
        page.open(link)
        page.page.get_by_role("button", name="run", exact=True).focus()
        page.page.keyboard.press("Enter")
        assert page.page.evaluate("document.activeElement.textContent") == "run ↑"
        page.page.get_by_role("link", name="b", exact=True).focus()
        page.page.evaluate("document.activeElement.isSame = true")
        look_again(page, "/api/runs")
        assert page.page.evaluate("document.activeElement.isSame") is True
        runs[1].write_steps(1)
        look_again(page, "/api/runs")
        assert page.page.locator("tbody tr td:nth-child(6)").all_inner_texts() == ["2", "3"]
        assert page.page.evaluate("[document.activeElement.textContent, document.activeElement.isSame]") == ["b", None]
        page.leave()


def test_what_is_typed_into_a_view_stays_while_its_run_goes_on(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "live")
    run.write_steps(3)
    run.write_trace(joined=False)
    run.own(os.getpid())
    step = "document.querySelector('input[aria-label=Step]').value"
    page.page.clock.install()
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/live/groups")
        page.page.get_by_label("Search texts and tasks").focus()
        page.page.keyboard.type("piper")
        run.write_steps(1)
        look_again(page, "/api/runs/live")
        assert page.page.get_by_label("Search texts and tasks").input_value() == "piper"
        assert page.page.evaluate(step) == "3"
        page.page.keyboard.press("Enter")
        page.until("location.hash.includes('text=piper')")
        look_again(page, "/api/runs/live")
        page.until(f"{step} === '4'")
        focused = "document.activeElement.getAttribute('aria-label')"
        assert page.page.evaluate(focused) == "Search texts and tasks"
        page.open(f"{link}#/run/live/phases")
        page.page.get_by_label("Step", exact=True).focus()
        page.page.keyboard.press("Control+A")
        page.page.keyboard.type("2")
        look_again(page, "/api/runs/live/waterfall")
        assert page.page.evaluate(f"[{step}, {focused}]") == ["2", "Step"]
        page.page.keyboard.press("Enter")
        page.until("location.hash.includes('step=2')")
        assert page.page.evaluate(focused) == "Step"
        page.leave()


def test_tokens_of_an_export_alone_stand_in_their_places(tmp_path: Path, page: Watched) -> None:
    run = MadeRun(folder=tmp_path / "run")
    run.write_steps(3)
    write_export(run.folder / "tokens" / "step_000003_rank_0.parquet", run.entries(3))
    with dashboard(run.folder) as link:
        page.open(f"{link}#/run/run/rollout?step=3&id={quote('sort/train/300#3.1.0', safe='')}")
        page.page.get_by_role("link", name="Tokens").click()
        page.see("tokens")
        assert page.page.get_by_text("without its context").count() == 1
        page.page.locator(".viewport").focus()
        page.page.keyboard.press("End")
        told = page.page.get_by_label("The token").inner_text()
        assert re.search(r"ratio\s+[01]\.\d+", told)
        page.leave()


class Answers(BaseHTTPRequestHandler):
    """What the gateway of a run answers a client of OpenAI's."""

    def do_POST(self) -> None:
        asked = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
        self.hear([message["content"] for message in asked["messages"]])
        tokens = [{"token": text, "logprob": -0.5 * at} for at, text in enumerate(("Ida", "\n", EVIL))]
        choice = {
            "message": {"content": "Ida\n" + EVIL},
            "finish_reason": "stop" if asked["temperature"] == 0 else "length",
            "logprobs": {"content": tokens},
        }
        known = self.headers["authorization"] == "Bearer policy's"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(msgspec.json.encode({"choices": [choice]}))

    def hear(self, said: list[str]) -> None:
        """Before it is answered."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def answering(folder: Path, answers: type[Answers] = Answers) -> Iterator[str]:
    """A live run whose policy answers: the link of its dashboard."""
    run = MadeRun(folder=folder)
    run.write_steps(1)
    run.own(os.getpid())
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as gateway, dashboard(folder) as link:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        access = {"url": f"http://127.0.0.1:{gateway.server_port}", "key": "claims", "policy_key": "policy's"}
        (folder / "gateway.json").write_bytes(msgspec.json.encode(access))
        try:
            yield link
        finally:
            gateway.shutdown()


def send(page: Watched, text: str) -> None:
    page.page.get_by_label("Message").fill(text)
    page.page.keyboard.press("Control+Enter")


def test_the_running_policy_answers_in_the_view_of_tokens(tmp_path: Path, page: Watched) -> None:
    with answering(tmp_path / "live") as link:
        page.open(f"{link}#/run/live/chat")
        page.page.get_by_label("temperature").fill("0")
        send(page, "Sort these")
        page.page.wait_for_selector(".message.assistant .viewport canvas")
        assert page.page.get_by_text("3 tokens · ended by stop").count() == 1
        page.page.locator(".viewport").focus()
        page.page.keyboard.press("ArrowRight")
        page.page.keyboard.press("End")
        told = page.page.get_by_label("The token").inner_text()
        assert "generator" in told
        assert "-1.0000" in told
        assert EVIL in told
        assert page.page.evaluate("window.evil") is None
        page.leave()


def test_a_reply_that_comes_after_its_conversation_is_left_out_of_the_next(tmp_path: Path, page: Watched) -> None:
    heard: list[list[str]] = []
    may_answer = threading.Event()

    class Late(Answers):
        def hear(self, said: list[str]) -> None:
            heard.append(said)
            may_answer.wait(60)

    with answering(tmp_path / "live", Late) as link:
        page.open(f"{link}#/run/live/chat")
        send(page, "first")
        page.page.locator(".message.user").wait_for()
        assert page.page.get_by_label("Message").input_value() == ""
        page.page.get_by_role("button", name="Begin anew").click()
        with page.page.expect_response(lambda response: "/chat?" in response.url):
            may_answer.set()
        send(page, "second")
        page.page.locator(".message.assistant").wait_for()
        assert [one.split("\n")[-1] for one in page.page.locator(".message.user").all_inner_texts()] == ["second"]
        assert page.page.locator(".message").count() == 2
        assert heard == [["first"], ["second"]]
        page.leave()


def test_a_message_that_was_not_answered_is_in_its_field_again(tmp_path: Path, chromium: Browser) -> None:
    with watched(chromium) as page, answering(tmp_path / "live") as link:
        page.open(f"{link}#/run/live/chat")
        (tmp_path / "live" / "gateway.json").unlink()
        send(page, "Sort these")
        page.page.get_by_text("no running policy answers").wait_for()
        assert page.page.get_by_label("Message").input_value() == "Sort these"
        page.leave()
        assert not [said for said in page.complaints if "status of 404" not in said]


def test_a_conversation_stays_where_the_colours_change(tmp_path: Path, page: Watched) -> None:
    picture = "document.querySelector('.viewport canvas').toDataURL()"
    with answering(tmp_path / "live") as link:
        page.open(f"{link}#/run/live/chat")
        send(page, "Sort these")
        page.page.wait_for_selector(".message.assistant .viewport canvas")
        before = page.page.evaluate(picture)
        page.page.get_by_label("Light or dark").click()
        page.until(f"before => document.querySelector('.viewport') && {picture} !== before", arg=before)
        page.page.emulate_media(color_scheme="dark")
        page.page.wait_for_timeout(100)
        assert page.page.locator(".message").count() == 2
        page.leave()


def test_an_empty_folder_waits_for_its_first_run(tmp_path: Path, page: Watched) -> None:
    with dashboard(tmp_path) as link:
        page.open(link)
        assert page.page.get_by_text("There is no run in").count() == 1
        MadeRun(folder=tmp_path / "first").write_steps(2)
        page.page.wait_for_selector("tbody tr")
        page.leave()
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "config.toml").write_text("name = 'only'\n")
    with dashboard(tmp_path / "only") as link:
        page.open(link)
        page.see("curves")  # one run alone is opened at once
        page.open(f"{link}#/run/only/groups")
        assert page.page.get_by_text("This run has no rollouts").count() == 1
        page.leave()


def test_two_hundred_runs(tmp_path: Path, page: Watched) -> None:
    for number in range(200):
        MadeRun(folder=tmp_path / f"run-{number:03}", steps=3, seed=number).write_steps(3, rollouts=False)
    with dashboard(tmp_path) as link:
        page.open(link)
        assert page.page.locator("tbody tr").count() == 200
        page.page.get_by_label("Filter runs").fill("run-19")
        assert page.page.locator("tbody tr").count() == 10
        page.leave()


@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("[::]", marks=needs_ipv6)])
def test_the_link_of_a_reachable_address_lets_in_and_nothing_else_does(
    tmp_path: Path, chromium: Browser, host: str
) -> None:
    MadeRun(folder=tmp_path / "run").write_steps(1)
    command = [sys.executable, "-m", "tailrace", "ui", str(tmp_path), "--address", f"{host}:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        found = re.search(rf"http://{socket.gethostname()}:(\d+)/\?token=(\S+)", process.stdout.readline())
        assert found is not None
        place = f"http://127.0.0.1:{found.group(1)}/"
        with watched(chromium) as page:
            answered = page.page.goto(place)
            assert answered is not None
            assert answered.status == 401
            page.open(f"{place}?token={found.group(2)}")
            page.see("runs")
            assert "token" not in page.page.url
    finally:
        process.terminate()
        process.wait(30)
