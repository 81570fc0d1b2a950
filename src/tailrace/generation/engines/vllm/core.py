"""Builds vLLM's engine core in this process and this thread, from our settings."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import psutil
import torch
from pydantic import ValidationError

from tailrace.errors import EngineFailed, HubNotAnswering, ModelError, SettingsError
from tailrace.generation.engines.vllm.adapters import adapter_options
from tailrace.generation.engines.vllm.nodes import Nodes
from tailrace.generation.engines.vllm.options import require_vllm
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.models.files import own_context
from tailrace.models.loading import ModelSource, hub_is_away, resolve_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor
    from vllm.v1.worker.worker_base import WorkerBase

Options: TypeAlias = dict[str, Any]
"""Options of vLLM's engine by name."""

WORKER_DIED = "a worker process of vLLM died or was ended; the log has what it wrote last"

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, so that the loop owns each step
    "VLLM_NO_USAGE_STATS": "1",
}
_DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each worker of tensor parallelism wants a memory node of its own
}
_SHARED_MEMORY = Path("/dev/shm")
_CACHE_SHARE_OF_MEMORY = 0.25
"""Of the memory that is free, on a CPU, for keys and values, where nothing else is chosen."""


def build_core(
    model: ModelSettings,
    generator: GeneratorSettings,
    *,
    nodes: Nodes | None = None,
    asynchronous_scheduling: bool | None = None,
) -> InprocClient:
    """The engine core, its model loaded. Call it in the thread that will step it.

    Waits for the other nodes of `nodes`, of which this is the first. Asynchronous scheduling keeps one step in flight;
    vLLM itself decides where it pays, unless told otherwise.

    Raises `SettingsError` for a missing vLLM and for an option or value that it does not take, and `ModelError` for a
    model that it cannot load.
    """
    source = _prepare_process(model, generator, nodes)
    with _contained():
        config = make_config(source, model, generator, nodes)
        if asynchronous_scheduling is not None:
            config.scheduler_config.async_scheduling = asynchronous_scheduling
        return start_core(config, source)


def hold_workers(model: ModelSettings, generator: GeneratorSettings, nodes: Nodes) -> NoReturn:
    """What a node but the first does: start its workers, which the first one's engine drives, and wait for their end.

    Raises `SettingsError` and `ModelError` as `build_core` does, and `EngineFailed` once a worker has ended.
    """
    source = _prepare_process(model, generator, nodes)
    with _contained():
        config = make_config(source, model, generator, nodes)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        try:
            executor = MultiprocExecutor(config, monitor_workers=False)
        except Exception as error:  # vLLM raises no other for a worker that could not start
            raise _cannot_load(source, error) from error
        executor.start_worker_monitor(inline=True)
    raise EngineFailed(WORKER_DIED)


def _prepare_process(model: ModelSettings, generator: GeneratorSettings, nodes: Nodes | None) -> ModelSource:
    """Say what vLLM reads from the environment, and find the model. Raises `SettingsError` and `ModelError`."""
    require_vllm(generator)
    source = resolve_model(model.name)
    if source.gguf_file is not None:
        raise ModelError(
            f"model {model.name!r} is a GGUF file, which the vLLM engine does not read: save it as a folder first "
            "(`tailrace fetch-smollm2 FOLDER` does so for SmolLM2), or choose generator.engine = 'torch'"
        )
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if nodes is not None:
        os.environ["VLLM_HOST_IP"] = nodes.own_host
    elif _is_on_one_host(generator):
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault("OMP_NUM_THREADS", str(generator.threads))  # of worker processes
    torch.set_num_threads(generator.threads)
    return source


def make_config(
    source: ModelSource, model: ModelSettings, generator: GeneratorSettings, nodes: Nodes | None = None
) -> VllmConfig:
    """vLLM's whole configuration. Raises `SettingsError` and `ModelError`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if generator.batch_invariant:
        if not current_platform.is_cuda_alike():
            raise SettingsError("generator.batch_invariant: vLLM keeps this promise on GPUs only; leave it off")
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if generator.return_routed_experts and current_platform.is_cpu():
        raise SettingsError(
            "generator.return_routed_experts: vLLM returns them on GPUs only; leave it off, or choose "
            "generator.engine = 'torch'"
        )
    if generator.vllm.get("return_sampling_mask") and current_platform.is_cpu():
        raise SettingsError(
            "generator.vllm.return_sampling_mask: vLLM returns what top-p and top-k left on GPUs only; leave it off, "
            "or choose generator.engine = 'torch'"
        )
    options = _options(source, model, generator) | (nodes.options if nodes is not None else {})
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        options.setdefault("enforce_eager", True)  # compiling takes a minute and needs a compiler
    try:
        config = EngineArgs(**options).create_engine_config()
    except ValidationError as error:
        raise _of_option(error, generator) or _cannot_load(source, error) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _cannot_load(source, error) from error
    if on_cpu and config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = _cpu_cache_bytes(config)
    return config


def start_core(config: VllmConfig, source: ModelSource) -> InprocClient:
    """Load the model and make the cache. Raises `ModelError`."""
    from vllm.v1.engine.core_client import EngineCoreClient

    try:
        core: InprocClient = EngineCoreClient.make_client(
            multiprocess_mode=False,
            asyncio_mode=False,
            vllm_config=config,
            executor_class=_executor(config),
            log_stats=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise _cannot_load(source, error) from error
    if config.parallel_config.world_size > 1 and _SHARED_MEMORY.is_dir():
        core.collective_rpc(_forget_shared_names)
    return core


def _forget_shared_names(worker: WorkerBase) -> None:
    """Runs on every worker. On a CPU they sum in shared memory that all have mapped by now, whose names nobody removes
    later: this way it goes with the last of them, however they end.
    """
    mine = f"-cpushm_{worker.rank}"
    for path in _SHARED_MEMORY.iterdir():
        if path.name.startswith(f"{os.environ.get('VLLM_DIST_IDENT')}-") and path.name.endswith(mine):
            path.unlink(missing_ok=True)


def _is_on_one_host(generator: GeneratorSettings) -> bool:
    """Whether all ranks of the model run here, so that they may meet at the loopback address."""
    world = os.environ.get("WORLD_SIZE", "1")  # torchrun's, as the next one
    return (
        generator.vllm.get("distributed_executor_backend") != "ray"
        and generator.vllm.get("nnodes", 1) == 1
        and os.environ.get("LOCAL_WORLD_SIZE", world) == world
    )


def _executor(config: VllmConfig) -> type[Executor]:
    """vLLM's own choice; where others start the ranks, that one with a meeting place of its own."""
    from vllm.v1.executor import Executor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class LockstepExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        """Its ranks share memory under a name made of this address, and `env://` is the same for every engine."""

        def _distributed_args(self) -> tuple[str, int, int]:
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return address, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    chosen: type[Executor] = Executor.get_class(config)
    return LockstepExecutor if chosen is ExecutorWithExternalLauncher else chosen


def _options(source: ModelSource, model: ModelSettings, generator: GeneratorSettings) -> Options:
    """Ours in vLLM's terms, under what `generator.vllm` says."""
    capacity = min(model.max_model_tokens or generator.max_cache_tokens, generator.max_cache_tokens)
    return {
        "max_num_seqs": generator.slots,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        **generator.vllm,
        **adapter_options(generator.vllm),
        "model": source.location,
        "dtype": model.dtype,
        "max_model_len": min(capacity, _positions(source) or capacity),
        "tensor_parallel_size": generator.tensor_parallel,
        **({"distributed_executor_backend": "external_launcher"} if generator.lockstep else {}),
        "seed": as_numpy_seed(generator.seed or 0),
        **({"enable_return_routed_experts": True} if generator.return_routed_experts else {}),
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
    }


def as_numpy_seed(seed: int) -> int:
    """vLLM seeds NumPy's global generator, too, which takes 32 bits."""
    return seed % 2**32


def _positions(source: ModelSource) -> int | None:
    """Tokens that the model was made for. Raises `ModelError` for a config that cannot be read."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source.location)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot_load(source, error) from error
    return own_context(config.get_text_config().to_dict())


def _cpu_cache_bytes(config: VllmConfig) -> int:
    """Room for every slot's longest context, and at most a share of the free memory.

    vLLM's own default takes nearly all of it.
    """
    model, parallel = config.model_config, config.parallel_config
    per_token = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * torch.empty(0, dtype=model.dtype).element_size()
    )
    wanted = config.scheduler_config.max_num_seqs * (model.max_model_len + config.cache_config.block_size) * per_token
    most = int(psutil.virtual_memory().available * _CACHE_SHARE_OF_MEMORY) // parallel.tensor_parallel_size
    return int(min(wanted, most))


def _of_option(error: ValidationError, generator: GeneratorSettings) -> SettingsError | None:
    """When the value of one of the user's options is what is wrong."""
    for problem in error.errors():
        for name in generator.vllm:
            if name in problem["loc"] or any(str(part).endswith(name) for part in problem["loc"]):
                return SettingsError(f"generator.vllm.{name} = {generator.vllm[name]!r}: {problem['msg']}")
    return None


def _cannot_load(source: ModelSource, error: Exception) -> ModelError:
    """`HubNotAnswering` where it may pass."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = " ".join(lines[:3]) if lines else type(error).__name__
    kind = HubNotAnswering if hub_is_away(error) else ModelError
    return kind(f"model {source.name!r} cannot be run by vLLM: {found}")


@contextmanager
def _contained() -> Iterator[None]:
    """Undo what building a worker does to the whole process: vLLM's CPU worker disables `torch.set_num_threads`."""
    set_num_threads = torch.set_num_threads
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
