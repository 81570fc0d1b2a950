"""`tailrace serve`: a generator that no run started, for runs with `generator.connect`, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from tailrace.config.serving import ServeSettings
from tailrace.gateway import Gateway, require_free_ports
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.rpc.server import GeneratorServer, StandAlone
from tailrace.generation.rpc.uploads import UploadedModelStateDicts
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.signals import StopSignals
from tailrace.models.identity import identify
from tailrace.models.loading import require_weights, tokenizer_folder
from tailrace.records import Completion, GenerationRequest, OnChunk
from tailrace.rollouts import ChatRenderer
from tailrace.run.asked import asked_policies
from tailrace.run.engines import build_engine, engine_factory, require_engine
from tailrace.run.outside import require_gateway
from tailrace.run.ranks import follow_rank, own_device, torchrun_rank
from tailrace.transport.keys import read_http_key, read_or_write_keys, require_safe_address, write_http_key
from tailrace.transport.owned_folders import OwnedFolder, own_shared_memory, remove_leftovers
from tailrace.transport.payloads.store import MemoryPayloadStore

ADDRESS = "tcp://127.0.0.1:5757"
"""Where it listens unless told otherwise."""


async def serve(
    settings: ServeSettings,
    address: str,
    key: Path | None,
    say: Callable[[str], None],
    *,
    http_key: Path | None = None,
) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit status. `say` prints. Raises `SettingsError`, `ModelError`.

    With a section `gateway` HTTP clients are answered too, that have the key in the file `http_key`.
    """
    rank = torchrun_rank(settings.generator)
    if rank is not None:
        os.environ.update(own_device(settings.generator, rank))
    if rank is not None and rank.number:
        require_engine(settings.generator)
        await asyncio.to_thread(require_weights, settings.model.name)
        follow_rank(partial(build_engine, settings.model, settings.generator), rank)
        return ExitCode.FINISHED
    require_gateway(settings.gateway is not None, "--http")
    if settings.gateway is not None:
        require_free_ports(settings.gateway)
    require_safe_address(address, has_keys=key is not None, setting="--address", key_setting="--key")
    copy_to = "where the run is, and name it there with --generator.connect_key"
    keys = await asyncio.to_thread(read_or_write_keys, key, "--key", say, copy_to=copy_to) if key else None
    http_clients = await asyncio.to_thread(_http_key, http_key, say) if settings.gateway is not None else ""
    require_weights(settings.model.name)
    await asyncio.to_thread(remove_leftovers)
    with own_shared_memory(uuid.uuid4().hex) as shared_memory, contextlib.ExitStack() as stack:
        uploads = UploadedModelStateDicts(shared_memory.path)
        stack.callback(uploads.close)
        payloads = MemoryPayloadStore()
        new_generator = partial(
            Generator,
            engine_factory(settings.model, settings.generator, rank),
            settings.generator.weights,
            payloads=payloads,
        )
        generator = new_generator()
        server = GeneratorServer(
            generator,
            uploads.open,
            address,
            model=await asyncio.to_thread(identify, settings.model.name),
            report_every_s=settings.generator.router.report_every_s,
            forwarded=payloads,
            stand_alone=StandAlone(None if settings.generator.lockstep else new_generator, uploads, keys),
        )
        stack.callback(server.close)
        await generator.ready()
        say(f"{settings.model.name} is served at {server.address}; use it with --generator.connect {server.address}")
        async with _http(settings, server, http_clients, say):
            return await _until_signal(server, shared_memory)


@contextlib.asynccontextmanager
async def _http(
    settings: ServeSettings, server: GeneratorServer, key: str, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Answers HTTP clients inside, where the settings ask for it: each request is a rollout that nobody trains on."""
    if settings.gateway is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        files = await asyncio.to_thread(tokenizer_folder, settings.model.name, Path(folder))
        renderer = await asyncio.to_thread(partial(ChatRenderer, files, name=settings.model.name))

    async def generate(request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        return await server.generator.generate(request, on_chunk)  # not always the same one: a run begins with its own

    new_policy = asked_policies(renderer, generate, settings.max_model_tokens)
    async with Gateway(settings.gateway, model=settings.model.name) as gateway:
        await gateway.serve(key, new_policy)
        say(f"HTTP clients are answered at {gateway.public_url} (OpenAI's: {gateway.public_url}/v1)")
        yield


def _http_key(path: Path | None, say: Callable[[str], None]) -> str:
    """That of the file; where there is none yet, a fresh one."""
    if path is not None and os.path.exists(path):
        return read_http_key(path, "--http-key")
    key = secrets.token_urlsafe(24)
    if path is None:
        say(f"the key of HTTP clients is {key}")
        return key
    write_http_key(path, key, "--http-key")
    say(f"wrote a new key for HTTP clients to {path}")
    return key


async def _until_signal(server: GeneratorServer, shared_memory: OwnedFolder) -> int:
    """Once: it ends its requests, and closes. Twice: at once."""
    serving = asyncio.ensure_future(server.serve())

    def end_at_once(code: ExitCode) -> NoReturn:
        shared_memory.remove()
        os._exit(code)

    with StopSignals(lambda code: serving.cancel(), abort=end_at_once) as signals:
        try:
            await serving
        except asyncio.CancelledError:
            if signals.exit_code is None:
                raise
    return signals.exit_code or ExitCode.FAILED
