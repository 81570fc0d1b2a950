"""How fast the dashboard is, in a browser, over a long run: 1,000 steps of 64 rollouts, and tokens of 100 of them.

    python benchmarks/ui.py [--json] [--quick] [--case views ...]

The run is made by a script over the writers that runs use (tests/support/made_runs.py), with 280 columns of metrics and
a trace as large as a run writes by default. Each figure is a median over openings at different steps, in Chromium, with
the first opening beside it, when the server has read nothing yet:

    first paint   the browser's own first contentful paint of the list of runs, in a new context
    view-*        from a change of the address to a view that is drawn
    live          from a line that is written to the page that shows it
    memory        resident, of the server, after all of this
    idle          share of a core that the server takes while a run writes a line each second and nobody looks

`--case sidecar` is apart, and without a browser: what 64 rollouts of 1,000 tokens cost the thread that writes them, and
one of them, or one of 100,000 tokens, who reads it. Its files have the extra `parquet`'s format; no target is set.

The others need Chromium: make test-system.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import psutil
from kit import Options, parse_options, progress, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.browsers import Watched, browser, dashboard, watched
from tests.support.made_runs import MadeRun, token_text, write_export

from tailrace.reporting.tokens import TokenWriter, read_rollout
from tailrace.tracing.background import BackgroundWriter

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STEPS, QUICK_STEPS = 1_000, 60
LONG_TOKENS = 100_000
SIDECAR_TOKENS, CONTEXT_TOKENS = 1_000, 20
IDLE_S, QUICK_IDLE_S = 30.0, 6.0
MAX_FIRST_PAINT_S, MAX_VIEW_S, MAX_LIVE_S, MAX_MEMORY_MB, MAX_IDLE = 1.0, 0.5, 2.0, 300.0, 0.02
DRAWN = """async ([place, view]) => {
  const frame = () => new Promise(requestAnimationFrame);
  document.querySelector(".view").removeAttribute("data-ready");
  const began = performance.now();
  location.hash = place;
  while (!document.querySelector(`.view[data-view="${view}"][data-ready]`)) await frame();
  await frame();
  await frame();
  return (performance.now() - began) / 1000;
}"""
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime / 1000"


@dataclass(frozen=True)
class Row:
    """One figure."""

    case: str
    value: float
    unit: str
    first: float | None
    target: float | None
    met: bool | None


def made_runs(root: Path, steps: int) -> None:
    """The long run, one with a rollout of very many tokens, and one that goes on."""
    began_s = time.perf_counter()
    run = MadeRun(folder=root / "long", steps=steps, groups=8, group_size=8, completion_tokens=60, extra_metrics=260)
    run.trace_mb = 16.0
    run.write_steps(steps)
    run.write_evaluation(steps)
    run.write_tokens(range(max(1, steps // 100), steps + 1, max(1, steps // 100)))
    run.write_trace()
    run.finish()
    run_of_long_rollouts(root)
    progress(f"{steps} steps made in {time.perf_counter() - began_s:.0f} s")


def run_of_long_rollouts(root: Path) -> MadeRun:
    run = MadeRun(folder=root / "tokens", steps=1, groups=2, group_size=2, completion_tokens=LONG_TOKENS)
    run.write_steps(1)
    run.write_tokens([1])
    return run.finish()


@contextmanager
def live_run(root: Path) -> Iterator[MadeRun]:
    """One that this process owns."""
    run = MadeRun(folder=root / "live", steps=10_000, extra_metrics=260)
    run.write_steps(20)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "kernel": "", "started_at": ""}
    (run.folder / "owner.json").write_bytes(msgspec.json.encode(owner))
    yield run


def first_paint(launched: Browser, link: str, times: int) -> list[float]:
    found = []
    for _ in range(times):
        with watched(launched) as page:
            page.open(link)
            found.append(float(page.page.evaluate(PAINTED)))
    return found


def places(steps: int) -> dict[str, Callable[[int], str]]:
    """The address of each view at a step."""

    def rollout(step: int) -> str:
        return quote(f"sort/train/{step * 100 + 1}#{step}.1.0", safe="")

    def group(step: int) -> str:
        return quote(f"sort/train/{step * 100 + 1}#{step}", safe="")

    every = max(1, steps // 100)
    return {
        "curves": lambda step: f"#/run/long/curves?smooth={step / steps / 2}",
        "groups": lambda step: f"#/run/long/groups?step={step}",
        "group": lambda step: f"#/run/long/group?step={step}&id={group(step)}",
        "rollout": lambda step: f"#/run/long/rollout?step={step}&id={rollout(step)}",
        "tokens": lambda step: f"#/run/long/tokens?step={step // every * every}&id={rollout(step // every * every)}",
        "phases": lambda step: f"#/run/long/phases?step={step}",
        "schedule": lambda step: f"#/run/long/schedule?from={step}&to={step + 4}",
        "events": lambda step: f"#/run/long/events?{step}",
        "settings": lambda step: f"#/run/long/settings?{step}",
        "runs": lambda step: f"#/?smooth={step / steps / 2}",
    }


def view_times(page: Watched, link: str, steps: int, times: int) -> Iterator[Row]:
    chosen = [steps * number // (times + 1) + 1 for number in range(1, times + 1)]
    for name, place in places(steps).items():
        page.page.goto("about:blank")
        page.open(f"{link}#/run/tokens/settings")
        took = [float(page.page.evaluate(DRAWN, [place(step), name])) for step in chosen]
        yield row(f"view-{name}", took, "s", MAX_VIEW_S)
    page.open(f"{link}#/run/tokens/settings")
    long = [
        f"#/run/tokens/tokens?step=1&id={quote(f'sort/train/100#1.{member}.0', safe='')}" for member in (0, 1, 0, 1, 0)
    ]
    took = [float(page.page.evaluate(DRAWN, [place, "tokens"])) for place in long]
    yield row(f"view-tokens-{LONG_TOKENS:,}", took, "s", MAX_VIEW_S)
    yield row("scroll-tokens", scroll_times(page), "s a frame", 1 / 20)


def scroll_times(page: Watched) -> list[float]:
    """How long each frame takes while a very long rollout is scrolled through."""
    page.until("parseInt(document.querySelector('.viewport > div').style.height) > 100000")
    found: list[float] = page.page.evaluate(
        """async () => {
          const window = document.querySelector('.viewport'), took = [];
          let before = await new Promise(requestAnimationFrame);
          for (let i = 0; i < 60; i++) {
            window.scrollTop += 4000;
            const now = await new Promise(requestAnimationFrame);
            took.push((now - before) / 1000);
            before = now;
          }
          return took;
        }"""
    )
    return found


def live_times(page: Watched, link: str, run: MadeRun, times: int) -> list[float]:
    page.open(f"{link}#/run/live/curves")
    took = []
    for _ in range(times):
        began_s = time.perf_counter()
        run.write_steps(1, rollouts=False)
        page.until(
            f"[...document.querySelectorAll('.tile')].some(one => one.textContent.startsWith('Steps{run.step}'))"
        )
        took.append(time.perf_counter() - began_s)
    return took


def idle_share(server: psutil.Process, run: MadeRun, seconds: float) -> float:
    """Of a core."""
    before, began_s = sum(server.cpu_times()[:2]), time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        run.write_steps(1)
        time.sleep(1.0)
    return (sum(server.cpu_times()[:2]) - before) / (time.perf_counter() - began_s)


def sidecar_rows(root: Path, times: int) -> Iterator[Row]:
    """Of the files of tokens alone, without a browser."""
    run = MadeRun(folder=root / "sidecar", groups=8, group_size=8, completion_tokens=SIDECAR_TOKENS - CONTEXT_TOKENS)
    run.write_tokens([times + 1])  # pyarrow is there
    written = []
    for step in range(1, times + 1):
        entries = run.entries(step)
        writer = BackgroundWriter()
        tokens = TokenWriter(run.folder / "tokens", writer, token_text, every_steps=1, max_bytes=1 << 40)
        began_s = time.perf_counter()
        tokens.write(step, entries, {})
        assert writer.close(600)
        assert writer.dropped == 0
        written.append(time.perf_counter() - began_s)
        write_export(run.folder / f"tokens/step_{step:06d}_rank_0.parquet", entries)
    yield row("sidecar-write", written, "s")
    read = [read_s(run.folder, f"sort/train/{step * 100 + 1}#{step}.1.0", step) for step in range(1, times + 1)]
    yield row("sidecar-read", read, "s")
    long = run_of_long_rollouts(root).folder
    read = [read_s(long, f"sort/train/100#1.{number % 2}.0", 1) for number in range(times)]
    yield row(f"sidecar-read-{LONG_TOKENS:,}", read, "s")


def read_s(folder: Path, rollout_id: str, step: int) -> float:
    """With what a trainer exported of it."""
    began_s = time.perf_counter()
    (branch,) = read_rollout(folder, rollout_id, step=step)
    assert branch.trainer is not None
    return time.perf_counter() - began_s


def row(case: str, values: list[float], unit: str, target: float | None = None) -> Row:
    value = median(values)
    return Row(
        case, value, unit, values[0] if len(values) > 1 else None, target, None if target is None else value < target
    )


def server_of_this_process() -> psutil.Process:
    return next(child for child in psutil.Process().children() if "ui" in child.cmdline())


def main() -> None:
    options = parse_options(__doc__)
    chosen = options.choose(["first-paint", "views", "live", "idle", "sidecar"])
    steps, times = (QUICK_STEPS, 3) if options.quick else (STEPS, 7)
    rows: list[Row] = []
    if "sidecar" in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            rows += sidecar_rows(Path(folder), times)
    if set(chosen) != {"sidecar"}:
        rows += browser_rows(options, chosen, steps, times)
    report("The dashboard", rows, options)


def browser_rows(options: Options, chosen: list[str], steps: int, times: int) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, browser() as launched:
        root = Path(folder) / "runs"
        made_runs(root, steps)
        with live_run(root) as live, dashboard(root) as link:
            server = server_of_this_process()
            if "first-paint" in chosen:
                rows.append(row("first paint", first_paint(launched, link, times), "s", MAX_FIRST_PAINT_S))
            with watched(launched) as page:
                if "views" in chosen:
                    rows += view_times(page, link, steps, times)
                if "live" in chosen:
                    rows.append(row("live", live_times(page, link, live, times), "s", MAX_LIVE_S))
            rows.append(row("memory", [server.memory_info().rss / 1e6], "MB", MAX_MEMORY_MB))
            if "idle" in chosen:
                share = idle_share(server, live, QUICK_IDLE_S if options.quick else IDLE_S)
                rows.append(row("idle", [share], "of a core", MAX_IDLE))
    return rows


if __name__ == "__main__":
    main()
