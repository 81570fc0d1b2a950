from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import httpx
import pytest

from tailrace.dashboard.access import Access, Guarded
from tailrace.dashboard.application import Dashboard
from tests.support.made_runs import MadeRun

LOCAL = "http://127.0.0.1:8420"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "runs"
    MadeRun(folder=folder / "one", steps=6, settings={"seed": 4, "trainer": {"threads": 2}}).write_all()
    (folder.parent / "secret.txt").write_text("secret")
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside" / "config.toml").write_text("name = 'outside'")
    return folder


@pytest.fixture
def client(runs: Path) -> Iterator[httpx.AsyncClient]:
    app = Guarded(Dashboard(runs).application(), Access(None))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL)


async def get(client: httpx.AsyncClient, path: str) -> Any:
    response = await client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def test_curves_are_sent_once_and_then_only_what_is_new(client: httpx.AsyncClient) -> None:
    whole = await get(client, "/api/runs/one/curves?names=reward/mean,reward/*/mean&all=1")
    assert whole["count"] == 6
    assert set(whole["columns"]) == {"step", "wall_s", "reward/mean", "reward/sort/mean"}
    assert whole["columns"]["step"] == [1, 2, 3, 4, 5, 6]
    assert "training/kl" in whole["names"]
    rest = await get(client, f"/api/runs/one/curves?names=reward/mean&after=4&generation={whole['generation']}")
    assert rest["columns"]["reward/mean"] == whole["columns"]["reward/mean"][4:]
    other = await get(client, "/api/runs/one/curves?names=reward/mean&after=4&generation=7")
    assert (other["after"], len(other["columns"]["reward/mean"])) == (0, 6)


async def test_rollouts_groups_and_one_of_them(client: httpx.AsyncClient) -> None:
    table = await get(client, "/api/runs/one/rollouts?step=3")
    assert len(table["rollouts"]) == 12
    assert "messages" not in table["rollouts"][0]
    one = table["rollouts"][1]
    record = (await client.get("/api/runs/one/rollout", params={"step": 3, "id": one["rollout_id"]})).json()
    assert record["messages"][1] == {"role": "assistant", "content": "Ida\nPiper\nTom"}
    assert record["task"]["answer"] == ["Ida", "Tom"]
    failed = table["rollouts"][-1]
    assert (failed["reward"], failed["outcome"]["state"], failed["error"][:14]) == (None, "failed", "RolloutTimeout")


async def test_a_text_is_found_wherever_it_stands(client: httpx.AsyncClient) -> None:
    found = await get(client, "/api/runs/one/search?text=PIPER (5.7)")
    assert [(match["kind"], match["step"]) for match in found["matches"]] == [("step", 5)]
    assert (found["left"], found["next"]) == (0, "")


async def test_a_search_begins_with_what_is_viewed_and_goes_on_where_it_ended(client: httpx.AsyncClient) -> None:
    searched, left, begin = [], [], ""
    with patch("tailrace.dashboard.application._SEARCH_S", -1.0):  # time for one file
        while not searched or begin:
            found = await get(client, f"/api/runs/one/search?text=piper&kind=step&step=3&from={begin}")
            searched.append({(match["kind"], match["step"]) for match in found["matches"]})
            left.append(found["left"])
            begin = found["next"]
    in_order = [("step", 3), ("evaluation", 6), *(("step", step) for step in (6, 5, 4, 2, 1))]
    assert searched == [{file} for file in in_order]
    assert left == [6, 5, 4, 3, 2, 1, 0]


async def test_rollouts_are_found_in_all_steps_by_outcome_reward_and_length(client: httpx.AsyncClient) -> None:
    failed = await get(client, "/api/runs/one/search?outcome=failed")
    assert {(match["kind"], match["step"]) for match in failed["matches"]} == {("step", step) for step in range(1, 7)}
    best = await get(client, "/api/runs/one/search?reward=0.95..&environment=sort")
    assert best["matches"]
    assert all(match["reward"] == 1.0 for match in best["matches"])
    both = await get(client, "/api/runs/one/search?text=piper&outcome=timeout")
    assert len(both["matches"]) == 6
    assert (await get(client, "/api/runs/one/search?length=13.."))["matches"] == []


async def test_of_a_large_file_the_rest_is_counted_and_each_rollout_is_there(tmp_path: Path) -> None:
    run = MadeRun(folder=tmp_path / "large")
    run.write_steps(1)
    ids = run.write_large_file(1, 8_195)
    app = Dashboard(tmp_path).application()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
        table = await get(client, "/api/runs/large/rollouts?step=1")
        assert (len(table["rollouts"]), table["left_out"]) == (8_192, 3)
        for rollout_id in (ids[0], ids[-1]):
            found = await client.get("/api/runs/large/rollout", params={"step": 1, "id": rollout_id})
            assert found.json()["rollout_id"] == rollout_id
        assert (await client.get("/api/runs/large/rollout", params={"step": 1, "id": "none"})).status_code == 404
        found = await get(client, "/api/runs/large/search?text=piper")
        assert (len(found["matches"]), found["left_out"]) == (8_192, 3)


async def test_what_is_not_there_is_told_and_no_error(client: httpx.AsyncClient) -> None:
    for path in (
        "/api/runs/none",
        "/api/runs/one/rollout?step=3&id=none",
        "/api/runs/one/rollouts?step=x",
        "/api/runs/one/rollouts?kind=../..&step=1",
        "/api/runs/one/search?text=",
        "/api/runs/one/schedule?from=x",
    ):
        response = await client.get(path)
        assert response.status_code == 404, path
        assert response.json()["error"]
    assert (await get(client, "/api/runs/one/rollouts?step=99"))["rollouts"] == []


async def test_a_run_that_writes_no_trace_says_so(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "untraced", settings={"observability": {"trace_mb": 0.0}})
    MadeRun(folder=tmp_path / "to come")
    app = Guarded(Dashboard(tmp_path).application(), Access(None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
        assert (await get(client, "/api/runs/to come"))["is_traced"]
        assert not (await get(client, "/api/runs/untraced"))["is_traced"]
        made.write_steps(1)
        made.write_trace()  # of a start before, say
        assert (await get(client, "/api/runs/untraced"))["is_traced"]


async def test_a_folder_whose_name_is_no_text_is_shown_as_any_other(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"th\xe9")
    MadeRun(folder=root / os.fsdecode(b"caf\xe9"), settings={"name": "own"}).write_steps(1)
    (root / os.fsdecode(b"caf\xe9") / "checkpoints" / os.fsdecode(b"step_\xe9")).mkdir(parents=True)
    traces = root / os.fsdecode(b"trac\xe9s") / "traces.jsonl"
    traces.parent.mkdir()
    traces.write_text("{}\n")
    for folder, runs in ((root, ["caf\\xe9", "trac\\xe9s"]), (root / os.fsdecode(b"caf\xe9"), ["caf\\xe9"])):
        app = Dashboard(folder).application()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
            table = await get(client, "/api/runs")
            assert [row["id"] for row in table["runs"]] == runs
            for run in runs:
                assert (await get(client, f"/api/runs/{quote(run)}"))["row"]["id"] == run
            assert (await client.get("/api/runs/none")).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2Foutside",
        "/api/runs/..%2f..%2fetc/settings",
        "/api/runs/%2e%2e/settings",
        "/api/runs/one%2F..%2F..%2Foutside/settings",
        "/..%2f..%2f..%2fapplication.py",
        "/../application.py",
        "/%2e%2e/application.py",
        "/vendor/..%2f..%2fserving.py",
    ],
)
async def test_no_path_leads_out_of_the_runs_or_the_page(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 404
    assert "secret" not in response.text
    assert "import" not in response.text


async def test_it_only_reads(client: httpx.AsyncClient, runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for path in ("curves", "events", "advice", "settings", "waterfall", "schedule", "rollouts?step=1"):
        await get(client, f"/api/runs/one/{path}")
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        origin = {"origin": LOCAL, "content-type": "application/json"}
        assert (await client.request(method, "/api/runs/one", headers=origin)).status_code in (404, 405)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


async def test_what_is_wrong_is_seen_over_as_many_steps_whatever_evaluations_lie_between(tmp_path: Path) -> None:
    lines = []
    for step in range(1, 41):
        entropy = 0.5 if step == 1 else 0.001
        lines.append(f'{{"step":{step},"policy/version":{step},"reward/mean":0.2,"training/entropy":{entropy}}}')
        lines.append(f'{{"step":{step},"eval/sort/reward/mean":0.2}}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    app = Dashboard(tmp_path).application()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
        assert [one["rule"] for one in await get(client, "/api/runs/run/advice")] == ["entropy_collapse"]


async def test_settings_are_compared_with_the_recipe(client: httpx.AsyncClient) -> None:
    page = await get(client, "/api/runs/one/settings")
    assert page["changes"] == [
        {"name": "seed", "recipe": "0", "run": "4"},
        {"name": "trainer.threads", "recipe": "1", "run": "2"},  # which a resume may have otherwise
    ]
    assert 'name = "one"' in page["text"]


async def test_settings_are_shown_without_keys_of_servers(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer sesame", "X-Key": "$MCP_KEY"}
    environment: dict[str, Any] = {"name": "mcp", "args": {"url": "https://host/mcp", "headers": headers}}
    for name, unknown in (("run", {}), ("older", {"no_such_setting": 1})):
        folder = tmp_path / name
        MadeRun(folder=folder, settings={"environments": [environment], **unknown})
        recipe = (folder / "config.toml").read_text().replace("sesame", "mellon").replace("$MCP_KEY", "$OTHER")
        (folder / "recipe.toml").write_text(recipe)
    app = Dashboard(tmp_path).application()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
        pages = [await get(client, f"/api/runs/{name}/settings") for name in ("run", "older")]
    for page in pages:
        prefix = "environments.0.args.headers"
        assert page["changes"] == [
            {"name": f"{prefix}.Authorization", "recipe": "***", "run": "***"},
            {"name": f"{prefix}.X-Key", "recipe": "$OTHER", "run": "$MCP_KEY"},
        ]
        assert "sesame" not in page["text"]
        assert "https://host/mcp" in page["text"]


async def test_a_page_may_run_only_what_it_ships(client: httpx.AsyncClient) -> None:
    for path in ("/", "/main.js", "/api/runs"):
        response = await client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_another_name_for_this_machine_is_refused(client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/runs", headers={"host": "evil.example"})).status_code == 421
    assert (await client.get("/api/runs", headers={"host": "localhost:8420"})).status_code == 200


async def test_other_pages_cannot_ask_the_policy(client: httpx.AsyncClient) -> None:
    body = '{"messages": []}'
    for headers in (
        {"origin": "http://evil.example", "content-type": "application/json"},
        {"content-type": "application/json"},
        {"origin": LOCAL, "content-type": "text/plain"},
    ):
        assert (await client.post("/api/runs/one/chat", content=body, headers=headers)).status_code == 403


async def test_without_a_policy_that_answers_nobody_is_asked(client: httpx.AsyncClient, runs: Path) -> None:
    told = runs / "one" / "gateway.json"
    told.write_text('{"url": "http://127.0.0.1:1", "key": "k", "policy_key": "p"}')  # of a run that was killed
    try:
        assert (await get(client, "/api/runs/one"))["chats"] == {}
        headers = {"origin": LOCAL, "content-type": "application/json"}
        for name in ("running policy", "served model", ""):
            asked = await client.post("/api/runs/one/chat", params={"with": name}, content="{}", headers=headers)
            assert (asked.status_code, "answers" in asked.json()["error"]) == (404, True)
    finally:
        told.unlink()


async def test_elsewhere_only_who_has_the_link_is_let_in(runs: Path) -> None:
    access = Access.to_address("0.0.0.0")
    assert access.token is not None
    app = Guarded(Dashboard(runs).application(), access)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host.example:8420") as client:
        for path in ("/", "/main.js", "/api/runs", "/api/runs?token=wrong", "/?token="):
            assert (await client.get(path)).status_code == 401
        entered = await client.get(f"http://host.example:8420//evil.example/?token={access.token}")
        assert (entered.status_code, entered.headers["location"]) == (303, "/evil.example/")
        assert "HttpOnly" in entered.headers["set-cookie"]
        assert (await client.get("/api/runs")).status_code == 200  # by the cookie


async def test_long_texts_are_cut_and_there_for_the_asking(tmp_path: Path) -> None:
    text = "long " * 200_000

    def conversation(step: int, number: int) -> list[Any]:
        return [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]

    MadeRun(folder=tmp_path / "long", groups=1, group_size=2, conversation=conversation).write_steps(1)
    app = Dashboard(tmp_path).application()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
        table = await get(client, "/api/runs/long/rollouts?step=1")
        named = {"step": 1, "id": table["rollouts"][0]["rollout_id"]}
        response = await client.get("/api/runs/long/rollout", params=named)
        assert len(response.content) < 60_000
        assert response.json()["messages"][1]["content"]["characters"] == len(text)
        whole = await client.get("/api/runs/long/text", params={**named, "at": "messages/1/content"})
        assert whole.json() == text
        nothing = await client.get("/api/runs/long/text", params={**named, "at": "messages/9/content"})
        assert nothing.status_code == 422
