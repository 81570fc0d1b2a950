"""Pictures of the dashboard for docs/ui.md, of a run that is there.

    tailrace train quickstart --observability.tokens_every_steps 10
    python tools/ui_screenshots.py runs/quickstart docs/images

Needs Chromium (make test-system). Pictures are cut to 160 colours, which makes them a third as large.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browsers import browser, dashboard, watched  # noqa: E402

COLOURS = 160


def places(link: str, run: str) -> dict[str, str]:
    """The views' addresses, by the names of their pictures; each at the middle step that has tokens."""
    api = f"{link}api/runs/{quote(run)}"
    detail = _get(api)
    steps = detail["tokens"]["steps"] or detail["steps"]
    step = steps[len(steps) // 2]
    rollouts = _get(f"{api}/rollouts?step={step}")["rollouts"]
    worst = min((one for one in rollouts if one["reward"] is not None), key=lambda one: one["reward"])
    group, rollout = quote(worst["group_id"], safe=""), quote(worst["rollout_id"], safe="")
    began_s = _get(f"{api}/waterfall?step={step}")["began_s"]
    tokens = _get(f"{api}/tokens?step={step}&id={rollout}")
    unlikely = min((value, at) for at, value in enumerate(tokens["logprobs"]) if value is not None)[1]
    here = f"{link}#/run/{quote(run)}"
    return {
        "ui-runs": link + "#/",
        "ui-curves": f"{here}/curves",
        "ui-groups": f"{here}/groups?step={step}",
        "ui-group": f"{here}/group?step={step}&id={group}",
        "ui-rollout": f"{here}/rollout?step={step}&id={rollout}",
        "ui-tokens": f"{here}/tokens?step={step}&id={rollout}&at={unlikely}",
        "ui-schedule": f"{here}/schedule?from={max(0.0, began_s - 1):.2f}&to={began_s + 2:.2f}",
        "ui-phases": f"{here}/phases?step={step}",
    }


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    with dashboard(given.run.parent) as link, browser() as launched:
        for number, (name, place) in enumerate(places(link, given.run.name).items()):
            dark = number % 2 == 1 and name != "ui-curves"
            with watched(launched, color_scheme="dark" if dark else "light") as page:
                page.open(place)
                page.page.wait_for_timeout(1_000)
                picture = Image.open(io.BytesIO(page.page.screenshot()))
                picture.convert("RGB").quantize(COLOURS).save(given.folder / f"{name}.png", optimize=True)
                assert page.complaints == [], page.complaints


if __name__ == "__main__":
    main()
