"""Files of verifiers' and TRL's as runs: written by verifiers itself where it can be imported, else as it documents."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import httpx
import msgspec
import pytest

from tailrace.dashboard.application import Dashboard
from tailrace.dashboard.others import OthersFiles, find_sources
from tailrace.dashboard.others.placed import Placed
from tailrace.dashboard.others.verifiers_lines import placed_of_line
from tailrace.dashboard.serving import require_folder
from tailrace.errors import DataError
from tests.support.made_runs import MadeRun

LOCAL = "http://127.0.0.1:8420"


class Asked:
    """A dashboard over a folder or a file, asked as its page asks."""

    def __init__(self, root: Path) -> None:
        transport = httpx.ASGITransport(Dashboard(root).application())
        self._client = httpx.AsyncClient(transport=transport, base_url=LOCAL)

    async def __call__(self, part: str, **parameters: object) -> Any:
        response = await self._client.get(f"/api/{part}", params={name: str(one) for name, one in parameters.items()})
        assert response.status_code == 200, response.text
        return response.json()


def episode(number: int, reward: float) -> dict[str, Any]:
    """As verifiers documents a line of `traces.jsonl`."""
    call = {"id": "c", "type": "function", "name": "sort", "arguments": '{"by": "name"}'}
    nodes = [
        {"message": {"role": "user", "content": "Sort: <b>Ida</b>, Tom"}, "token_ids": [1, 2, 3], "mask": [False] * 3},
        {
            "parent": 0,
            "message": {"role": "assistant", "content": None, "tool_calls": [call]},
            "sampled": True,
            "token_ids": [4, 5],
            "mask": [True, True],
            "logprobs": [-1.0, -2.0],
        },
        {"parent": 1, "message": {"role": "tool", "tool_call_id": "c", "content": "Ida, Tom"}},
        {"parent": 2, "message": {"role": "assistant", "content": f"answer {number}"}, "sampled": True},
    ]
    task = {"type": "Sort", "data": {"idx": number // 2, "name": "sort"}, "key": f"task-{number // 2}"}
    trace = {
        "id": f"trace-{number}",
        "task": task,
        "agent": {"config": {}, "name": "agent"},
        "nodes": nodes,
        "calls": [{"node": 3, "model": "a-model", "finish_reason": "length"}],
        "rewards": {"right": {"score": reward, "weight": 0.5}, "form": {"score": 1.0, "weight": 0.25}},
        "ok": True,
    }
    return {"id": f"episode-{number}", "env": {"id": "sorting"}, "task": task, "traces": [trace], "ok": True}


def write_traces(folder: Path, rewards: list[float], *, from_number: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "traces.jsonl").open("a") as file:
        file.writelines(json.dumps(episode(from_number + at, reward)) + "\n" for at, reward in enumerate(rewards))


def test_verifiers_itself_writes_what_these_tests_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    for name in ("math_verify", "math_verify.errors"):  # which it grades answers with, and writes nothing
        monkeypatch.setitem(sys.modules, name, MagicMock())
    from verifiers.v1.cli.output import write_episode
    from verifiers.v1.episode import WireEpisode

    given = episode(1, 1.0)
    write_episode(tmp_path, WireEpisode.model_validate(given))
    (line,) = (tmp_path / "traces.jsonl").read_bytes().splitlines()
    (ours,), (theirs,) = placed_of_line(json.dumps(given).encode(), 1, ""), placed_of_line(line, 1, "")
    left_out = {"started_s": 0.0, "task": {}}  # it adds defaults
    assert msgspec.structs.replace(ours.record, **left_out) == msgspec.structs.replace(theirs.record, **left_out)


async def test_traces_of_verifiers_are_groups_rewards_and_conversations(tmp_path: Path) -> None:
    write_traces(tmp_path / "gsm--a-model", [0.0, 1.0, 1.0, 1.0])
    with (tmp_path / "gsm--a-model" / "traces.jsonl").open("a") as file:
        file.write('{"id": "x", "traces": 3}\n[]\n{"env": {"id": "cut')
    ask = Asked(tmp_path)
    (row,) = (await ask("runs"))["runs"]
    assert (row["id"], row["state"], row["model"]) == ("gsm--a-model", "read", "a-model")
    assert (row["environments"], row["tags"], row["held_out"]) == (["sorting"], ["verifiers"], 0.625)
    detail = await ask("runs/gsm--a-model")
    assert (detail["steps"], detail["evaluations"]) == ([], [0])
    assert "of tokens no texts" in detail["note"]
    assert "2 of its lines or tables could not be read" in detail["note"]
    table = await ask("runs/gsm--a-model/rollouts", kind="evaluation", step=0)
    groups = [one["group_id"] for one in table["rollouts"]]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert [one["reward"] for one in table["rollouts"]] == [0.25, 0.75, 0.75, 0.75]
    first = table["rollouts"][0]
    assert first["reward_components"] == {"right": 0.0, "form": 0.25}
    assert (first["turns"], first["tokens"], first["completion_tokens"], first["truncated"]) == (2, 5, 2, True)
    assert first["mean_logprob"] == -1.5
    record = await ask("runs/gsm--a-model/rollout", kind="evaluation", step=0, id=first["rollout_id"])
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert record["messages"][1]["tool_calls"][0]["function"] == {"name": "sort", "arguments": '{"by": "name"}'}
    found = await ask("runs/gsm--a-model/search", text="answer 3")
    assert [match["rollout_id"] for match in found["matches"]] == [table["rollouts"][3]["rollout_id"]]


async def test_a_reward_that_is_no_number_is_none(tmp_path: Path) -> None:
    write_traces(tmp_path / "a", [float("nan"), 1.0])
    ask = Asked(tmp_path)
    assert (await ask("runs"))["runs"][0]["held_out"] == 0.75
    table = await ask("runs/a/rollouts", kind="evaluation", step=0)
    assert [one["reward"] for one in table["rollouts"]] == [None, 0.75]
    assert table["rollouts"][0]["reward_components"] == {"right": None, "form": 0.25}


async def test_what_is_appended_to_a_file_is_seen(tmp_path: Path) -> None:
    write_traces(tmp_path / "a", [0.0])
    ask = Asked(tmp_path / "a" / "traces.jsonl")
    assert (await ask("runs"))["is_one"] is True
    assert len((await ask("runs/a/rollouts", kind="evaluation", step=0))["rollouts"]) == 1
    write_traces(tmp_path / "a", [1.0, 1.0], from_number=1)
    assert len((await ask("runs/a/rollouts", kind="evaluation", step=0))["rollouts"]) == 3
    (tmp_path / "a" / "traces.jsonl").write_text("")
    assert (await ask("runs"))["runs"][0]["held_out"] is None


async def test_results_of_the_older_verifiers(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    from verifiers.legacy.types import RolloutOutput
    from verifiers.legacy.utils.save_utils import save_outputs

    def output(example: int, reward: float, **more: Any) -> RolloutOutput:
        return RolloutOutput(
            example_id=example,
            prompt=[{"role": "user", "content": f"question {example}"}],
            completion=[{"role": "assistant", "content": "an answer"}],
            reward=reward,
            timing={"start_time": 5.0, "generation": {"start": 6.0, "end": 7.5}},
            is_completed=True,
            is_truncated=False,
            metrics={"right": reward},
            **more,
        )

    folder = tmp_path / "evals" / "0f3a"
    usage = {"input_tokens": 10.0, "output_tokens": 5.0}
    failed = {"error": "TimeoutError", "message": "too slow", "error_chain_repr": "", "error_chain_str": ""}
    outputs = [output(0, 1.0, token_usage=usage), output(0, float("nan")), output(1, 0.5, error=failed)]
    save_outputs(outputs, folder)
    (folder / "metadata.json").write_text(json.dumps({"env_id": "gsm", "model": "m"}))
    ask = Asked(tmp_path / "evals")
    (row,) = (await ask("runs"))["runs"]
    assert (row["model"], row["environments"]) == ("m", ["gsm"])
    rows = (await ask("runs/0f3a/rollouts", kind="evaluation", step=0))["rollouts"]
    assert [one["group_id"] for one in rows] == ["gsm/0", "gsm/0", "gsm/1"]
    assert [one["reward"] for one in rows] == [1.0, None, 0.5]
    assert (rows[0]["tokens"], rows[0]["completion_tokens"], rows[0]["duration_s"]) == (15, 5, 1.5)
    assert (rows[2]["outcome"], rows[2]["error"]) == (
        {"state": "failed", "step": -1, "reason": "TimeoutError"},
        "TimeoutError: too slow",
    )


def write_completions(folder: Path, step: int) -> None:
    """As `GRPOTrainer.log` does with `log_completions`."""
    pandas = pytest.importorskip("pandas")
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "step": [step] * 4,
        "prompt": ["Sort: Ida, Tom"] * 2 + ["Sort: Uma, Bo"] * 2,
        "completion": ["Ida\nTom", "Tom\nIda", "Bo\nUma", "Bo\nUma"],
        "right": [1.0, 0.0, 1.0, 1.0],
        "short": [0.5, 0.5, None, 0.5],
        "solution": ["Ida, Tom"] * 2 + ["Bo, Uma"] * 2,
        "advantage": [0.5, -0.5, 0.0, 0.0],
    }
    pandas.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


async def test_completions_of_trl_stand_beside_own_runs(tmp_path: Path) -> None:
    for step in (5, 10):
        write_completions(tmp_path / "grpo" / "completions", step)
    MadeRun(folder=tmp_path / "own", steps=3).write_all()
    ask = Asked(tmp_path)
    rows = {row["id"]: row for row in (await ask("runs"))["runs"]}
    assert set(rows) == {"own", "grpo"}
    assert rows["own"]["differing"] == {}  # from what no settings are known of
    assert (rows["grpo"]["steps"], rows["grpo"]["tags"], rows["grpo"]["reward"]) == (10, ["TRL"], 1.125)
    curves = await ask("runs/grpo/curves", names="reward/mean,group/zero_spread_share")
    assert curves["columns"]["step"] == [5, 10]
    assert curves["columns"]["group/zero_spread_share"] == [0.0, 0.0]
    detail = await ask("runs/grpo")
    assert detail["steps"] == [5, 10]
    assert "no tokens" in detail["note"]
    table = (await ask("runs/grpo/rollouts", step=10))["rollouts"]
    assert [one["group_id"] for one in table] == [table[0]["group_id"]] * 2 + [table[2]["group_id"]] * 2
    assert [one["task_id"][:17] for one in table] == ["Sort: Ida, Tom (1"] * 2 + ["Sort: Uma, Bo (68"] * 2
    assert [one["reward"] for one in table] == [1.5, 0.5, 1.0, 1.5]
    assert [one["advantage"] for one in table] == [0.5, -0.5, 0.0, 0.0]
    record = await ask("runs/grpo/rollout", step=10, id=table[1]["rollout_id"])
    assert record["messages"] == [
        {"role": "user", "content": "Sort: Ida, Tom"},
        {"role": "assistant", "content": "Tom\nIda"},
    ]
    assert record["columns"] == {"solution": "Ida, Tom"}


async def test_tables_that_come_later_are_seen_and_one_of_another_kind_is_told(tmp_path: Path) -> None:
    tables = tmp_path / "completions"
    write_completions(tables, 5)
    ask = Asked(tables)
    assert (await ask(f"runs/{tmp_path.name}"))["steps"] == [5]
    write_completions(tables, 10)
    (tables / "completions_00015.parquet").write_bytes(b"PAR1")
    detail = await ask(f"runs/{tmp_path.name}")
    assert detail["steps"] == [5, 10]
    assert "1 of its lines or tables could not be read" in detail["note"]


async def test_a_large_file_is_taken_in_little_by_little_by_who_looks_at_it(tmp_path: Path) -> None:
    write_traces(tmp_path / "large", [1.0] * 40)
    write_completions(tmp_path / "tables" / "completions", 5)
    write_completions(tmp_path / "tables" / "completions", 10)
    MadeRun(folder=tmp_path / "own", steps=3).write_all()
    ask = Asked(tmp_path)

    async def seen(run: str, kind: str, step: int) -> int:
        return len((await ask(f"runs/{run}/rollouts", kind=kind, step=step))["rollouts"])

    with patch("tailrace.dashboard.application._TAKE_IN_S", -1.0):  # time for a line or a table
        for _ in range(3):
            await ask("runs/own")
        assert [await seen("large", "evaluation", 0) for _ in range(3)] == [1, 2, 3]
        assert "So far 9 % of it were read" in (await ask("runs/large"))["note"]
        assert [await seen("tables", "step", 10) for _ in range(2)] == [0, 4]
        await ask("runs")
    assert await seen("large", "evaluation", 0) == 40
    assert "So far" not in (await ask("runs/large"))["note"]


async def test_while_a_file_is_taken_in_its_pages_and_all_others_answer(tmp_path: Path) -> None:
    write_traces(tmp_path / "a", [1.0])
    goes_on, is_at_it = threading.Event(), threading.Event()

    def slow(line: bytes, number: int, environment: str) -> list[Placed]:
        is_at_it.set()
        assert goes_on.wait(60)
        return placed_of_line(line, number, environment)

    ask = Asked(tmp_path)
    with patch("tailrace.dashboard.others.converted.placed_of_line", slow):
        first = asyncio.create_task(ask("runs"))
        assert await asyncio.to_thread(is_at_it.wait, 60)
        assert (await ask("runs"))["runs"][0]["held_out"] is None
        assert (await ask("runs/a"))["row"]["state"] == "read"
        goes_on.set()
        assert (await first)["runs"][0]["held_out"] == 0.75


async def test_what_is_left_out_of_a_file_that_is_too_large_is_said(tmp_path: Path) -> None:
    with patch("tailrace.dashboard.others.converted._MOST_BYTES", 3_000):
        write_traces(tmp_path / "lines", [1.0] * 40)
        for step in (5, 10):
            write_completions(tmp_path / "tables" / "completions", step)
        ask = Asked(tmp_path)
        lines = await ask("runs/lines")
        assert "What stands behind its first" in lines["note"]
        assert "of its tables are left out" in (await ask("runs/tables"))["note"]
        assert (await ask("runs/lines"))["note"] == lines["note"]


def test_what_is_nothing_of_these_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    assert find_sources(tmp_path) == []  # without verifiers' metadata.json beside it
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(DataError, match=r"nothing to show at .*notes.txt"):
        require_folder(tmp_path / "notes.txt")


def test_the_files_themselves_are_left_alone_and_what_was_made_goes(tmp_path: Path) -> None:
    write_completions(tmp_path / "completions", 5)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    others = OthersFiles()
    (source,) = find_sources(tmp_path)
    folder = others.folder(source)
    others.update([folder])
    assert (folder / "metrics.jsonl").is_file()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    del others
    assert not folder.exists()
