"""`tailrace serve`, and runs that use what it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import httpx
import pytest
import zmq
import zmq.asyncio

from tailrace.cli import main
from tailrace.config.serving import load_serve_settings
from tailrace.errors import SettingsError
from tailrace.free_ports import free_port
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.messages import WelcomeReply
from tailrace.records import ModelStateDictRef
from tailrace.reporting.summary import read_summary
from tailrace.run.serving import serve
from tailrace.transport.keys import CurveKeys, read_keys, write_keys
from tailrace.transport.owned_folders import shared_memory_folder
from tests.run.runs import PATIENCE_S, ROLES, WITHOUT_MODEL, command, records
from tests.run.served import SMALL, address_of, http_address_of, refusal, serving

STEPS_WITH_NEWEST_WEIGHTS = ("--max_steps", "4", "--scheduling.max_staleness", "0")
"""Nothing is admitted before every generator holds what the trainer published last."""


def test_a_run_trains_with_generators_that_run_already_and_so_does_the_next(tmp_path: Path) -> None:
    with serving("--address", "tcp://127.0.0.1:0") as first, serving("--address", "tcp://127.0.0.1:0") as second:
        addresses = f"{address_of(first)},{address_of(second)}"
        for name in ("run", "next"):
            with command(tmp_path, *STEPS_WITH_NEWEST_WEIGHTS, "--generator.connect", addresses, name=name) as run:
                status, printed = run.wait()
                assert (status, run.leftovers()) == (0, []), printed
            newest = records(run.folder / "metrics.jsonl")[-1]
            assert newest["generator/generator-0/policy_version"] >= 3
            assert newest["generator/generator-1/policy_version"] >= 3
            assert {path.name for path in (run.folder / "logs").iterdir()} == {"orchestrator.log", "trainer.log"}
            summary = read_summary(run.folder)
            assert summary.staleness_max == 0
            assert (summary.cpu_s, summary.tokens_per_cpu_s) == (None, None)  # the services' is not known here
            assert summary.ledger.by_state["trained"] == 16
        first.send_signal(signal.SIGTERM)
        second.send_signal(signal.SIGINT)
        assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (143, 130)


async def test_a_second_signal_ends_a_service_at_once_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, list[Path]]] = []
    serving_here, left = asyncio.Event(), f"tailrace-run-{os.getpid()}-*"

    def end(status: int) -> None:
        """In place of the end of this process: what was left at that moment."""
        ended.append((status, list(shared_memory_folder().glob(left))))

    monkeypatch.setattr(os, "_exit", end)
    settings = load_serve_settings("bundled:quickstart", [*SMALL])
    service = asyncio.create_task(serve(settings, "tcp://127.0.0.1:0", None, lambda said: serving_here.set()))
    async with asyncio.timeout(PATIENCE_S):
        await serving_here.wait()
        await asyncio.sleep(0)  # it says so before it waits for signals
        assert list(shared_memory_folder().glob(left)) != []
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert ended == [(143, [])]
        assert await service == 130  # of the first, where the second ended nothing


class Served(NamedTuple):
    """A service that several tests ask."""

    address: str
    key: Path
    http: str = ""


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that answers HTTP clients, too, by the key."""
    key = tmp_path_factory.mktemp("answering") / "key"
    with serving("--address", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--http-key", str(key)) as process:
        yield Served(address_of(process), key, http_address_of(process))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for runs that have the key."""
    key = tmp_path_factory.mktemp("locked") / "key.json"
    with serving("--address", "tcp://127.0.0.1:0", "--key", str(key)) as process:
        yield Served(address_of(process), key)


def test_http_clients_are_answered_as_they_ask_and_by_their_key(answering: Served) -> None:
    assert answering.key.stat().st_mode & 0o077 == 0
    body = {"model": "any", "messages": [{"role": "user", "content": "Sort: b, a"}], "seed": 5, "max_tokens": 24}
    with httpx.Client(base_url=answering.http, timeout=PATIENCE_S) as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 401
        client.headers["authorization"] = f"Bearer {answering.key.read_text().strip()}"
        answers = [client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
        greedy = client.post("/v1/chat/completions", json=body | {"temperature": 0, "top_p": 0.5})
        too_long = client.post("/inference/v1/generate", json={"token_ids": [5] * 600})
        models = client.get("/v1/models").json()["data"]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] > 0
    assert (greedy.status_code, too_long.status_code) == (200, 400), greedy.text
    assert [(model["id"], model["max_model_len"]) for model in models] == [("bundled:quickstart", 512)]


async def test_http_clients_are_answered_once_a_run_began_with_another_generator(answering: Served) -> None:
    headers = {"authorization": f"Bearer {answering.key.read_text().strip()}"}
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "seed": 1}}
    async with httpx.AsyncClient(base_url=answering.http, headers=headers, timeout=PATIENCE_S) as client:
        first = await client.post("/inference/v1/generate", json=body)
        run = GeneratorClient(answering.address, lend=no_weights)
        assert (await run.hello("run")).statistics.sampled_tokens_total == 0
        second = await client.post("/inference/v1/generate", json=body)
        await run.leave()
    assert [answer.status_code for answer in (first, second)] == [200, 200], second.text
    assert second.json()["choices"] == first.json()["choices"]


async def test_a_service_whose_output_nobody_reads_serves_all_the_same() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with serving("--address", address) as process:
        assert process.stdout is not None
        process.stdout.close()
        run = GeneratorClient(address)
        assert (await run.hello("run")).model.name == "bundled:quickstart"
        await run.leave()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 143


def no_weights(ref: ModelStateDictRef, held: str) -> NoReturn:
    raise AssertionError("the run ends before it sends any")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--http-key", "file"), "--http-key is about HTTP"),
        (("--gateway.max_body_mb", "1"), "say where to listen"),
        (("--http", "127.0.0.1:0", "--gateway.port", "1"), "--http does"),
        (("--http", "127.0.0.1:0", "--http-key", "/"), "--http-key: cannot read the key file /: Is a directory"),
        (("--http", "127.0.0.1:0", "--http-key", "/dev/null"), "--http-key: /dev/null holds no key"),
        (("--http", "127.0.0.1:0", "--http-key", "/dev/null/key"), "cannot write the key file /dev/null/key"),
        (("--http", "127.0.0.1:0", "--http-key", sys.executable), "holds no key: letters, digits"),
    ],
)
def test_settings_of_http_without_it_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    assert main(["serve", "bundled:quickstart", *SMALL, *arguments]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_port_of_http_that_is_taken_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "bundled:quickstart", *SMALL, "--http", f"127.0.0.1:{port}"]) == 2
    printed = capsys.readouterr()
    assert f"gateway.port = {port}: cannot listen there (Address already" in " ".join(printed.err.split())
    assert printed.out == ""


def test_a_service_that_is_refused_says_why_and_ends() -> None:
    with serving("--http", "8000") as process:
        status, printed = refusal(process)
    assert (status, "write HOST:PORT" in printed) == (2, True), printed


def test_keys_let_in_who_has_them(locked: Served, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    write_keys(other, "test")
    connect = ("--generator.connect", locked.address)
    assert locked.key.stat().st_mode & 0o077 == 0
    for name, wrong in (("none", ()), ("other", ("--generator.connect_key", str(other)))):
        with command(tmp_path, *WITHOUT_MODEL, "--max_steps", "1", *connect, *wrong, name=name) as run:
            status, printed = run.wait()
            assert (status, "generator.connect_key: " in printed) == (2, True), printed
    own = ("--generator.connect_key", str(locked.key))
    with command(tmp_path, "--max_steps", "1", *connect, *own, name="right") as run:
        status, printed = run.wait()
        assert status == 0, printed


def test_a_key_file_that_is_not_there_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    connect = ("--generator.connect", "tcp://127.0.0.1:1", "--generator.connect_key", "none.key")
    assert main(["train", "quickstart", "--max_steps", "1", *connect]) == 2
    assert "generator.connect_key: cannot read the key file none.key" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


async def test_only_the_client_whose_key_the_server_knows_is_let_in(locked: Served) -> None:
    keys = read_keys(locked.key, "test")
    stranger = CurveKeys(keys.server_public, keys.server_secret, CurveKeys.make().client_public, keys.client_secret)
    client = GeneratorClient(locked.address, keys=stranger)
    with pytest.raises(SettingsError, match=r"generator\.connect_key"):
        await client.hello("run")
    await client.leave()


async def test_one_run_at_a_time_and_another_protocol_is_refused() -> None:
    with serving("--address", "tcp://127.0.0.1:0") as process:
        address = address_of(process)
        first, second = GeneratorClient(address), GeneratorClient(address)
        assert (await first.hello("run a")).model.name == "bundled:quickstart"
        with pytest.raises(SettingsError, match="in use by another run"):
            await second.hello("run b")
        await first.leave()
        assert (await _let_in(second, "run b")).statistics.policy_version == 0
        await second.leave()
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.connect(address)
        for message in (b"\x81\xa4type\xa4what", b"nonsense"):
            await socket.send(message)
            assert b"CorruptData" in await socket.recv()
        await socket.send(b"\x83\xa4type\xa9HelloCall\xa7call_id\x00\xa8protocol\x63")
        answer = await socket.recv()
        assert b"SettingsError" in answer
        assert b"version 99" in answer
        socket.close(linger=0)


async def _let_in(client: GeneratorClient, epoch: str) -> WelcomeReply:
    """Ask until the server has read that the run before left: that came over another connection."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await client.hello(epoch)
            except SettingsError as refused:
                if "in use by another run" not in str(refused):
                    raise


def test_an_address_in_use_or_open_to_others_is_refused_by_its_setting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serving("--address", f"tcp://127.0.0.1:{taken.getsockname()[1]}") as process:
            status, printed = refusal(process)
            assert (status, "--address" in printed, "in use" in printed) == (2, True, True), printed
    with serving("--address", "tcp://0.0.0.0:5757") as process:
        status, printed = refusal(process)
        assert (status, "--address = tcp://0.0.0.0:5757" in printed, "--key" in printed) == (2, True, True), printed


@pytest.mark.parametrize("roles", ROLES)
def test_a_run_tells_that_nobody_answers(tmp_path: Path, roles: tuple[str, ...]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    nowhere = ("--generator.connect", address, "--generator.connect_wait_s", "1")
    with command(tmp_path, *roles, "--max_steps", "1", *nowhere) as run:
        status, printed = run.wait()
    assert (status, f"generator.connect: no generator answers at {address}" in printed) == (1, True), printed


def test_generators_of_other_hosts_are_sent_what_changed(tmp_path: Path) -> None:
    rounded, slowly = ("--model.dtype", "bfloat16"), ("--trainer.learning_rate", "1e-7")
    with serving("--address", "tcp://127.0.0.1:0", *rounded) as process:
        connect = ("--generator.connect", address_of(process))
        with command(tmp_path, *STEPS_WITH_NEWEST_WEIGHTS, *connect, *rounded, *slowly) as run:
            status, printed = run.wait()
            assert (status, run.leftovers()) == (0, []), printed
    told = [record for record in records(run.folder / "metrics.jsonl") if "weights/sent_bytes" in record]
    assert told
    for record in told:  # all weights were sent before the first rollout
        assert record["weights/whole_sends"] == 0
        assert 0 < record["weights/changed_share"] < 0.4
        assert 0 < record["weights/sent_share"] < 0.4
