"""Runs on a Ray cluster whose nodes come and go by Ray's own autoscaler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.run.joined_serving import release
from tests.run.runs import Command, command
from tests.run.test_joined_runs import newest, require_nothing_lost
from tests.run.test_ray import LIGHT, require_finished, role, told
from tests.support.autoscaled_ray import AutoscaledNodes, Version, autoscaled_cluster
from tests.support.light_ray import HOLDS

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.long]

PATIENT = ("--ray.wait_s", "120")
GROWING = (
    *("--generator.replicas", "{min = 1, max = 2, grow_after_s = 1.5, shrink_after_s = 60}"),
    *("--rollouts.max_tokens", "400", "--max_steps", "100000"),
)


def wait_for_node_of(run: Command, nodes: AutoscaledNodes, joined: int) -> str:
    """The one that was added for a generator, once that is the last of so many that joined, and has tokens."""
    run.wait_until(lambda: len(told(run, "ReplicaJoined")) == joined)
    run.wait_until(lambda: newest(run, "generator/generator-1/running_tokens") > 0)
    node = nodes.node_of(role(run, "generator-1"))
    assert node in nodes.added()
    return node


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_an_autoscaler_adds_a_node_for_a_generator_and_takes_it_away_again(tmp_path: Path, version: Version) -> None:
    (held := tmp_path / "holds" / "generator-1").parent.mkdir()
    held.touch()
    with autoscaled_cluster(tmp_path, version, head_cpus=2) as nodes:
        arguments = (*LIGHT, "--ray.address", nodes.address, *GROWING, *PATIENT)
        with command(tmp_path, *arguments, variables={HOLDS: str(held.parent)}) as run:
            run.wait_until(lambda: bool(told(run, "ReplicaJoined")))
            assert not nodes.added()  # the head has room for what the run begins with
            held.unlink()
            first = wait_for_node_of(run, nodes, joined=2)
            held.touch()  # a node that is asked for again before it was idle for long enough is not taken away
            asyncio.run(release(str(run.folder), "generator-1", None))
            run.wait_until(lambda: not nodes.added())
            held.unlink()
            assert wait_for_node_of(run, nodes, joined=3) != first
            run.process.terminate()
            status, printed = run.wait()
            assert status == 143, printed
        nodes.wait_until_alone()
    require_nothing_lost(run, printed)
    assert len(told(run, "ReplicaLeft")) == 1


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_run_waits_for_the_nodes_that_an_autoscaler_adds_for_it(tmp_path: Path, version: Version) -> None:
    with autoscaled_cluster(tmp_path, version, head_cpus=0) as nodes:
        with command(tmp_path, *LIGHT, "--ray.address", nodes.address, *PATIENT, "--max_steps", "20") as run:
            roles = [role(run, name) for name in ("trainer", "generator")]
            assert len({nodes.node_of(one) for one in roles} & nodes.added()) == 2
            status, printed = run.wait()
            assert status == 0, printed
        nodes.wait_until_alone()
    require_finished(run, printed, 20)
