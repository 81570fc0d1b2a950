"""Every environment of the examples and of the guides gives the bundled model something to learn from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from doctest import DocTestParser
from pathlib import Path

import pytest

from tailrace.config import load_settings
from tailrace.run.trying import try_environments

ROOT = Path(__file__).parents[2]
GUIDES = {
    "environments": ["all_but_last", "guess", "quiz", "count"],
    "scoring": ["first_name"],
    "python": ["agent", "spec"],
}
DATA = {"count": "{tmp_path}/words.jsonl", "agent": f"{ROOT}/examples/names.jsonl"}
EXAMPLES = [
    "own_agent:first_names",
    "own_environment:guess_the_name",
    "own_tool:seats",
    "stalling_reward:copy_text",
    "trl_increment:increment",
    "mcp_agent:seats",
]
SETTINGS = """
max_steps = 1
model.name = "bundled:quickstart"
rollouts = {{ max_tokens = 96, max_turns = 3 }}
generator = {{ slots = 64 }}
environments = [
    {{ name = "examples.own_dataset:rest", data = "{root}/examples/names.jsonl", eval_tasks = 4 }},
    {{ name = "examples.own_judge:names_by_key" }},
    {named}
]
"""


def write_module(folder: Path, guide: str) -> str:
    """The Python blocks of a guide as a module; its name. Those about the library without a run are left out."""
    page = (ROOT / "docs" / f"{guide}.md").read_text()
    if guide == "python":
        (folder / f"guide_{guide}.py").write_text(_environments_of_python(page))
        return f"guide_{guide}"
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    chosen = [
        block for block in blocks if "from tailrace.environments import" in block and "RelativeJudge" not in block
    ]
    (folder / f"guide_{guide}.py").write_text("\n".join(chosen))
    return f"guide_{guide}"


def _environments_of_python(page: str) -> str:
    """The agent that the page begins with, and the environment that is an object of the program."""
    begins = re.search(r"^async def agent.*?(?=\n\n)", page, flags=re.DOTALL | re.MULTILINE)
    assert begins is not None
    sources = [example.source for example in DocTestParser().get_examples(page)]
    first = next(index for index, source in enumerate(sources) if source.startswith("async def shout"))
    return "\n".join(["import tailrace", begins[0], *sources[first : first + 3]])


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    modules = {guide: write_module(tmp_path, guide) for guide in GUIDES}
    (tmp_path / "words.jsonl").write_text('{"word": "sun"}\n{"word": "river"}\n')
    named = [f'{{ name = "examples.{example}" }},' for example in EXAMPLES]
    for guide, names in GUIDES.items():
        for name in names:
            data = f', data = "{DATA[name].format(tmp_path=tmp_path)}"' if name in DATA else ""
            named.append(f'{{ name = "{modules[guide]}:{name}", id = "{guide}-{name}"{data} }},')
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "all.toml"
    path.write_text(SETTINGS.format(root=ROOT, named="\n    ".join(named)))
    yield path
    for module in modules.values():
        sys.modules.pop(module, None)


async def test_rewards_differ_inside_groups_of_the_bundled_model(settings: Path) -> None:
    tried = await try_environments(load_settings(str(settings)), tasks=2, group_size=8)
    assert len(tried) == 2 + len(EXAMPLES) + sum(map(len, GUIDES.values()))
    assert [text for trial, text in tried if not trial.is_trainable] == []
