"""Weights from node to node: the real files, deltas and decisions, through an object store that is a dictionary."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, RayTaskError

from tailrace.errors import TransportError
from tailrace.lifecycle.node_weights import NodeWeights, WeightsOfNodes
from tailrace.records import ModelStateDictRef
from tailrace.transport import owned_folders as resources
from tailrace.transport.owned_folders import NodeFolder, node_memory, remove_leftovers
from tailrace.transport.weights.stores import NodeModelStateDictStore, SharedMemoryModelStateDictStore

EPOCH = "0123456789abcdef0123"


class _Call:
    """A method of an actor, whose calls are awaited."""

    def __init__(self, node: _Actor, name: str) -> None:
        self._node, self._name = node, name

    async def remote(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        self._node.asked.append(self._name)
        if self._node.is_lost:
            raise ActorDiedError
        try:
            return getattr(self._node.weights, self._name)(*arguments)
        except Exception as error:  # noqa: BLE001 - of any kind, as an actor's
            raise RayTaskError(self._name, "", error).as_instanceof_cause() from None


class _Actor:
    def __init__(self, weights: NodeWeights) -> None:
        self.weights, self.is_lost, self.asked = weights, False, list[str]()

    def __getattr__(self, name: str) -> _Call:
        return _Call(self, name)


@dataclass
class Cluster:
    """Three nodes, the first of which publishes."""

    actors: dict[str, _Actor] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    puts: list[int] = field(default_factory=list)
    """Bytes of everything that was put into the store."""

    def __post_init__(self) -> None:
        self.weights = WeightsOfNodes(self.start, lambda actor: None)

    async def start(self, host: str) -> Any:
        if host in self.gone:
            raise TransportError(f"no node {host}")
        await asyncio.sleep(0)
        assert host not in self.actors or self.actors[host].is_lost, "it has one that lives"
        self.actors[host] = _Actor(NodeWeights(EPOCH, host))
        return self.actors[host]

    def lose(self, host: str) -> None:
        self.actors[host].is_lost = True
        self.gone.add(host)

    def lend(self, host: str, ref: ModelStateDictRef) -> tuple[int, dict[str, Any]]:
        """As a generator on this node reads them."""
        with SharedMemoryModelStateDictStore(node_memory(EPOCH, host)).open(ref) as found:
            return found.version, {name: tensor.clone() for name, tensor in found.items()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setattr(resources, "shared_memory_folder", lambda: tmp_path)
    made = Cluster()

    def put(content: Any) -> Any:
        made.puts.append(content.nbytes)
        return content.copy()

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", lambda content: content)
    yield made
    for actor in made.actors.values():
        actor.weights.close()


@contextmanager
def trainer(host: str = "a") -> Iterator[NodeModelStateDictStore]:
    folder = NodeFolder(EPOCH, host)
    store = NodeModelStateDictStore(folder.path, host)
    try:
        yield store
    finally:
        store.close()
        folder.leave()


def weights(seed: int, changed: int = 0) -> dict[str, torch.Tensor]:
    """In bfloat16, so many of them moved a little."""
    tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(seed)).bfloat16()
    tensor[:changed] *= 1.01
    return {"layer": tensor}


def equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


async def test_weights_are_put_once_and_each_node_has_one_file_for_all_of_its_generators(cluster: Cluster) -> None:
    with trainer() as store:
        ref = store.publish(weights(1), 1)
        hosts = ("b", "b", "c", "c")
        own = await asyncio.gather(*(cluster.weights.bring(ref, host) for host in hosts))
        assert (len(cluster.puts), own[0], own[2]) == (1, own[1], own[3])
        for host, one in (*zip(hosts, own, strict=True), ("a", await cluster.weights.bring(ref, "a"))):
            version, tensors = cluster.lend(host, one)
            assert (version, equal(tensors, weights(1))) == (1, True)
        assert [cluster.actors[host].asked.count("get") for host in "abc"] == [0, 1, 1]
    figures = cluster.weights.figures
    assert (figures.sends, figures.whole_sends, figures.sent_bytes) == (2, 2, 2 * cluster.puts[0])


async def test_a_small_change_is_put_as_a_delta_and_arrives_bit_for_bit(cluster: Cluster) -> None:
    with trainer() as store:
        for version, changed in enumerate((0, 900, 2_000), start=1):
            ref = store.publish(weights(1, changed), version)
            for host in "bc":
                found, tensors = cluster.lend(host, await cluster.weights.bring(ref, host))
                assert (found, equal(tensors, weights(1, changed))) == (version, True)
    whole, *deltas = cluster.puts
    assert len(deltas) == 2
    assert max(deltas) < 0.1 * whole
    assert cluster.weights.figures.whole_sends == 2


async def test_a_node_that_cannot_apply_a_delta_gets_all(cluster: Cluster) -> None:
    with trainer() as store:
        first = await cluster.weights.bring(store.publish(weights(1), 1), "b")
        with SharedMemoryModelStateDictStore(node_memory(EPOCH, "b")).open(first):  # a generator reads it still
            second = await cluster.weights.bring(store.publish(weights(1, 900), 2), "b")
            assert equal(cluster.lend("b", second)[1], weights(1, 900))
    assert len(cluster.puts) == 3


async def test_the_last_weights_of_a_node_that_is_lost_come_from_another(cluster: Cluster) -> None:
    with trainer() as store:
        ref = store.publish(weights(1), 1)
        await cluster.weights.bring(ref, "b")
        cluster.lose("a")
        assert equal(cluster.lend("c", await cluster.weights.bring(ref, "c"))[1], weights(1))
        cluster.lose("b")
        cluster.lose("c")
        with pytest.raises(TransportError, match=r"did not come to d; from a: .*; from b: .*; from c: "):
            await cluster.weights.bring(ref, "d")


async def test_a_trainer_that_was_started_again_is_not_mistaken_for_its_earlier_life(cluster: Cluster) -> None:
    """It publishes the same version, which may differ in its last bits."""
    with trainer() as store:
        first = await cluster.weights.bring(store.publish(weights(1), 1), "b")
        assert equal(cluster.lend("b", first)[1], weights(1))
    with trainer("c") as store:
        second = await cluster.weights.bring(store.publish(weights(2), 1), "b")
        assert equal(cluster.lend("b", second)[1], weights(2))


async def test_what_a_killed_trainer_left_is_removed_once_the_next_one_publishes(cluster: Cluster) -> None:
    with trainer() as store:
        left = node_memory(EPOCH, "a") / f"model-state-dict-{2**22 + 1}-0.safetensors"  # no process has this number
        left.touch()
        await cluster.weights.bring(store.publish(weights(1), 1), "b")
        assert not left.exists()


async def test_nothing_is_left_once_all_have_left(cluster: Cluster, tmp_path: Path) -> None:
    with trainer() as store:
        await cluster.weights.bring(store.publish(weights(1), 1), "b")
        assert remove_leftovers(tmp_path) == []  # others may start beside it
        await cluster.weights.close()
        assert [path.name for path in tmp_path.iterdir()] == [node_memory(EPOCH, "a").name]
    assert [*tmp_path.iterdir()] == []


async def test_an_error_that_no_node_foresees_costs_one_attempt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer() as store:
        ref = store.publish(weights(1), 1)
        with monkeypatch.context() as patched:
            patched.setattr(ray, "put", lambda content: 1 / 0)
            with pytest.raises(TransportError, match=r"from a: .*division by zero"):
                await cluster.weights.bring(ref, "b")
        assert equal(cluster.lend("b", await cluster.weights.bring(ref, "b"))[1], weights(1))
