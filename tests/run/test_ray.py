"""Runs whose roles are on the nodes of a Ray cluster, each of which a test may lose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path

import psutil
import pytest

from tailrace.config.ray import RaySettings
from tailrace.errors import SettingsError
from tailrace.lifecycle.cluster import ClusterNode
from tailrace.lifecycle.ray_cluster import RayCluster
from tailrace.records import RunStatus
from tailrace.reporting.summary import read_summary
from tailrace.run.joined_serving import release
from tailrace.transport.owned_folders import shared_memory_folder
from tests.run.runs import PATIENCE_S, Command, command, records, rollouts, tiny_settings
from tests.run.test_joined_runs import joining, newest, require_nothing_lost
from tests.support.descendants import still_run
from tests.support.faults import Fault
from tests.support.ray_clusters import RayNodes, ray_cluster

pytestmark = pytest.mark.xdist_group("ray")

ENDS_S = 30.0
"""In which nothing of a run is left whose own process was killed."""
SAID_S = 30.0
"""In which a run says that it cannot begin."""
QUIET = ("--observability.report", "false", "--observability.live", "off")
SMALL_CHANGES = ("--model.dtype", "bfloat16", "--trainer.learning_rate", "1e-8")
LIGHT = (
    *("--placement", "tests.support.light_ray:LightRayLauncher", "--scheduling.max_staleness", "20"),
    *("--trainer.checkpoint_every_steps", "3", "--generator.router.report_every_s", "0.2", *QUIET),
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Three that have room for one role each, beside a head that has none."""
    with ray_cluster(0, 1, 1, 1) as cluster:
        yield cluster


def on(cluster: RayNodes, *overrides: str) -> tuple[str, ...]:
    return (*LIGHT, "--ray.address", cluster.address, *overrides)


def role(run: Command, name: str) -> psutil.Process:
    """The process of a role, known by the log that it writes; a raylet's worker started it.

    Its children write it too, and may have lower numbers.
    """
    log = str(run.folder / "logs" / f"{name}.log")
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        assert run.process.poll() is None, run.wait()
        writing = {process.pid: process for process in psutil.process_iter() if writes(process, log)}
        with contextlib.suppress(psutil.Error):  # one of them ends
            for process in writing.values():
                if process.ppid() not in writing:
                    return process
    raise AssertionError(f"no {name} runs")


def writes(process: psutil.Process, log: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(file.path == log for file in process.open_files())
    return False


def later_role(run: Command, name: str, ended: list[psutil.Process]) -> psutil.Process:
    """As `role`, of a life that has none of these processes, which may be about to end yet."""
    found = role(run, name)
    while found in ended or not still_run([found], 0):
        time.sleep(0.1)
        found = role(run, name)
    return found


def has_logged(run: Command, what: str) -> bool:
    log = run.folder / "logs/orchestrator.log"
    return log.exists() and what in log.read_text()


def require_all_gone(processes: list[psutil.Process]) -> None:
    assert still_run(processes, ENDS_S) == []


def require_finished(run: Command, printed: str, steps: int, *, loses_workers: bool = False) -> None:
    """Without the loss of any rollout; those that a lost worker held were played once more."""
    assert [record["step"] for record in records(run.folder / "metrics.jsonl")] == list(range(1, steps + 1)), printed
    summary = read_summary(run.folder)
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, steps)
    assert summary.ledger.balances
    assert set(summary.ledger.by_reason["failed"]) <= ({"worker_lost"} if loses_workers else set())
    ended = {record["rollout_id"]: record["outcome"]["state"] for record in rollouts(run.folder)}
    lost = [rollout_id for rollout_id, state in ended.items() if state == "failed"]
    assert [one for one in lost if f"{one.removesuffix('.0')}.1" not in ended] == []
    assert not list(run.folder.glob("tailrace-run-*"))


def test_a_run_on_three_nodes_loses_one_and_its_other_roles_and_finishes_and_leaves_nothing(tmp_path: Path) -> None:
    chosen = ("--transport.weights", "object_store", "--max_steps", "60", "--rollouts.agent_workers", "1")
    with ray_cluster(0, 1, 1, 1, 1) as nodes, command(tmp_path, *on(nodes, *chosen)) as run:
        run.wait_for_steps(5)
        roles = [role(run, name) for name in ("generator", "agent-worker-0", "trainer")]
        first, *_ = own = [nodes.node_of(one) for one in roles]
        assert len({node.raylet_socket_name for node in own}) == 3
        losses = (partial(nodes.lose, first), *(one.kill for one in roles[1:]))
        for steps, lose in zip((10, 15, 20), losses, strict=True):
            lose()
            run.wait_for_steps(steps)
        roles += [role(run, name) for name in ("generator", "agent-worker-0", "trainer")]
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
        require_all_gone(roles)
    require_finished(run, printed, 60, loses_workers=True)
    epoch = records(run.folder / "events.jsonl")[0]["epoch"]
    assert [*shared_memory_folder().glob(f"tailrace-run-{epoch[:16]}-*")] == []


def listens_at(process: psutil.Process) -> set[str]:
    connections = process.net_connections("tcp")
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def test_nothing_is_left_of_a_run_whose_own_process_is_killed_and_it_goes_on(nodes: RayNodes, tmp_path: Path) -> None:
    with command(tmp_path, *on(nodes, "--max_steps", "10000", "--rollouts.agent_workers", "1")) as run:
        run.wait_for_steps(8)
        roles = [role(run, name) for name in ("trainer", "generator", "agent-worker-0")]
        trainer, generator, _ = roles
        assert listens_at(generator) == {nodes.node_of(generator).node_ip_address}
        assert not listens_at(trainer)
        epoch = records(run.folder / "events.jsonl")[0]["epoch"]
        groups = {f"tailrace:run:{epoch[:8]}:{name}" for name in ("trainer", "generator", "agents")}
        actors = {f"tailrace:run:{epoch[:8]}:{name}.0" for name in ("trainer", "generator", "agent-worker-0")}
        assert nodes.made_by_runs() == groups | actors
        (agents,) = roles[-1].children()
        os.kill(run.pid, signal.SIGKILL)
        require_all_gone([*roles, agents])
        nodes.wait_until_empty(ENDS_S)
    done = len(records(run.folder / "metrics.jsonl"))
    resumed = ("--resume", "--allow-changed-settings", "--max_steps", str(done + 5))
    with command(tmp_path, *on(nodes, *resumed)) as run:
        status, printed = run.wait()
        assert status == 0, printed
    assert read_summary(run.folder).steps == done + 5


GROWING = (
    *("--generator.replicas", "{min = 1, max = 3, grow_after_s = 1.5, shrink_after_s = 20}"),
    *("--rollouts.max_tokens", "400", "--max_steps", "100000"),
)
"""Of rollouts that take long enough to fill slots on a busy machine."""


def told(run: Command, kind: str) -> list[str]:
    """The generators that the run told this of."""
    return [event["name"] for event in records(run.folder / "events.jsonl") if event["type"] == kind]


@pytest.mark.long
def test_a_run_asks_for_generators_while_slots_are_full_and_lets_them_go(nodes: RayNodes, tmp_path: Path) -> None:
    with command(tmp_path, *on(nodes, *GROWING, "--ray.wait_s", "3")) as run:
        run.wait_until(lambda: len(told(run, "ReplicaJoined")) == 2)
        spare = role(run, "generator-1")
        asyncio.run(release(str(run.folder), "generator-1", None))
        require_all_gone([spare])
        run.process.terminate()
        status, printed = run.wait()
        assert status == 143, printed
    assert read_summary(run.folder).ledger.balances
    assert "asks for 2 generators: 1 serve, and their slots are full" in printed


def test_a_run_that_a_cluster_has_no_room_for_is_refused_at_once(nodes: RayNodes, tmp_path: Path) -> None:
    with command(tmp_path, *on(nodes, "--generator.replicas", "3")) as run:
        status, printed = run.wait()
    assert status == 2, printed
    assert "the cluster is too small for this run" in printed
    assert "Fits nowhere: the generator-2 (1 CPU)" in printed


@pytest.mark.long
def test_a_dry_run_says_which_role_would_be_on_which_node(nodes: RayNodes, tmp_path: Path) -> None:
    many = ("--placement", "ray", "--ray.address", nodes.address, "--generator.replicas", "3", "--dry-run")
    with command(tmp_path, *many) as run:
        status, printed = run.wait()
    assert status == 0, printed
    found = re.findall(r"Node 127\.0\.0\.(\d) \(\w+, 1 CPU\): (\S+)\.", printed)
    assert len({number for number, _ in found}) == 3
    assert {name for _, name in found} == {"trainer", "generator-0", "generator-1"}
    assert "Fits nowhere: the generator-2 (1 CPU)." in printed
    assert not run.folder.exists()


@pytest.mark.long
def test_a_second_run_waits_for_room_and_then_says_that_there_is_none(nodes: RayNodes, tmp_path: Path) -> None:
    with command(tmp_path, *on(nodes, "--max_steps", "10000", "--generator.replicas", "2")) as first:
        first.wait_for_steps(1)
        with command(tmp_path, *on(nodes, "--ray.wait_s", "6"), name="second") as second:
            status, printed = second.wait()
        assert status == 2, printed
        assert "waits for the cluster to have room for the trainer (1 CPU); free are 0 of 3 CPUs" in printed
        assert "had no room for the trainer (1 CPU) within 6 s (ray.wait_s)" in printed
        first.process.terminate()
        status, printed = first.wait()
        assert status == 143, printed


@pytest.mark.long
def test_two_runs_at_once_have_names_and_groups_of_their_own_and_both_finish(tmp_path: Path) -> None:
    with ray_cluster(0, 2, 2) as nodes:
        arguments = (*LIGHT, "--ray.address", nodes.address, "--max_steps", "300")
        with command(tmp_path, *arguments) as first, command(tmp_path, *arguments, name="second") as second:
            for run in (first, second):
                run.wait_for_steps(1)
            owners = {name.rpartition(":")[0] for name in nodes.made_by_runs()}
            assert sorted(owner.split(":")[1] for owner in owners) == ["run", "second"]
            for run in (first, second):
                status, printed = run.wait()
                assert status == 0, printed
                require_finished(run, printed, 300)
        nodes.wait_until_empty(ENDS_S)


LOSSES = (*LIGHT, "--restarts.silence_s", "5", "--max_steps", "150")


@pytest.mark.long
@pytest.mark.parametrize("name", ["generator-1", "trainer", "agent-worker-1"])
def test_a_node_that_is_lost_costs_no_step_and_no_rollout(tmp_path: Path, name: str) -> None:
    two = ("--generator.replicas", "2", "--rollouts.agent_workers", "2")
    with ray_cluster(0, 2, 2, 2, 2) as nodes:
        with command(tmp_path, *LOSSES, "--ray.address", nodes.address, *two) as run:
            run.wait_for_steps(10)
            agents = [nodes.node_of(role(run, f"agent-worker-{number}")) for number in range(2)]
            assert agents[0] is not agents[1]
            lost = nodes.node_of(role(run, name))
            nodes.lose(lost)
            run.wait_for_steps(40)
            assert nodes.node_of(role(run, name)) is not lost
            status, printed = run.wait()
            assert status == 0, printed
        require_finished(run, printed, 150, loses_workers=True)


@pytest.mark.long
@pytest.mark.parametrize("whole", [True, False], ids=["node", "raylet"])
@pytest.mark.parametrize("place", ["trainer startup", "generator startup", "generator transfer"])
def test_a_node_that_is_lost_while_its_role_starts_or_loads_weights_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, whole: bool
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    fault = Fault(marks, place.split(maxsplit=1)[0], "killed", place)
    for name, value in fault.variables.items():  # which nodes hand on to what they start
        monkeypatch.setenv(name, value)
    with ray_cluster(0, 1, 1, 1) as nodes:
        with command(tmp_path, *LOSSES, "--ray.address", nodes.address) as run:
            run.wait_until(fault.mark("reached-0").exists)
            struck = psutil.Process(int(fault.mark("reached-0").read_text()))
            nodes.lose(nodes.node_of(struck), whole=whole)
            require_all_gone([struck])  # though it stands still, and nobody killed it where the raylet alone is gone
            fault.place_mark("struck-0", "")
            status, printed = run.wait()
            assert status == 0, printed
        require_finished(run, printed, 150)


@pytest.mark.long
def test_a_run_whose_cluster_loses_its_head_fails_and_goes_on_in_another(tmp_path: Path) -> None:
    with ray_cluster(0, 1, 1) as nodes:
        with command(tmp_path, *LIGHT, "--ray.address", nodes.address, "--max_steps", "100000") as run:
            run.wait_for_steps(10)
            roles = [role(run, one) for one in ("trainer", "generator")]
            nodes.lose_head()
            status, printed = run.wait()
            assert status == 1, printed
            require_all_gone(roles)
        summary = read_summary(run.folder)
        assert summary.status is RunStatus.FAILED
        assert "the head of the Ray cluster" in summary.reason
        assert summary.ledger.balances
    resumed = ("--resume", "--allow-changed-settings", "--max_steps", str(summary.steps + 5))
    with ray_cluster(2) as nodes, command(tmp_path, *LIGHT, "--ray.address", nodes.address, *resumed) as run:
        status, printed = run.wait()
        assert status == 0, printed


TIMES = 10


@pytest.mark.long
def test_generators_join_on_nodes_that_are_added_and_leave_ten_times_with_nothing_lost(tmp_path: Path) -> None:
    """A test adds the node, as an autoscaler would for the group that waits."""
    with ray_cluster(1, 1) as nodes:
        growing = ("--ray.address", nodes.address, *GROWING, "--ray.wait_s", "30")
        with command(tmp_path, *LIGHT, *growing) as run:
            run.wait_until(lambda: has_logged(run, "asks for 2 generators"))
            nodes.add(1)
            for number in range(TIMES):
                run.wait_until(lambda number=number: len(told(run, "ReplicaJoined")) == number + 2)
                newest = told(run, "ReplicaJoined")[-1]
                assert nodes.node_of(role(run, newest)) is nodes.nodes[-1]
                asyncio.run(release(str(run.folder), newest, None))
                run.wait_until(lambda number=number: len(told(run, "ReplicaLeft")) == number + 1)
            run.process.terminate()
            status, printed = run.wait()
            assert status == 143, printed
    ledger = read_summary(run.folder).ledger
    assert ledger.balances
    assert ledger.by_state["failed"] == 0


@pytest.mark.long
def test_nothing_is_left_of_a_trainer_that_computes_when_the_run_is_killed(tmp_path: Path) -> None:
    long_steps = ("--scheduling.batch_size", "256", "--rollouts.group_size", "8", "--rollouts.agent_workers", "1")
    with ray_cluster(1, 1, 1) as nodes:
        real = ("--placement", "ray", "--ray.address", nodes.address, *QUIET, "--trainer.checkpoint_every_steps", "1")
        with command(tmp_path, *real, *long_steps) as run:
            run.wait_for_steps(2)
            roles = [role(run, name) for name in ("trainer", "generator", "agent-worker-0")]
            os.kill(run.pid, signal.SIGKILL)
            require_all_gone(roles)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wider", "weights"),
    [
        (("--generator.replicas", "2"), ()),
        (("--generator.replicas", "2"), ("--transport.weights", "object_store", *SMALL_CHANGES)),
        (("--trainer.ranks", "2"), ()),
    ],
)
def test_the_quickstart_trains_on_three_nodes(tmp_path: Path, wider: tuple[str, ...], weights: tuple[str, ...]) -> None:
    with ray_cluster(1, 1, 1) as nodes:
        real = ("--placement", "ray", "--ray.address", nodes.address, *QUIET)
        with command(tmp_path, *real, "--max_steps", "12", *wider, *weights) as run:
            status, printed = run.wait()
            assert status == 0, printed
        require_finished(run, printed, 12)
    shares = [
        line["weights/sent_share"] for line in records(run.folder / "metrics.jsonl") if "weights/sent_share" in line
    ]
    assert bool(shares) == bool(weights)
    assert min(shares, default=0.0) < 0.5  # as deltas, but for the first ones


@pytest.mark.long
def test_a_replica_of_vllm_over_two_nodes_takes_over_weights_and_is_started_again_as_one(tmp_path: Path) -> None:
    from tests.generation.engine_kinds import require_vllm_installed  # which imports torch

    require_vllm_installed()
    halves = ("--generator.engine", "vllm", "--generator.tensor_parallel", "2", "--generator.vllm.block_size", "32")
    with ray_cluster(1, 1, 1) as nodes:
        real = ("--placement", "ray", "--ray.address", nodes.address, "--max_steps", "100000", *QUIET)
        with command(tmp_path, *real, *halves) as run:
            lost: list[psutil.Process] = []
            for victim in (1, 0, None):
                lives = [later_role(run, one, lost) for one in ("generator", "generator-node-1")]
                known = len(records(run.folder / "metrics.jsonl"))
                run.wait_for_steps(known + 6)  # more than can be trained on tokens of an earlier life
                assert nodes.node_of(lives[0]) is not nodes.node_of(lives[1])
                require_all_gone(lost)
                lost = [process for life in lives for process in (life, *life.children(recursive=True))]
                if victim is not None:
                    lives[victim].kill()
            run.process.terminate()
            status, printed = run.wait()
            assert (status, run.leftovers()) == (143, []), printed
            require_all_gone(lost)
    assert read_summary(run.folder).ledger.balances
    for line in records(run.folder / "metrics.jsonl"):  # by which both halves have the trainer's weights
        assert line.get("training/logprob_difference_fresh", 0.0) < 0.05
    assert not list(run.folder.glob("tailrace-run-*"))


@pytest.mark.long
@pytest.mark.parametrize("weights", [(), ("--transport.weights", "object_store")], ids=["files", "object store"])
def test_a_generator_joins_a_run_on_a_cluster_that_is_full_and_leaves_it(
    tmp_path: Path, weights: tuple[str, ...]
) -> None:
    elastic = ("--generator.replicas", "{min = 1, max = 4}", "--generator.router.report_every_s", "0.1")
    with ray_cluster(1, 1) as nodes:
        real = ("--placement", "ray", "--ray.address", nodes.address, *QUIET, "--max_steps", "10000")
        with command(tmp_path, *real, *elastic, *weights) as run, joining(tmp_path, "--join", "run") as guest:
            run.wait_until(lambda: len(told(run, "ReplicaJoined")) == 2)
            (name,) = {*told(run, "ReplicaJoined")} - {"generator-0"}  # the guest may be the first to serve
            run.wait_until(lambda: newest(run, f"generator/{name}/policy_version") > 0)
            guest.send_signal(signal.SIGTERM)
            run.wait_until(lambda: told(run, "ReplicaLeft") == [name])
            assert guest.wait(PATIENCE_S) == 143
            run.process.terminate()
            status, printed = run.wait()
            assert status == 143, printed
    require_nothing_lost(run, printed)


@pytest.mark.long
def test_experts_that_a_generator_chose_reach_the_trainer_on_another_node(tmp_path: Path) -> None:
    from tests.run.test_router_replay import save_mixtral  # which imports torch

    returning = ("--model.name", str(save_mixtral(tmp_path / "mixtral")), "--generator.return_routed_experts", "true")
    with ray_cluster(0, 1, 1) as nodes:
        real = ("--placement", "ray", "--ray.address", nodes.address, "--max_steps", "3", *QUIET)
        with command(tmp_path, *real, *returning) as run:
            apart = {nodes.node_of(role(run, name)).raylet_socket_name for name in ("trainer", "generator")}
            assert len(apart) == 2
            status, printed = run.wait()
            assert status == 0, printed
        require_finished(run, printed, 3)
    for line in records(run.folder / "metrics.jsonl"):
        assert line["training/replayed_share"] > 0.5


def test_a_cluster_of_other_versions_is_refused_with_both(nodes: RayNodes, tmp_path: Path) -> None:
    with nodes.says_versions(ray="9.9.9", python="3.99.1"), command(tmp_path, *on(nodes)) as run:
        status, printed = run.wait()
    assert status == 2, printed
    told = " ".join(printed.split())
    assert "the cluster has Ray 9.9.9 and Python 3.99.1" in told
    assert f"and this process Ray {package_version('ray')} and Python {platform.python_version()}" in told


def other_version(folder: Path) -> Path:
    """What is imported before the tests' own Tailrace by whoever has it."""
    (other := folder / "other" / "tailrace-9.9.dist-info").mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: tailrace\nVersion: 9.9\n")
    return other.parent


@pytest.mark.long
def test_a_node_with_another_version_is_named(tmp_path: Path) -> None:
    with ray_cluster(2, first_import=other_version(tmp_path)) as nodes, command(tmp_path, *on(nodes)) as run:
        status, printed = run.wait()
    assert status == 2, printed
    assert "the cluster's node 127.0.0.1 has Tailrace 9.9, and this process" in printed


def listens_in_vain(other: socket.socket, says: bytes | None) -> None:
    """To everybody who comes it says that, and is gone; None: it says nothing at all."""
    with contextlib.suppress(OSError):  # the test is over
        while says is not None:
            caller, _ = other.accept()
            with caller:
                caller.sendall(says)


@pytest.mark.long
@pytest.mark.parametrize("says", [None, b"", b"-ERR unknown command\r\n"], ids=["silent", "closes", "redis"])
def test_an_address_where_something_else_listens_is_refused_in_time(tmp_path: Path, says: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=listens_in_vain, args=(other, says), daemon=True).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with command(tmp_path, *LIGHT, "--ray.address", address) as run:
            began_s = time.monotonic()
            status, printed = run.wait()
        other.shutdown(socket.SHUT_RDWR)
    assert status == 2, printed
    assert f"ray.address = '{address}'" in printed
    assert time.monotonic() - began_s < SAID_S


@pytest.mark.long
def test_a_node_with_another_version_that_is_added_for_a_run_is_named(tmp_path: Path) -> None:
    with ray_cluster(1) as nodes:
        patient = ("--ray.address", nodes.address, "--ray.wait_s", "60")
        with command(tmp_path, *LIGHT, *patient) as run:
            run.wait_until(lambda: has_logged(run, "waits for the cluster to have room"))
            nodes.add(1, first_import=other_version(tmp_path))
            status, printed = run.wait()
    assert status == 2, printed
    assert "the cluster's node 127.0.0.2 has Tailrace 9.9, and this process" in printed


async def test_a_node_that_leaves_while_it_is_asked_for_its_version_is_none_of_the_cluster(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await RayCluster.reach(RaySettings(address=nodes.address), "run", "epoch")
    try:
        left = cluster.nodes()
        looks = [left, [*left, ClusterNode("e" * 56, "127.0.0.9", 1)]]  # the last one first
        monkeypatch.setattr(cluster, "nodes", looks.pop)
        await cluster.require_nodes(tmp_path)
        assert not looks  # the second look is for a node that did not answer
    finally:
        cluster.close()


async def test_an_address_where_no_cluster_is_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"ray\.address = '127\.0\.0\.1:1': nothing answers there"):
        await RayCluster.reach(RaySettings(address="127.0.0.1:1"), "run", "epoch")


async def test_where_ray_is_not_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r'needs ray: pip install "tailrace\[ray\]"'):
        await RayCluster.reach(RaySettings(), "run", "epoch")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("--transport.weights", "object_store"), "and placement is 'local'"),
        (("--ray.wait_s", "3"), "ray is about placement = 'ray'"),
        (("--placement", "ray", "--transport.batches", "shared_memory"), "stays on one node"),
        (("--placement", "ray", "--generator.device", "cuda:1"), "names a GPU of one machine"),
        (("--ray.address", "ray://host:1"), r"give HOST:PORT of the head, .* does not go through Ray Client"),
        (("--ray.address", "host:99999"), "no address of a head"),
        (("--ray.address", "auto"), "or nothing for the cluster of this machine"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        tiny_settings(*overrides)
