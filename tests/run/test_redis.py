"""Runs whose trainer is reached through Redis alone: on one machine, on two, and while Redis has troubles."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tailrace.cli import main
from tailrace.errors import SettingsError
from tailrace.free_ports import free_port
from tailrace.records import RunStatus
from tailrace.reporting.summary import read_summary
from tailrace.transport.redis import connection
from tailrace.transport.redis.server import RedisServer
from tests.run.runs import (
    IMPORTS,
    PATIENCE_S,
    RESUMED,
    ROLES,
    TINY,
    WITHOUT_MODEL,
    command,
    environment,
    records,
    tiny_settings,
)
from tests.run.test_trainer_restarts import FRESH, kill_trainer, require_one_history, wait_until_it_trains
from tests.support.faults import Fault
from tests.support.redis_servers import TlsServer, ask, make_certificates, needs_openssl, needs_redis, redis_server
from tests.transport.redis.test_tls import RIGHTS

OVER_REDIS = ("--transport.batches", "redis")
BRIEFLY_NAMED = """
import functools, sys
from tailrace.cli import main
from tailrace.run import host_transports
host_transports.own_run_name = functools.partial(host_transports.own_run_name, lease_s=3.0)
sys.exit(main(sys.argv[2:]))  # the first is the command that this stands for
"""
LONG_RUN = (*FRESH, "--max_steps", "30", "--trainer.checkpoint_every_steps", "4")


@needs_redis
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("roles", ROLES)
def test_a_run_with_a_redis_of_its_own_trains_and_leaves_nothing(
    tmp_path: Path, ranks: str, roles: tuple[str, ...]
) -> None:
    chosen = ("--trainer.ranks", ranks, "--trainer.collective_timeout_s", "60", "--max_steps", "2")
    with command(tmp_path, *roles, *chosen, *OVER_REDIS, "--transport.redis.start", "true") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    assert [record["step"] for record in records(run.folder / "metrics.jsonl")] == [1, 2]
    assert "requirepass" not in printed


@needs_openssl
@needs_redis
@pytest.mark.parametrize("roles", ROLES)
def test_a_run_by_tls_with_an_authority_and_a_user_trains_and_another_authority_is_refused(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    server = TlsServer(tmp_path / "redis")
    server.start()
    try:
        ask(server, "ACL", "SETUSER", "trainer", "on", ">p@ss", *RIGHTS)
        url = f"rediss://trainer@{server.address(server.authority)}"
        secret, through = {"TAILRACE_REDIS_PASSWORD": "p@ss"}, (*roles, *OVER_REDIS, "--transport.redis.url")
        with command(tmp_path, "--max_steps", "2", *through, url, variables=secret) as run:
            status, printed = run.wait()
            assert (status, run.leftovers()) == (0, []), printed
        assert [record["step"] for record in records(run.folder / "metrics.jsonl")] == [1, 2]
        assert "p@ss" not in printed + (run.folder / "config.toml").read_text()
        wrong = f"rediss://trainer@{server.address(make_certificates(tmp_path / 'other'))}"
        with command(tmp_path, *through, wrong, variables=secret, name="other") as refused:
            status, printed = refused.wait()
        assert status == 2, printed
        assert "certificate verify failed" in printed
    finally:
        server.kill()


@needs_redis
@pytest.mark.parametrize("roles", ROLES)
def test_a_run_goes_on_though_redis_forgets_all_and_its_trainer_is_killed(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    fault = Fault(tmp_path / "fault", "trainer", "killed", "trainer step", times=3)
    fault.folder.mkdir()
    chosen = (*LONG_RUN, *roles, *OVER_REDIS, "--transport.redis.url")
    with (
        redis_server(tmp_path / "redis") as server,
        command(tmp_path, *chosen, server.url, variables=fault.variables) as run,
    ):
        troubles = (partial(ask, server, "FLUSHALL"), partial(restart, server), partial(kill_trainer, run))
        for number, trouble in enumerate(troubles):
            wait_until_it_trains(run, roles, fault, steps=3 * (number + 1), number=number)
            trouble()
            fault.place_mark(f"struck-{number}", "")
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    require_one_history(run, 30)


def restart(server: RedisServer) -> None:
    server.kill()
    server.start()


@pytest.mark.long
@needs_redis
@pytest.mark.parametrize("away_s", [0.5, 5.0, 20.0])
@pytest.mark.parametrize("bodies", ["streams", "files"])
def test_a_run_waits_for_redis(tmp_path: Path, away_s: float, bodies: str) -> None:
    with redis_server(tmp_path / "redis") as server:
        through = (*OVER_REDIS, "--transport.redis.url", server.url, "--transport.redis.bodies", bodies)
        with command(tmp_path, *LONG_RUN, *through) as run:
            run.wait_for_steps(5)
            server.kill()
            time.sleep(away_s)
            server.start()
            status, printed = run.wait()
            assert (status, run.leftovers()) == (0, []), printed
        assert ask(server, "KEYS", "tailrace:run:*:to:*") == []
    require_one_history(run, 30)


@needs_redis
def test_batches_that_are_kept_for_a_trainer_do_not_fill_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        ask(server, "CONFIG", "SET", "maxmemory", "6mb")
        through = (*OVER_REDIS, "--transport.redis.url", server.url, "--transport.redis.outage_s", "5")
        endless = ("--max_steps", "600", "--trainer.checkpoint_every_steps", "0")
        with command(tmp_path, *FRESH, *WITHOUT_MODEL, *endless, *through) as run:
            status, printed = run.wait()
        assert status == 0, printed


@needs_redis
@pytest.mark.parametrize("roles", ROLES)
def test_a_run_whose_redis_stays_away_fails_with_its_name(tmp_path: Path, roles: tuple[str, ...]) -> None:
    with redis_server(tmp_path / "redis") as server:
        through = (*OVER_REDIS, "--transport.redis.url", server.url, "--transport.redis.outage_s", "1")
        with command(tmp_path, *FRESH, *roles, "--max_steps", "10000", *through) as run:
            run.wait_for_steps(2)
            server.kill()
            status, printed = run.wait()
            assert (status, run.leftovers()) == (1, []), printed
    summary = read_summary(run.folder)
    assert summary.status is RunStatus.FAILED
    assert "was away for 1 s (transport.redis.outage_s)" in summary.reason
    assert summary.ledger.balances


@needs_redis
@pytest.mark.parametrize("roles", ROLES)
def test_a_second_run_of_a_name_is_refused_and_the_first_goes_on(tmp_path: Path, roles: tuple[str, ...]) -> None:
    through = (*FRESH, *roles, "--max_steps", "10000", *OVER_REDIS, "--transport.redis.url")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with redis_server(tmp_path / "redis") as server, command(tmp_path, *through, server.url) as first:
        first.wait_for_steps(1)
        with command(elsewhere, *through, server.url) as second:
            status, printed = second.wait()
        assert (status, second.leftovers()) == (2, []), printed
        said = " ".join(printed.split())
        assert "another run called 'run' in Redis at" in said
        assert f"is going on (process {first.pid} on " in said
        first.wait_for_steps(len(records(first.folder / "metrics.jsonl")) + 3)
        first.process.send_signal(signal.SIGINT)
        status, printed = first.wait()
        assert (status, first.leftovers()) == (130, []), printed
        assert ask(server, "EXISTS", "tailrace:run:owner") == 0
    steps = [record["step"] for record in records(first.folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert "lost" not in printed


@needs_redis
@pytest.mark.parametrize("roles", ROLES)
def test_a_run_that_was_killed_is_resumed_under_its_name(tmp_path: Path, roles: tuple[str, ...]) -> None:
    with redis_server(tmp_path / "redis") as server:
        through = (*FRESH, *roles, *OVER_REDIS, "--transport.redis.url", server.url, "--max_steps")
        within = (sys.executable, "-c", BRIEFLY_NAMED)
        with command(tmp_path, *through, "10000", "--trainer.checkpoint_every_steps", "2", within=within) as killed:
            killed.wait_for_steps(3)
            killed.process.kill()
            killed.wait()
            assert ask(server, "EXISTS", "tailrace:run:owner") == 1
        with command(tmp_path, *through, "6", *RESUMED) as run:
            status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
        assert ask(server, "EXISTS", "tailrace:run:owner") == 0


@contextmanager
def machine(parent: Path, server: RedisServer) -> Iterator[subprocess.Popen[str]]:
    """`tailrace join`, which sees the folder of runs under a path of its own."""
    seen = parent / "elsewhere"
    (seen / "memory").mkdir(parents=True, exist_ok=True)
    runs = seen / "mounted"
    if not runs.exists():
        (parent / "runs").mkdir(exist_ok=True)
        runs.symlink_to(parent / "runs")
    process = subprocess.Popen(
        [Path(sys.executable).with_name("tailrace"), "join", "run", "--redis", server.url, "--runs", str(runs)],
        cwd=seen,
        env={**os.environ, **IMPORTS, "XDG_RUNTIME_DIR": str(seen / "memory")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


ELSEWHERE = ("--placement", "redis", "--transport.redis.url")


@needs_redis
def test_a_trainer_on_another_machine_shares_redis_and_a_folder_alone(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, machine(tmp_path, server) as other:
        with command(tmp_path, "--max_steps", "3", *ELSEWHERE, server.url) as run:
            status, printed = run.wait()
            assert (status, run.leftovers()) == (0, []), printed
        said, _ = other.communicate(timeout=PATIENCE_S)
        assert other.returncode == 0, said
        assert "has the trainer of the run run, life 0" in said
    assert [record["step"] for record in records(run.folder / "metrics.jsonl")] == [1, 2, 3]
    assert not list(run.folder.glob("tailrace-run-*"))
    assert Path(read_summary(run.folder).checkpoint_path).name == "step_000003"
    assert not read_summary(run.folder).checkpoint_path.startswith(str(tmp_path / "elsewhere"))


@needs_redis
def test_a_machine_ends_as_the_run_does_whose_trainer_it_had(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, machine(tmp_path, server) as other:
        with command(tmp_path, *FRESH, "--max_steps", "100000", *ELSEWHERE, server.url) as run:
            run.wait_for_steps(1)
            (run.folder / "preempt").touch()
            status, printed = run.wait()
            assert status == 75, printed
        said, _ = other.communicate(timeout=PATIENCE_S)
        assert other.returncode == 75, said


@needs_redis
def test_a_machine_that_is_lost_is_followed_by_another(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        hasty = (*LONG_RUN, *ELSEWHERE, server.url, "--restarts.silence_s", "4")
        with command(tmp_path, *hasty) as run:
            with machine(tmp_path, server):
                run.wait_for_steps(5)
            with machine(tmp_path, server) as other:
                status, printed = run.wait()
                assert (status, run.leftovers()) == (0, []), printed
                other.communicate(timeout=PATIENCE_S)
    require_one_history(run, 30)


@needs_redis
def test_deadlines_on_another_machine_are_those_of_the_run(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, machine(tmp_path, server) as other:
        deadlines = ("--restarts.silence_s", "4", "--transport.redis.outage_s", "2")
        with command(tmp_path, *FRESH, "--max_steps", "100000", *ELSEWHERE, server.url, *deadlines) as run:
            run.wait_for_steps(1)
            (trainer,) = psutil.Process(other.pid).children()
            trainer.suspend()
            run.wait_until(lambda: records(run.folder / "metrics.jsonl")[-1].get("training/restarts") == 1)
            log = (run.folder / "logs" / "orchestrator.log").read_text()
            (silent_s,) = re.findall(r"stopped, and gave no sign of life for (\d+) s", log)
            assert int(silent_s) < 60
            weights = "tailrace-run-*/model-state-dict-*"  # of the second life alone, once it has published
            run.wait_until(lambda: {path.name.split("-")[4] for path in run.folder.glob(weights)} == {"1"})
            server.kill()
            status, printed = run.wait()
            assert status == 1, printed
        said, _ = other.communicate(timeout=PATIENCE_S)
    assert other.returncode == 1, said
    assert "was away for 2 s" in " ".join(said.split())


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (OVER_REDIS, "neither is there"),
        ((*OVER_REDIS, "--transport.redis.start", "true", "--transport.redis.url", "redis://a"), "both are there"),
        (("--transport.redis.url", "redis://a"), "transport.redis is used by nothing"),
        (("--placement", "inline", *OVER_REDIS, "--transport.redis.start", "true"), "does not go with placement"),
        ((*ELSEWHERE, "redis://a", "--transport.batches", "files"), "does not reach a trainer elsewhere"),
        ((*ELSEWHERE, "redis://a", "--trainer.ranks", "2"), "trainer.ranks above 1 needs ranks that meet"),
        (("--placement", "redis", "--transport.redis.start", "true"), "only this machine reaches"),
        (("--transport.redis.outage_s", "0"), "greater than 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        tiny_settings(*overrides)


@needs_redis
def test_a_redis_that_refuses_ends_the_command_before_anything_starts(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        wrong = f"redis://:wrong@{server.url.rpartition('@')[2]}"
        with command(tmp_path, *OVER_REDIS, "--transport.redis.url", wrong) as run:
            status, printed = run.wait()
    assert status == 2, printed
    assert "refuses this user or password" in printed


def test_a_redis_that_does_not_answer_yet_is_no_bad_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    nobody = ("--transport.redis.url", f"redis://127.0.0.1:{free_port()}")
    assert main(["train", "quickstart", *TINY, *environment("words"), *OVER_REDIS, *nobody]) == 1
    assert "no Redis answers at redis://127.0.0.1:" in capsys.readouterr().err
