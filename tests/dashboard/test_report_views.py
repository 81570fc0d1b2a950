"""The dashboard's views inside `report.html`: one file, opened without a server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tailrace.dashboard import report_views as module
from tailrace.dashboard.report_views import report_views
from tailrace.records import Message
from tailrace.reporting.report import write_report
from tests.dashboard.test_pages import ANSI, EVIL
from tests.support.browsers import browser, watched
from tests.support.made_runs import MadeRun

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    def conversation(step: int, number: int) -> list[Message]:
        return [{"role": "user", "content": EVIL}, {"role": "assistant", "content": ANSI}]

    made = MadeRun(folder=tmp_path / "a run", steps=8, num_branches=2, conversation=conversation).write_all()
    made.write_tokens([6, 7, 8])
    return made


def test_group_and_tokens_open_inside_the_report_without_a_server(run: MadeRun) -> None:
    write_report(run.folder, report_views)
    with browser() as chromium, watched(chromium) as page:
        page.page.goto((run.folder / "report.html").as_uri())
        assert page.page.locator(".rollout").get_by_role("link", name="tokens").count() == 3
        best = page.page.locator(".rollout", has_text="Best")
        best.get_by_role("link", name="group").click()
        page.see("group")
        assert page.page.locator(".side section").count() == 4
        assert page.page.locator("#report").is_hidden()
        page.page.get_by_role("link", name=re.compile("^rollout 1")).click()
        page.see("rollout")
        assert page.page.locator(".message pre").first.inner_text() == EVIL
        page.page.go_back()
        page.see("group")
        page.page.go_back()
        page.page.wait_for_selector("#report:not([hidden])")
        best.get_by_role("link", name="tokens").click()
        page.see("tokens")
        page.page.locator(".viewport").focus()
        for _ in range(22):  # the context has 20
            page.page.keyboard.press("ArrowRight")
        assert re.search(r"ratio\s+[01]\.\d+", page.page.get_by_label("The token").inner_text())
        page.page.get_by_label("Beside it").select_option("1")
        page.until("document.querySelectorAll('.viewport').length === 2")
        page.page.get_by_role("link", name="‹ report").click()
        page.page.wait_for_selector("#report:not([hidden])")
        assert page.page.evaluate("window.evil") is None
        assert page.complaints == []


def test_the_script_of_the_report_is_the_only_one_that_may_run(run: MadeRun) -> None:
    write_report(run.folder, report_views)
    source = (run.folder / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', source)
    assert policy is not None
    assert re.fullmatch(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-\S{44}'", policy[1])
    assert source.count("<script") == source.count("</script>") == 2  # what it knows, and what draws it
    assert "://" not in source


def test_what_the_report_keeps_of_its_rollouts_is_bounded(run: MadeRun) -> None:
    with patch.object(module, "_MOST_BYTES", 9_000):
        write_report(run.folder, report_views)
    source = (run.folder / "report.html").read_text()
    kept = source[source.index('id="kept">') : source.rindex("</script>", 0, source.rindex("<script"))]
    assert len(kept) < 12_000
    with browser() as chromium, watched(chromium) as page:
        page.page.goto((run.folder / "report.html").as_uri())
        page.page.locator(".rollout", has_text="Best").get_by_role("link", name="group").click()
        page.see("group")
        assert page.page.get_by_text("more rollouts are in the step's list").count() == 1
        assert page.complaints == []


def test_the_views_of_a_report_need_no_extra(run: MadeRun) -> None:
    code = (
        "import sys; from pathlib import Path; from tailrace.reporting.report import write_report\n"
        "from tailrace.dashboard.report_views import report_views\n"
        f"write_report(Path({str(run.folder)!r}), report_views)\n"
        "assert not {'starlette', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
