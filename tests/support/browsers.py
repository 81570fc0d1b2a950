"""A real browser on the dashboard's pages: Chromium, driven by Playwright; without either, tests skip by name."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

READY = ".view[data-ready]"
_PATIENCE_MS = 30_000
_LOOK_MS = 50


@dataclass
class Watched:
    """A page, and what it complained of: a test ends with `complaints == []`."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def open(self, url: str) -> None:
        """And wait until its view is there. The page is left first: the view before is there already."""
        self.leave()
        self.page.goto(url)
        self.page.wait_for_selector(READY)

    def leave(self) -> None:
        """Before its server ends: a page that goes on asking would complain."""
        self.page.goto("about:blank")

    def see(self, view: str) -> None:
        """Wait for a view, once the page has heard where it is to go."""
        self.page.wait_for_timeout(_LOOK_MS)
        self.page.wait_for_selector(f'.view[data-view="{view}"][data-ready]')

    def until(self, expression: str, arg: object = None) -> None:
        """Wait until an expression of JavaScript is true. Not `wait_for_function`, which the page's policy forbids."""
        for _ in range(_PATIENCE_MS // _LOOK_MS):
            if self.page.evaluate(expression, arg):
                return
            self.page.wait_for_timeout(_LOOK_MS)
        raise AssertionError(
            f"it never came to be: {expression}; the page shows {self.page.inner_text('body')[:2_000]}"
        )


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    playwright = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("chromium is not installed: make test-system")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextlib.contextmanager
def watched(browser: Browser, **context: Any) -> Iterator[Watched]:
    """A page in a context of its own, with its console and its errors."""
    opened = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    opened.set_default_timeout(_PATIENCE_MS)
    found = Watched(opened.new_page())
    found.page.on("console", lambda said: _keep(found, said.type, said.text))
    found.page.on("pageerror", lambda error: found.complaints.append(f"error: {error}"))
    found.page.on("dialog", lambda dialog: (found.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield found
    opened.close()


def _keep(found: Watched, kind: str, text: str) -> None:
    if kind in ("error", "warning"):
        found.complaints.append(f"{kind}: {text}")


@contextlib.contextmanager
def dashboard(folder: Path, *arguments: str, first: str = "pass") -> Iterator[str]:
    """`tailrace ui` over a folder; its link. Its process does `first`, in Python, before anything else."""
    program = f"{first}\nimport sys, tailrace.cli\nsys.exit(tailrace.cli.main())"
    command = [sys.executable, "-c", program, "ui", str(folder), "--address", "127.0.0.1:0", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        link = re.search(r"http://\S+", said)
        assert link is not None, said
        yield link.group()
    finally:
        process.terminate()
        process.wait(30)
