"""How generators that no run started ask to join one that goes on: `tailrace serve --join`.

    generator                         run
      Apply (protocol) ─────────────► a place in the pool, or Refused
      ◄──────────────── Offer (name, settings)
      Announce (address, model) ────► the same model? then it is connected to, as any other generator
      ◄──────────────── Accepted, or Refused
      listens at its address ◄═══════ requests and weights

`join.json` in the run's folder tells where the run listens: at a socket that only this user of this host can reach, and
where `generator.join_address` says so, at one for other hosts, which only holders of the run's key are let in by.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from tailrace.cancelling import cancelled
from tailrace.config import RunSettings
from tailrace.config.serving import ServeSettings
from tailrace.errors import CorruptData, ModelError, SettingsError
from tailrace.generation.rpc.client import BringWeights, LendWeights
from tailrace.generation.rpc.messages import PROTOCOL
from tailrace.guards import guarded
from tailrace.models.identity import ModelIdentity, identify
from tailrace.run.engines import with_adapters
from tailrace.run.folder import announcement_file, writing
from tailrace.run.generators import Generators
from tailrace.run.replica_pool import Place
from tailrace.run.replica_sources import JoinedGenerator, contradiction
from tailrace.transport.channels import CLOSE_LINGER_MS, Listener, PeerMonitor, encode, ipc_address, received
from tailrace.transport.keys import CurveKeys, read_or_write_keys, require_safe_address
from tailrace.transport.owned_folders import own_socket_folder
from tailrace.transport.payloads.accounts import PayloadAccounts

_logger = logging.getLogger(__name__)

ANNOUNCED_WITHIN_S = 120.0
"""How long a place is kept for a generator that was offered it: it reads a sample of its model's files meanwhile."""
ANSWERED_WITHIN_S = 60.0
"""How long a generator waits for the run's answer."""


class Apply(msgspec.Struct, frozen=True, tag=True):
    """A generator asks for a place. This one stays readable across versions."""

    protocol: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A place, kept for a while."""

    run: str
    name: str
    """That the generator has in the run."""
    life: int
    """How many had it before."""
    settings: bytes
    """`ServeSettings`, as JSON: what to serve, and how."""
    role: bytes = b""
    """`RoleSettings`, as JSON, for a generator on this host: where weights and payloads lie."""


class Announce(msgspec.Struct, frozen=True, tag=True):
    """The generator is about to listen."""

    name: str
    life: int
    address: str
    model: ModelIdentity
    slots: int
    max_model_tokens: int


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The generator does not come: its place is free for another."""

    name: str
    life: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Done."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """And why."""

    reason: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Somebody asks that a generator be let go."""

    name: str
    reason: str


Question: TypeAlias = Apply | Announce | Withdraw | Release
Answer: TypeAlias = Offer | Accepted | Refused
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def unpack_question(frame: bytes) -> Question:
    """Raises `CorruptData` for bytes that are none."""
    with guarded("it is no request to join or leave"):
        return _QUESTIONS.decode(frame)


def unpack_answer(frame: bytes, address: str) -> Answer:
    """Raises `SettingsError` for bytes that are none: what listens at that address is no run."""
    with guarded(f"--join: what listens at {address} is no run", SettingsError):
        return _ANSWERS.decode(frame)


class JoinPlace(msgspec.Struct, frozen=True):
    """What `join.json` holds."""

    here: str
    """The address for generators on this host."""
    elsewhere: str = ""
    """For other hosts, with the run's key; empty without."""


@dataclass(slots=True)
class JoinHandler:
    """Answers requests to join or leave one run, on its event loop."""

    settings: RunSettings
    generators: Generators
    epoch: str
    role: bytes
    """`RoleSettings` of the run, as JSON; empty where generators on this host do not see its memory either."""
    lend: LendWeights
    bring: BringWeights | None = None
    """To this host, from which they are lent."""
    payloads: PayloadAccounts | None = None
    _kept: dict[Place, asyncio.TimerHandle] = field(default_factory=dict)
    """Places that were offered, until they are taken or forgotten."""

    async def answer(self, question: Question, keys: CurveKeys | None, *, is_here: bool) -> Answer:
        """`keys` are those of the socket that it came through, `is_here` whether that is for this host alone."""
        match question:
            case Apply(protocol=protocol):
                return self._offer(protocol, is_here=is_here)
            case Announce():
                return await self._announced(question, keys, is_here=is_here)
            case Withdraw(name=name, life=life):
                if (timer := self._kept.get(Place(name, life))) is not None:
                    timer.cancel()
                    self._forget(Place(name, life))
                return Accepted()
            case Release(name=name, reason=reason):
                return self._release(name, reason)

    def _offer(self, protocol: int, *, is_here: bool) -> Offer | Refused:
        if protocol != PROTOCOL:
            return Refused(
                f"the run {self.settings.name} speaks version {PROTOCOL} of the protocol, this generator version "
                f"{protocol}: install the same version of Tailrace on both sides"
            )
        place = self.generators.take_in()
        if place is None:
            pool = self.generators.pool
            coming = pool.present - pool.serving
            on_the_way = f", {coming} of them on the way" if coming else ""
            is_full = pool.present >= pool.most
            why = "as many as generator.replicas.max allows" if is_full else "and many others that are still leaving"
            return Refused(f"the run {self.settings.name} has {pool.present} generators{on_the_way}, {why}")
        loop = asyncio.get_running_loop()
        self._kept[place] = loop.call_later(ANNOUNCED_WITHIN_S, self._forget, place)
        chosen = self.settings
        served = ServeSettings(model=chosen.model, generator=with_adapters(chosen.generator, chosen.trainer.lora))
        offered = served.model_dump_json(exclude={"generator": {"replicas", "join_address", "join_key"}}).encode()
        return Offer(chosen.name, place.name, place.life, offered, self.role if is_here else b"")

    async def _announced(self, announced: Announce, keys: CurveKeys | None, *, is_here: bool) -> Accepted | Refused:
        place = Place(announced.name, announced.life)
        if place not in self._kept:
            return Refused(f"{place.name} has no place kept for it: it took longer than {ANNOUNCED_WITHIN_S:g} s")
        self._kept.pop(place).cancel()
        if reason := await self._objection(announced, keys):
            self.generators.refuse(place)
            _logger.warning("a generator at %s is not taken in: %s", announced.address, reason)
            return Refused(reason)
        self.generators.host(
            JoinedGenerator(
                place.name,
                announced.address,
                self.settings,
                epoch=self.epoch,
                slots=announced.slots,
                instance=f"{place.name}.{place.life}",
                keys=None if announced.address.startswith("ipc:") else keys,
                lend=None if is_here and self.role else self.lend,
                bring=self.bring,
                payloads=self.payloads,
                on_leaving=lambda reason: self.generators.release(place.name, reason),
            )
        )
        return Accepted()

    async def _objection(self, announced: Announce, keys: CurveKeys | None) -> str:
        """Why it cannot serve the run; empty where it can."""
        try:
            has_keys = keys is not None
            require_safe_address(announced.address, has_keys=has_keys, setting="--address", key_setting="--key")
            own = await asyncio.to_thread(identify, self.settings.model.name)
        except (SettingsError, ModelError, OSError) as error:  # OSError: the model's files went away meanwhile
            return str(error)
        if what := await asyncio.to_thread(contradiction, own, announced.model, with_weights=True):
            return f"the generator at {announced.address} serves {announced.model.name}, {what}"
        if announced.max_model_tokens < self.settings.max_model_tokens:
            return (
                f"its slots hold {announced.max_model_tokens} tokens, and requests of the run have up to "
                f"{self.settings.max_model_tokens}: raise --generator.max_cache_tokens"
            )
        return ""

    def _release(self, name: str, reason: str) -> Accepted | Refused:
        served = [replica.name for replica in self.generators.router.replicas if replica.serving]
        if name not in served:
            return Refused(f"no generator {name} serves the run {self.settings.name}: there are {', '.join(served)}")
        self.generators.release(name, reason)
        return Accepted()

    def _forget(self, place: Place) -> None:
        del self._kept[place]
        self.generators.refuse(place)

    def close(self) -> None:
        """Forget whom places are kept for."""
        for timer in self._kept.values():
            timer.cancel()


class JoinListener:
    """One socket at which generators ask. Make it on a running event loop. Raises `SettingsError`."""

    def __init__(self, address: str, handler: JoinHandler, keys: CurveKeys | None = None, *, is_here: bool) -> None:
        self._handler, self._keys, self._is_here = handler, keys, is_here
        self._listener = Listener(address, keys)
        try:
            self._listener.bind()
        except zmq.ZMQError as error:
            raise SettingsError(f"generator.join_address: cannot listen at {address}: {error}") from error
        self.address = self._listener.address
        """Where it listens; port 0 is resolved to the chosen one."""
        self._answering = asyncio.create_task(self._answer(), name=f"requests to join at {self.address}")

    async def _answer(self) -> None:
        """Waits for questions, one after the other, until the run is over."""
        while True:
            sender, *frames = await received(self._listener.socket)
            answer: Answer
            try:
                question = unpack_question(b"".join(frames))
                answer = await self._handler.answer(question, self._keys, is_here=self._is_here)
            except CorruptData as error:
                answer = Refused(f"the run cannot read what it was sent: {error}")
            except Exception as error:  # of any kind: others may still join
                _logger.exception("a generator that asks to join is not answered")
                answer = Refused(f"the run cannot answer: {error!r}")
            await self._listener.socket.send_multipart([sender, encode(answer)])

    async def close(self) -> None:
        """Nobody may join any more."""
        await cancelled(self._answering)
        self._listener.close()


@contextlib.asynccontextmanager
async def listen_for_generators(handler: JoinHandler, path: Path) -> AsyncIterator[None]:
    """Let generators join while inside; `path` is the file that says where. Raises `SettingsError`, `DataError`."""
    chosen = handler.settings.generator
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(handler.close)
        folder = stack.enter_context(own_socket_folder(handler.epoch))
        listeners = [JoinListener(ipc_address(folder.path, "join"), handler, is_here=True)]
        stack.push_async_callback(listeners[0].close)
        if chosen.join_address is not None:
            keys = None if chosen.join_key is None else await asyncio.to_thread(_join_keys, Path(chosen.join_key))
            listeners.append(JoinListener(chosen.join_address, handler, keys, is_here=False))
            stack.push_async_callback(listeners[1].close)
        with writing(path.parent):
            place = JoinPlace(*(listener.address for listener in listeners))
            stack.enter_context(announcement_file(path, msgspec.json.encode(place)))
        for listener in listeners:
            _logger.info("generators may join at %s", listener.address)
        yield


def _join_keys(path: Path) -> CurveKeys:
    copy_to = "where generators join from (tailrace serve --key)"
    return read_or_write_keys(path, "generator.join_key", _logger.info, copy_to=copy_to)


class JoinClient:
    """The generator's end. An async context manager. Make it on a running event loop."""

    def __init__(self, address: str, keys: CurveKeys | None = None, asked_by: str = "--join") -> None:
        """`asked_by` is what people gave, by which errors begin."""
        self._address, self._asked_by = address, asked_by
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        if keys:
            keys.apply_to_client(self._socket)
        self._monitor = PeerMonitor(self._socket, refusals=True)
        self._socket.connect(address)
        self._connected = asyncio.Event()
        self._gone = asyncio.create_task(self._monitor.watch(self._connected.set), name=f"the run at {address}")

    async def connected(self, within_s: float) -> None:
        """Wait for the run to be there. Raises `SettingsError`."""
        waiting = asyncio.ensure_future(self._connected.wait())
        await asyncio.wait({waiting, self._gone}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._gone.done():
            raise self._refusal()
        if not self._connected.is_set():
            raise SettingsError(
                f"{self._asked_by}: no run takes generators in at {self._address} within {within_s:g} s"
            )

    async def ask(self, question: Question) -> Offer | Accepted:
        """Ask, and wait for the answer. Raises `SettingsError` where it is a refusal, or none comes."""
        await self._socket.send(encode(question))
        answering = asyncio.ensure_future(received(self._socket))
        try:
            await asyncio.wait({answering, self._gone}, timeout=ANSWERED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not (has_answered := answering.done()):
                answering.cancel()
        if not has_answered:
            if self._gone.done():
                raise self._refusal()
            raise SettingsError(
                f"{self._asked_by}: the run at {self._address} does not answer within {ANSWERED_WITHIN_S:g} s"
            )
        answer = unpack_answer(b"".join(answering.result()), self._address)
        if isinstance(answer, Refused):
            raise SettingsError(f"{self._asked_by}: {answer.reason}")
        return answer

    def _refusal(self) -> SettingsError:
        if self._connected.is_set():
            return SettingsError(f"{self._asked_by}: the run at {self._address} has ended")
        return SettingsError(
            f"--key: what listens at {self._address} ({self._asked_by}) refuses the connection: give the file that is "
            "the run's generator.join_key, or none where it has none"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(self._gone)
        self._monitor.close()
        self._socket.close(linger=CLOSE_LINGER_MS)
