"""Whatever bytes a reader is given, it reads them or raises the error that it says; it takes no memory for what they
merely claim.

Mutated are samples that are valid, so that inputs come far into a reader before they are wrong.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save

from tailrace.batching.slices import drained
from tailrace.environments import AgentResult
from tailrace.errors import (
    CheckpointError,
    CorruptData,
    DataError,
    ModelError,
    PayloadLost,
    SettingsError,
    TailraceError,
    TransportError,
)
from tailrace.generation.engines.protocol import EngineLimits, EngineStatistics
from tailrace.generation.rpc import messages
from tailrace.generation.rpc.uploads import Upload, UploadedModelStateDicts
from tailrace.models.files import require_whole_weights
from tailrace.models.identity import ModelIdentity
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    GenerationRequest,
    GroupId,
    ModelStateDictRef,
    PayloadChunk,
    PayloadRef,
    RolloutId,
    RunStatus,
    SamplingParams,
    StepTrained,
    Supports,
    Task,
    TaskId,
    TokenScores,
    TrainerEnded,
    TrainingSample,
)
from tailrace.replay.capture import CaptureWriter, read_capture
from tailrace.reporting.summary import read_summary
from tailrace.rollouts.agent_workers import messages as agents
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.workers.messages import (
    LENGTH_BYTES,
    Answer,
    Hello,
    Open,
    Request,
    answer_decoder,
    hello_decoder,
    pack,
    request_decoder,
)
from tailrace.run import join_requests
from tailrace.scheduling.tasks import TaskSource, TaskStream
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.phase_totals import PhaseUsage
from tailrace.training.checkpoints.files import (
    FileEntry,
    Manifest,
    read_manifest,
    read_trainer_state,
    verify_checkpoint,
)
from tailrace.transport.batches.channels import BatchAcknowledged
from tailrace.transport.batches.codec import read_batch
from tailrace.transport.batches.stores import BatchRef
from tailrace.transport.channels import decode, encode
from tailrace.transport.events.rpc import AppendEvent, EventLogged, FollowLog, LogEnded
from tailrace.transport.keys import read_keys, write_keys
from tailrace.transport.payloads.slab_store import SlabPayloadStore
from tailrace.transport.redis.entries import Message, checked, read_header
from tailrace.transport.samples.codec import decode_samples, encode_samples
from tailrace.transport.segments import TRAILER_BYTES, map_segment, read_segment
from tailrace.transport.weights.deltas import apply_delta, digest_of, encode_delta
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore
from tests.replay.test_capture import group
from tests.scheduling.world import environment
from tests.transport.batches.test_codec import forge
from tests.transport.transport_builders import handed

MOST_BYTES = 16 << 20
"""That a reader may take for any input, mostly to read files by blocks, beside `MOST_TIMES` the input's length."""
MOST_TIMES = 200

INTERESTING = [
    *(b"\x00", b"\xff", b"\x80", b"\xc0", b"\xc1", b"\x7f", b"\xd9\xff", b"\xff\xff\xff\xff", b"\xff" * 8),
    *(b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\x91" * 3000, b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"-1", b"1e999", b"NaN"),
    *(b"\\ud800", b'"', b"}", b"null"),
    *(b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", b"../", b"\x00\n", b""),
]


def mutations(sample: bytes, draw: random.Random, rounds: int) -> Iterator[bytes]:
    """The sample with a few bytes changed, cut, doubled, moved, or replaced by what parsers stumble over."""
    for _ in range(rounds):
        content = bytearray(sample)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            start = draw.randrange(len(content) + 1)
            end = min(len(content), start + draw.choice((0, 1, 1, 2, 4, 8, 64)))
            match draw.randrange(6):
                case 0 if end > start:
                    content[start] ^= 1 << draw.randrange(8)
                case 1 if end > start:
                    content[start] = draw.randrange(256)
                case 2:
                    content[start:end] = draw.choice(INTERESTING)
                case 3:
                    del content[start:]
                case 4:
                    content[start:start] = content[start:end] * draw.choice((1, 2, 50))
                case _:
                    del content[start:end]
        yield bytes(content)


@dataclass
class Reader:
    """A way in for bytes from elsewhere."""

    samples: list[bytes]
    """The first is valid as it is, others may be once they are changed."""
    read: Callable[[bytes], object]
    raises: type[TailraceError]
    cost: int = 1
    """Of a reading, in those of a message: so many times fewer are tried."""


def from_file(path: Path, read: Callable[[Path], object], content: bytes) -> object:
    path.write_bytes(content)
    return read(path)


def completion(size: int = 4) -> Completion:
    ids = np.arange(size, dtype=np.int32)
    chunk = PayloadChunk(0, 6, PayloadRef("memory:1", "uint8", (6, 2, 2)))
    supports = Supports(np.arange(2 * size, dtype=np.int32), np.full(size, 2, np.int32))
    scores = TokenScores(ids.astype(np.float32), np.stack([ids, ids], 1), np.zeros((size, 2), np.float32))
    return Completion(
        token_ids=ids,
        logprobs=ids.astype(np.float32),
        policy_versions=ids,
        finish_reason=FinishReason.STOP,
        routed_experts=(chunk,),
        mixed_spans=((1, 3),),
        supports=supports,
        scores=scores,
        metrics={"decode_s": 1.0},
    )


def calls(folder: Path) -> Reader:
    request = GenerationRequest("r", "s", "g", np.arange(5, dtype=np.int32), SamplingParams(), prefix=completion())
    several = [
        messages.GenerateCall(call_id=1, request=request, wants_chunks=True),
        messages.HelloCall(call_id=2, protocol=messages.PROTOCOL, epoch="e"),
        messages.LoadCall(call_id=3, ref=ModelStateDictRef(1, "file", 100)),
        messages.UploadCall(call_id=4, version=1, upload=Upload(8, "digest"), offset=0),
        messages.InterruptCall(call_id=5, request_ids=frozenset({"a"})),
    ]
    return Reader([encode(several), *map(encode, several)], read_calls, CorruptData)


def read_calls(content: bytes) -> object:
    assert isinstance(messages.call_id_of(content), int)
    return messages.unpack_calls(content)


def replies(folder: Path) -> Reader:
    statistics = EngineStatistics(policy_version=1, running=1, waiting=0, kv_tokens=8, kv_capacity_tokens=64)
    welcome = messages.WelcomeReply(
        call_id=0,
        protocol=messages.PROTOCOL,
        model=ModelIdentity("model"),
        limits=EngineLimits(max_model_tokens=64, vocab_size=512),
        statistics=statistics,
    )
    several = [
        welcome,
        messages.ReportReply(call_id=messages.TO_ALL, statistics=statistics, received=3),
        messages.ChunkReply(call_id=1, chunk=completion()),
        messages.CompletionReply(call_id=1, completion=completion(), payload_frames=1),
        messages.ErrorReply(call_id=1, kind="ErrorBudgetSpent", message="too many"),
        messages.ErrorReply(call_id=1, kind="ChatFailed", message="away"),
    ]
    return Reader([encode(several[:4]), *map(encode, several)], read_replies, CorruptData)


def read_replies(content: bytes) -> None:
    for reply in messages.unpack_replies(content):
        if isinstance(reply, messages.ErrorReply):
            assert isinstance(messages.unpack_error(reply), TailraceError)
        if isinstance(reply, messages.CompletionReply):
            messages.unpack_payloads(reply, [bytes(24)])


def channel_messages(folder: Path) -> Reader:
    trained = StepTrained(epoch="e", step=3, version=3, metrics={"loss": 0.5})
    ended = TrainerEnded(epoch="e", status=RunStatus.FINISHED, step=3, reason="")
    several = [AppendEvent(1, trained), EventLogged(ended), FollowLog(), LogEnded()]
    untagged = [BatchRef(1, "segment", 1, 100), BatchAcknowledged(1)]

    def read(content: bytes) -> None:
        outcomes: list[object] = []
        for kind in (AppendEvent | FollowLog, EventLogged | LogEnded, BatchRef, BatchAcknowledged):
            try:
                outcomes.append(decode(content, kind))  # type: ignore[arg-type]
            except CorruptData as error:
                outcomes.append(error)
        assert len(outcomes) == 4
        if all(isinstance(outcome, CorruptData) for outcome in outcomes):
            raise CorruptData("all refuse it")

    return Reader([*map(encode, several), *map(encode, untagged)], read, CorruptData)


def worker_messages(folder: Path) -> Reader:
    task = Task(TaskId("t"), "words", 0, {"text": "a", "deep": [{"b": [1.5]}]}, 5)
    several = [
        Hello(["/path"], {"words": "{}"}),
        Request(Open(1, task, [{"role": "user", "content": "a"}]), [2]),
        Answer(value={"reward": 1.0, "info": [1, [2, [3]]]}),
        Answer(failure="ValueError: no"),
    ]

    def read(content: bytes) -> None:
        wrong = 0
        for decoder in (hello_decoder, request_decoder, answer_decoder):
            try:
                message = decoder.decode(content)
                if isinstance(message, Answer):
                    pack(message)
            except CorruptData:
                wrong += 1
        if wrong == 3:
            raise CorruptData("all refuse it")

    return Reader([pack(message)[LENGTH_BYTES:] for message in several], read, CorruptData)


def agent_worker_reports(folder: Path) -> Reader:
    branch = Branch()
    branch.extend_context([1, 2, 3])
    branch.extend_completion(completion())
    branch.set_column("weights", [0.5] * 7)
    request = GenerationRequest("r", "s", "g", np.arange(5, dtype=np.int32), SamplingParams())
    result = AgentResult(1.0, {"n": 1.0}, {"deep": [{"b": [1.5]}]})
    several = [
        agents.Played(
            rollout_id=RolloutId("r"),
            branches=[BranchData.of(branch)],
            placed=None,
            turns=1,
            truncated=False,
            report=agents.pack_rollout_report(
                agents.RolloutReport([{"role": "user", "content": "x"}], {"s": 0.1}, result, result)
            ),
            failure=agents.Failure("JudgeFailed", "away", "other", may_pass=True),
        ),
        agents.Ready(thread_id=1, not_loaded={"words": agents.Failure("SettingsError", "no")}),
        agents.Ask(call_id=1, key="r", request=request, wants_chunks=True),
        agents.Withdraw(call_id=1, key="key", has_enough=False),
        agents.Beat(lag_max_s=0.1, phases={"score": PhaseUsage(1, 0.1, 0.1, 0.1, 8, {3: 1}, 0.1)}),
    ]

    def read(content: bytes) -> None:
        report = agents.unpack_report(content)
        if isinstance(report, agents.Played):
            for data in report.branches:
                data.branch()
            agents.unpack_rollout_report(report.report)
            if report.failure is not None:
                assert isinstance(report.failure.error(), TailraceError)

    return Reader([*map(encode, several)], read, CorruptData, 2)


def join_messages(folder: Path) -> Reader:
    """What guests ask, and are answered."""
    several = [
        join_requests.Offer("run", "generator-1", 1, b"{}", b"{}"),
        join_requests.Apply(messages.PROTOCOL),
        join_requests.Release("generator-1", "enough"),
        join_requests.Refused("no room"),
    ]

    def read(content: bytes) -> None:
        refused = 0
        for unpack in (join_requests.unpack_question, partial(join_requests.unpack_answer, address="tcp://host:1")):
            try:
                unpack(content)
            except (CorruptData, SettingsError):
                refused += 1
        if refused == 2:
            raise CorruptData("both refuse it")

    return Reader([*map(encode, several)], read, CorruptData)


def weight_files(folder: Path) -> Reader:
    path = folder / "model.safetensors"
    sample = save({"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.zeros(2, dtype=torch.bfloat16)})
    read = partial(from_file, path, lambda path: require_whole_weights("model", path.parent))
    return Reader([sample], read, ModelError, 10)


def key_files(folder: Path) -> Reader:
    path = folder / "keys"
    write_keys(path, "--key")
    return Reader([path.read_bytes()], partial(from_file, path, partial(read_keys, setting="--key")), SettingsError, 4)


def scheduler_states(folder: Path) -> Reader:
    def stream() -> TaskStream:
        return TaskStream([TaskSource(environment("a", rows=9)), TaskSource(environment("b", rows=9))], seed=0)

    begun = stream()
    for number in range(6):
        key = begun.draw()
        assert key is not None
        if number % 2:
            begun.end(key, trained=number % 3 == 0)
    state = drained(begun.state())

    def read(content: bytes) -> None:
        resumed = stream()
        resumed.restore(content)
        for _ in range(25):  # what was accepted can be gone on with
            key = resumed.draw()
            assert key is not None
            resumed.task_id(key)
            resumed.end(key, trained=True)

    return Reader([state], read, DataError, 10)


def captures(folder: Path) -> Reader:
    writer = BackgroundWriter()
    capturing = CaptureWriter(folder, writer, steps=1, max_bytes=1 << 20, settings_json="{}")
    capturing.write(group())
    writer.close()
    record, columns = next(folder.glob("*.msgpack")), next(folder.glob("*.safetensors"))
    samples = [record.read_bytes(), columns.read_bytes()]

    def read(content: bytes) -> object:
        is_record = content[:1] in (samples[0][:1], b"\x91")
        record.write_bytes(content if is_record else samples[0])
        columns.write_bytes(samples[1] if is_record else content)
        return read_capture(folder)

    return Reader(samples, read, DataError, 20)


def checkpoints(folder: Path) -> Reader:
    state = folder / "trainer.pt"
    torch.save({"step": 3, "version": 3, "randomness": {"torch": torch.get_rng_state()}}, state)
    saved = state.read_bytes()

    def manifest_of(content: bytes) -> bytes:
        entry = FileEntry(len(content), xxhash.xxh3_64_hexdigest(content))
        return msgspec.json.encode(Manifest("tailrace-checkpoint-2", 3, 3, {"trainer.pt": entry}))

    def read(content: bytes) -> None:
        if content[:1] == b"{":
            (folder / "manifest.json").write_bytes(content)
            read_manifest(folder)
            verify_checkpoint(folder)
        else:  # whoever changed it changed its checksum as well
            state.write_bytes(content)
            (folder / "manifest.json").write_bytes(manifest_of(content))
            verify_checkpoint(folder)
            read_trainer_state(folder)

    return Reader([saved, manifest_of(saved)], read, CheckpointError, 20)


def summaries(folder: Path) -> Reader:
    return Reader([b'{"name":"run","status":"finished"}'], lambda content: _summary(folder, content), DataError, 4)


def _summary(folder: Path, content: bytes) -> object:
    (folder / "summary.json").write_bytes(content)
    return read_summary(folder)


def model_state_dicts(folder: Path) -> Reader:
    store = SharedMemoryModelStateDictStore(folder)
    ref = store.publish({"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.zeros(2, dtype=torch.bfloat16)}, 7)
    sample = (folder / ref.uri).read_bytes()

    def read(content: bytes) -> None:
        (folder / "mutated").write_bytes(summed(resealed(content)))
        with store.open(ModelStateDictRef(7, "mutated", 0)) as lent:
            assert lent.version >= 7

    return Reader([sample, sample[:600] + sample[-100:]], read, TransportError, 10)


def weight_folders(folder: Path) -> Reader:
    store, written = SharedMemoryModelStateDictStore(folder), folder / "version_7"
    written.mkdir()
    sample = save({"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.zeros(2, dtype=torch.bfloat16)})

    def read(content: bytes) -> None:
        (written / "model.safetensors").unlink(missing_ok=True)
        (written / "model.safetensors").write_bytes(content)
        with store.open(store.publish_folder(written, 7)) as lent:
            assert lent.version == 7

    return Reader([sample], read, TransportError, 10)


def model_state_dict_names(folder: Path) -> Reader:
    store = SharedMemoryModelStateDictStore(folder)
    ref = store.publish({"weight": torch.zeros(3)}, 7)

    def read(content: bytes) -> None:
        with store.open(ModelStateDictRef(0, content.decode("utf-8", "surrogateescape"), 0)):
            pass

    return Reader([ref.uri.encode()], read, TransportError)


def summed(content: bytes) -> bytes:
    """With the checksum of its tensors, where it is known which bytes those are."""
    try:
        first, last = read_segment("mutated", memoryview(content)).body
    except CorruptData:
        return content
    checksum = xxhash.xxh3_64_intdigest(content[first:last])
    return content[:-16] + checksum.to_bytes(8, "little") + content[-8:]


def resealed(content: bytes) -> bytes:
    """With a trailer that says of the header, wherever it ends, that it is what was written."""
    if len(content) < 40:
        return content
    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 40:
        return content
    checksum = xxhash.xxh3_64_intdigest(content[: 8 + length])
    return content[:-24] + checksum.to_bytes(8, "little") + bytes(8) + (1).to_bytes(8, "little")


def stream_entries(folder: Path) -> Reader:
    """Of Redis: headers, and the bytes that they are of."""
    sample = Message(3, "body", b"x" * 40).header("run", "epoch")

    def read(content: bytes) -> bytes:
        header, data = read_header("stream", [b"header", content, b"data", b"x" * 40])
        return checked("stream", header, data)

    return Reader([sample, sample.replace(b'"num_parts":0', b'"num_parts":2')], read, CorruptData, 4)


def batch_headers(folder: Path) -> Reader:
    sample = forge(folder, {})

    def read(content: bytes) -> object:
        path = folder / "mutated"
        path.write_bytes(resealed(content))
        return read_batch(path, read_segment(path, map_segment(path)))

    return Reader([sample, sample[:5000] + sample[-32:]], read, CorruptData, 10)


def batch_tables(folder: Path) -> Reader:
    """What is in a batch as bytes of its own, under checksums that are right."""
    path = folder / "batch"
    path.write_bytes(forge(folder, {}))
    segment = read_segment(path, map_segment(path))
    tables: dict[str, bytes] = {}
    for name in ("origins", "payload_refs"):
        start, end = segment.tensors[name].data_offsets
        tables[name] = bytes(segment.mapping[start:end])

    def read(content: bytes) -> None:
        refused = []
        for name in tables:
            path.write_bytes(forge(folder, {name: np.frombuffer(content, np.uint8)}))
            try:
                batch = read_batch(path, read_segment(path, map_segment(path)))
                batch.payloads.read(_lost, on_lost=lambda lost: None)
            except CorruptData:
                refused.append(name)
        if len(refused) == len(tables):
            raise CorruptData("all refuse it")

    return Reader([*tables.values()], read, TransportError, 40)


def streamed_samples(folder: Path) -> Reader:
    branch = Branch()
    branch.extend_context([1, 2, 3])
    branch.extend_completion(completion())
    branch.set_column("weights", [0.5] * 6)
    sent = handed(TrainingSample(RolloutId("r"), GroupId("g"), 1.0, branch, 0.5))
    sample = encode_samples([sent, sent], run="run", epoch="epoch")
    length = int.from_bytes(sample[:8], "little")

    def read(content: bytes) -> object:
        """Whoever changed it changed its checksums as well."""
        if len(content) >= len(sample) // 2:
            body = content[8 + length : -TRAILER_BYTES]
            seal = (1, xxhash.xxh3_64_intdigest(content[: 8 + length]), xxhash.xxh3_64_intdigest(body), 1)
            content = content[:-TRAILER_BYTES] + b"".join(part.to_bytes(8, "little") for part in seal)
        return decode_samples(content)

    return Reader([sample], read, TransportError, 10)


def _lost(ref: PayloadRef) -> NoReturn:
    raise PayloadLost(ref.uri)


def payload_references(folder: Path) -> Reader:
    store = SlabPayloadStore(folder, writer="w", slab_bytes=1 << 16)
    ref = store.put(np.arange(24, dtype=np.uint8).reshape(6, 2, 2))
    sample = msgspec.msgpack.encode(ref)

    def read(content: bytes) -> object:
        return store.open(decode(content, PayloadRef))

    return Reader([sample], read, TransportError)


def slabs(folder: Path) -> Reader:
    store = SlabPayloadStore(folder, writer="w", slab_bytes=1 << 16)
    ref = store.put(np.arange(24, dtype=np.uint8).reshape(6, 2, 2))
    path = next(folder.glob("*.slab"))
    sample = path.read_bytes()[:512]
    store.release([ref])
    tally = next(folder.glob("*.released"))
    store.close()

    def read(content: bytes) -> object:
        path.write_bytes(content)
        tally.write_bytes(content[:24])
        reader = SlabPayloadStore(folder)
        try:
            reader.release([ref])
            return reader.open(ref)
        finally:
            reader.close()

    return Reader([sample], read, TransportError, 10)


def deltas(folder: Path) -> Reader:
    first = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8)
    second = first.copy()
    second[::97] ^= 5
    delta = encode_delta(first.data, second.data)
    assert delta is not None

    def read(content: bytes) -> None:
        apply_delta(memoryview(bytearray(first)), memoryview(content))

    return Reader([delta.content], read, CorruptData, 2)


def uploads(folder: Path) -> Reader:
    store = UploadedModelStateDicts(folder)
    upload = Upload(64, digest_of(memoryview(bytes(64))))
    sample = msgspec.msgpack.encode((upload, 0, bytes(64)))

    def read(content: bytes) -> None:
        decoded: tuple[Upload, int, bytes] = decode(content, tuple[Upload, int, bytes])
        store.write(*decoded)

    return Reader([sample], read, TransportError, 4)


READERS = [
    *(calls, replies, channel_messages, worker_messages, key_files, scheduler_states, captures, checkpoints, summaries),
    *(model_state_dicts, weight_folders, model_state_dict_names, batch_headers, batch_tables),
    *(stream_entries, streamed_samples, agent_worker_reports, join_messages, weight_files),
    *(payload_references, slabs, deltas, uploads),
]


def try_all(reader: Reader, seed: int, rounds: int) -> tuple[int, int]:
    """How many inputs were read and refused; anything else than these two fails."""
    draw, read, refused = random.Random(seed), 0, 0
    for sample in reader.samples:
        for content in mutations(sample, draw, rounds // len(reader.samples)):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                reader.read(content)
                read += 1
            except reader.raises:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__} left the reader of {content[:2000]!r}") from error
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before <= MOST_BYTES + MOST_TIMES * len(content), f"{peak - before:,} bytes for {content!r}"
    return read, refused


@pytest.fixture
def measured_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("measured_memory")
@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 2_000), pytest.param(2, 100_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_only_the_error_that_a_reader_names_leaves_it(
    make: Callable[[Path], Reader], seed: int, rounds: int, tmp_path: Path
) -> None:
    reader = make(tmp_path)
    reader.read(reader.samples[0])  # as it is, it can be read
    read, refused = try_all(reader, seed, max(40, rounds // reader.cost))
    assert read + refused > 0
    assert refused > read / 100
