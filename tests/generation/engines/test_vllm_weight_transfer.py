"""Weights sent by vLLM's weight-transfer interface to a real engine on a CPU: only what moves bytes is not vLLM's."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tailrace.errors import EngineFailed, ModelError, TransportError
from tailrace.feed import Feed, FeedPlace
from tailrace.generation.engines.vllm.core import build_core
from tailrace.generation.engines.vllm.engine import VllmEngine
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.records import FeedReport, ModelStateDictPublished, ModelStateDictRef, RunStatus, TrainerEnded
from tailrace.run.outside_trainer import OutsideTrainer
from tailrace.transport.channels import create_socket_folder
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.sample_sender import RedisSampleSender
from tailrace.transport.redis.streams import Origin
from tailrace.transport.weights import outside
from tailrace.transport.weights.transfer_sockets import TransferPlace
from tailrace.transport.weights.transfers import TransferReceiver, TransferringModelStateDictStore
from tests.generation.engine_kinds import require_vllm_installed
from tests.generation.engine_support import SHAPE, Driver, greedy_reference, request
from tests.support.redis_servers import needs_redis, redis_server

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import InprocClient

    from tests.generation.engines.loopback_transfer import LoopbackTrainer

pytestmark = pytest.mark.xdist_group("vllm")

DEADLINE_S = 120.0
HANG_S = 5.0
"""What the trainer grants a call where one hangs: more than a busy machine takes for one that does not."""
SOON_S = 60.0
"""Less than the trainer grants a call where none hangs."""


def model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {**SHAPE, "num_key_value_heads": 2, "head_dim": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()


def until(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(model(seed).state_dict())


@pytest.fixture(autouse=True)
def groups() -> list[LoopbackTrainer]:
    """The trainer's sides that a test makes."""
    require_vllm_installed()
    from tests.generation.engines.loopback_transfer import LoopbackTrainer, register

    register()
    LoopbackTrainer.groups.clear()
    return LoopbackTrainer.groups


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InprocClient]:
    require_vllm_installed()
    from tests.generation.engines.loopback_transfer import BACKEND, register

    register()
    folder = tmp_path_factory.mktemp("model")
    model(0).save_pretrained(folder)
    started = build_core(
        ModelSettings(name=str(folder), max_model_tokens=64),
        GeneratorSettings(
            engine="vllm", slots=2, vllm={"block_size": 32, "weight_transfer_config": {"backend": BACKEND}}
        ),
    )
    gc.freeze()  # the millions of objects that vLLM's modules are: a look among them takes as long as a deadline here
    yield started
    started.shutdown()


@pytest.fixture
def place() -> Iterator[TransferPlace]:
    """With a path short enough for sockets."""
    folder = create_socket_folder()
    yield TransferPlace(folder)
    shutil.rmtree(folder)


@pytest.fixture
def store(place: TransferPlace) -> Iterator[TransferringModelStateDictStore]:
    from tests.generation.engines.loopback_transfer import init_info

    store = TransferringModelStateDictStore(place, DEADLINE_S, init_info)
    yield store
    store.close()
    store.close()


def test_an_engine_is_sent_each_version_between_its_steps(
    core: InprocClient, store: TransferringModelStateDictStore, place: TransferPlace, groups: list[LoopbackTrainer]
) -> None:
    engine = VllmEngine(core)
    with closing(TransferReceiver(place)) as receiver:
        for version in (1, 2, 3):
            with receiver.open(store.publish(weights(version), version)) as offered:
                assert offered.version == version
                engine.load_model_state_dict(engine.prepare(offered), offered.version)
            asked = request(f"after-{version}", [1, 2, 3], temperature=0, max_tokens=8)
            (completed,) = Driver(engine).run(asked)
            assert completed.token_ids.tolist() == greedy_reference(model(version), [1, 2, 3], 8)
            assert set(completed.policy_versions) == {version}
    assert [group.world_size for group in groups] == [2]  # one for all versions


def test_an_engine_on_another_host_is_sent_weights_over_the_address_of_the_trainers(
    core: InprocClient, place: TransferPlace
) -> None:
    from tests.generation.engines.loopback_transfer import init_info

    engine, trainers = VllmEngine(core), replace(place, host="127.0.0.1", key=b"the run's")
    with closing(TransferringModelStateDictStore(trainers, DEADLINE_S, init_info)) as store:
        ref = store.publish(weights(6), 6)
        assert ref.uri.startswith("tcp://127.0.0.1:")
        with closing(TransferReceiver(replace(place, key=b"the run's"))) as receiver, receiver.open(ref) as offered:
            engine.load_model_state_dict(engine.prepare(offered), offered.version)
    (completed,) = Driver(engine).run(request("six", [1, 2, 3], temperature=0, max_tokens=8))
    assert completed.token_ids.tolist() == greedy_reference(model(6), [1, 2, 3], 8)


def test_what_was_lent_is_what_is_sent_though_newer_weights_were_published(
    core: InprocClient, store: TransferringModelStateDictStore, place: TransferPlace
) -> None:
    engine = VllmEngine(core)
    ref = store.publish(weights(4), 4)
    with closing(TransferReceiver(place)) as receiver:
        with receiver.open(ref) as offered:
            prepared = engine.prepare(offered)
            store.publish(weights(5), 5)
            engine.load_model_state_dict(prepared, offered.version)
        (completed,) = Driver(engine).run(request("four", [5], temperature=0, max_tokens=8))
        assert completed.token_ids.tolist() == greedy_reference(model(4), [5], 8)
        with receiver.open(ref) as offered:  # a late one gets the newest
            assert offered.version == 5


def test_weights_of_another_model_are_refused_before_anything_is_sent(
    core: InprocClient, store: TransferringModelStateDictStore, place: TransferPlace, groups: list[LoopbackTrainer]
) -> None:
    engine = VllmEngine(core)
    with closing(TransferReceiver(place)) as receiver:
        other = {**weights(1), "model.norm.weight": torch.ones(3)}
        with pytest.raises(ModelError, match=r"model\.norm\.weight"), receiver.open(store.publish(other, 1)) as offered:
            engine.prepare(offered)
        with receiver.open(store.publish(weights(2), 2)) as offered:
            engine.load_model_state_dict(engine.prepare(offered), offered.version)
    assert len(groups) == 1


def test_an_engine_that_fails_in_the_middle_ends_its_group_and_no_other(
    core: InprocClient, store: TransferringModelStateDictStore, place: TransferPlace, groups: list[LoopbackTrainer]
) -> None:
    engine = VllmEngine(core)
    ref = store.publish(weights(1), 1)

    def fails(method: str, _: object) -> None:
        if method == "update_weights":
            raise MemoryError("no room")

    with closing(TransferReceiver(place)) as broken, closing(TransferReceiver(place)) as receiver:
        with pytest.raises(TransportError, match="update_weights: MemoryError: no room"), broken.open(ref) as offered:
            offered.receive(2, fails)
        with receiver.open(ref) as offered:
            engine.load_model_state_dict(engine.prepare(offered), offered.version)
    assert [(group.world_size, group.ended) for group in groups[:2]] == [(3, True), (2, groups[1].ended)]


def test_a_generator_that_dies_in_the_middle_ends_the_broadcast_to_it(
    store: TransferringModelStateDictStore, place: TransferPlace, groups: list[LoopbackTrainer]
) -> None:
    receiver = TransferReceiver(place)

    def dies(method: str, _: object) -> None:
        if method == "update_weights":
            receiver.close()

    with pytest.raises(TransportError), receiver.open(store.publish(weights(1), 1)) as offered:
        offered.receive(1, dies)
    served = [thread for thread in threading.enumerate() if thread.name == "weight transfer"]
    for thread in served:
        thread.join(DEADLINE_S)
    assert [group.ended for group in groups] == [True]


def test_a_generator_that_waits_behind_one_that_hangs_joins_meanwhile_and_is_sent_its_weights_after_that_is_given_up(
    place: TransferPlace, groups: list[LoopbackTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    from tests.generation.engines.loopback_transfer import init_info

    hangs, let_go = threading.Event(), threading.Event()
    given_up: list[tuple[str, bool]] = []
    """The calls of the one that follows, and whether the one before was given up by then."""

    def hang(method: str, _: object) -> None:
        if method == "update_weights":
            hangs.set()
            assert let_go.wait(DEADLINE_S)

    def follow(method: str, _: object) -> None:
        given_up.append((method, groups[0].ended))

    caplog.set_level(logging.DEBUG)
    with (
        closing(TransferringModelStateDictStore(place, HANG_S, init_info)) as store,
        closing(TransferReceiver(place)) as stuck,
        closing(TransferReceiver(place)) as receiver,
        ThreadPoolExecutor(1) as beside,
    ):
        ref = store.publish(weights(1), 1)
        try:
            with stuck.open(ref) as its, receiver.open(ref) as offered:
                hung = beside.submit(its.receive, 1, hang)
                assert hangs.wait(SOON_S)
                offered.receive(1, follow)
        finally:
            let_go.set()
        assert isinstance(hung.exception(SOON_S), TransportError)
    assert given_up == [
        ("init_weight_transfer_engine", False),
        ("start_weight_update", True),
        ("update_weights", True),
        ("finish_weight_update", True),
    ]
    assert f"a generator took more than {HANG_S:g} s, half of generator.router.progress_deadline_s" in caplog.text


def test_an_engine_that_cannot_join_its_group_fails_with_its_own_error_while_the_trainer_waits_for_it(
    place: TransferPlace,
) -> None:
    from tests.generation.engines.loopback_transfer import JoiningTrainer, joining_init_info

    def fails(*_: object) -> None:
        raise RuntimeError("no interface")

    first = weights(1)
    kept = weakref.ref(first["model.norm.weight"])
    JoiningTrainer.joined.clear()
    with (
        closing(TransferringModelStateDictStore(place, DEADLINE_S, joining_init_info)) as store,
        closing(TransferReceiver(place)) as receiver,
        ThreadPoolExecutor(1) as beside,
    ):
        try:
            own = pytest.raises(TransportError, match=r"init_weight_transfer_engine: RuntimeError: no interface$")
            with own, receiver.open(store.publish(first, 1)) as offered:
                beside.submit(offered.receive, 1, fails).result(SOON_S)
            del first
            store.publish(weights(2), 2)
            until(lambda: kept() is None)
        finally:
            JoiningTrainer.joined.set()


def test_weights_that_were_sent_are_not_kept_while_their_generator_asks_for_no_others(
    store: TransferringModelStateDictStore, place: TransferPlace
) -> None:
    first = weights(1)
    kept = weakref.ref(first["model.norm.weight"])
    with closing(TransferReceiver(place)) as receiver:
        with receiver.open(store.publish(first, 1)) as offered:
            offered.receive(1, lambda *_: None)
        del first
        store.publish(weights(2), 2)
        until(lambda: kept() is None)


def test_a_trainer_that_is_gone_is_told_to_the_engine(
    core: InprocClient, store: TransferringModelStateDictStore, place: TransferPlace
) -> None:
    ref = store.publish(weights(1), 1)
    store.close()
    with (
        closing(TransferReceiver(place)) as receiver,
        pytest.raises(TransportError, match="weights are not offered"),
        receiver.open(ref),
    ):
        pass


def test_an_engine_that_fails_to_install_what_it_was_sent_has_failed(
    core: InprocClient,
    store: TransferringModelStateDictStore,
    place: TransferPlace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.generation.engines.loopback_transfer import LoopbackEngine

    engine = VllmEngine(core)
    monkeypatch.setattr(LoopbackEngine, "receive_weights", lambda *_: 1 / 0)
    with closing(TransferReceiver(place)) as receiver, receiver.open(store.publish(weights(9), 9)) as offered:
        prepared = engine.prepare(offered)
        with pytest.raises(EngineFailed, match="division by zero"):
            engine.load_model_state_dict(prepared, 9)


class Scheduler:
    """Believes whatever a trainer tells."""

    num_consumers = 1

    async def tell(self, report: FeedReport) -> None: ...

    def saved(self, step: int) -> None: ...


@needs_redis
async def test_an_engine_is_sent_the_weights_of_a_trainer_outside_that_goes_on_with_its_tensors(
    core: InprocClient, place: TransferPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.generation.engines.loopback_transfer import init_info

    monkeypatch.setattr(outside, "nccl_init_info", init_info)
    received = threading.Event()

    def train(url: str) -> None:
        with Feed(FeedPlace(url, "run", transfers=str(place.folder))) as feed:
            tensors = weights(7)
            feed.step_done(1, [], weights=tensors)
            for tensor in tensors.values():
                tensor.zero_()
            assert received.wait(DEADLINE_S)

    with redis_server(tmp_path / "redis") as server:
        log = MemoryEventLog(epoch="epoch")
        sender = RedisSampleSender(RedisPlace(server.url, Origin("run", "epoch"), 60.0))
        trainer = OutsideTrainer(sender, None, log, last_read_s=DEADLINE_S)
        trainer.listen(Scheduler())
        training = asyncio.create_task(asyncio.to_thread(train, server.url))
        async for event in log.follow():
            if isinstance(event, ModelStateDictPublished):
                await asyncio.to_thread(install, core, place, event.ref)
                received.set()
            elif isinstance(event, TrainerEnded):
                assert event.status is RunStatus.FINISHED
                break
        await training
        await trainer.end_feed()
        await trainer.close()
    (completed,) = Driver(VllmEngine(core)).run(request("outside", [1, 2, 3], temperature=0, max_tokens=8))
    assert completed.token_ids.tolist() == greedy_reference(model(7), [1, 2, 3], 8)


def install(core: InprocClient, place: TransferPlace, ref: ModelStateDictRef) -> None:
    engine = VllmEngine(core)
    with closing(TransferReceiver(place)) as receiver, receiver.open(ref) as offered:
        engine.load_model_state_dict(engine.prepare(offered), offered.version)
