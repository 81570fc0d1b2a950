"""Sizes that this machine's memory cannot hold, found by arithmetic before anything starts, without importing torch.

what there surely is         processes, rollouts of a batch        refused above the memory there is
what may grow to its limit   caches, activations of a row          refused above so many times the memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tailrace.config import RunSettings
from tailrace.config.sources import as_index
from tailrace.errors import SettingsError
from tailrace.lifecycle.launchers import launcher_class
from tailrace.models.files import read_json
from tailrace.models.loading import resolve_model
from tailrace.records import Json
from tailrace.scheduling.tasks import order_bytes

ROLLOUT_BYTES = 5 << 10
"""Of a rollout without tokens, in flight or finished: columns of its branch, frames of its coroutines."""
ENGINE_BYTES = 100 << 20
"""A process that has imported torch has no less to itself."""
WORKER_BYTES = 20 << 20
"""A process for users' code, likewise."""
BEYOND_REASON = 4
"""Of what may never grow to its limit: so many times the memory is beyond any doubt."""
_BYTES = {"float32": 4, "bfloat16": 2}
_CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class Claim:
    """What a setting comes to."""

    num_bytes: int
    of: str
    key: str
    """The setting to lower."""
    times: int = 1
    """The memory, that it may not come to more than."""


def require_room(settings: RunSettings, memory_bytes: int | None = None, *, tasks: Sequence[int] = ()) -> None:
    """Raise `SettingsError`, with the figure, for what this machine's memory (or so many bytes) cannot hold.

    `tasks` are how many each environment trains on. Memory of GPUs is not looked at: their roles say what they lack
    when they start.
    """
    memory_bytes = memory_bytes or total_memory()
    for claim in (*_rollouts(settings), *_processes(settings), *_caches(settings), *_orders(tasks)):
        if claim.num_bytes > claim.times * memory_bytes:
            raise SettingsError(
                f"{claim.of} would take about {_size(claim.num_bytes)} of memory, and this machine has "
                f"{_size(memory_bytes)}: lower {claim.key}",
                key=tuple(map(as_index, claim.key.split("."))),
            )


def total_memory() -> int:
    """Of the machine, or of what its container may use."""
    limits = [psutil.virtual_memory().total]
    for path in _CGROUPS:
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # another kind of system, or no limit
            continue
    return min(limits)


def _rollouts(settings: RunSettings) -> Iterator[Claim]:
    scheduling = settings.scheduling
    batch = int(scheduling.over_sampling * scheduling.batch_size)
    yield Claim(batch * ROLLOUT_BYTES, f"a step's {batch:,} rollouts", "scheduling.batch_size")
    running = min(settings.max_running, scheduling.staleness_budget(settings.max_staleness))
    yield Claim(running * ROLLOUT_BYTES, f"{running:,} rollouts at once", "scheduling.max_in_flight")


def _processes(settings: RunSettings) -> Iterator[Claim]:
    generator, workers = settings.generator, settings.rollouts.workers
    yield Claim(workers * WORKER_BYTES, f"{workers:,} rollout workers", "rollouts.workers")
    if _has_all_elsewhere(settings):
        return
    if not generator.connect:
        engines = generator.replicas.min * generator.tensor_parallel
        yield Claim(engines * ENGINE_BYTES, f"{engines:,} processes of generators", "generator.replicas")
    yield Claim(settings.trainer.ranks * ENGINE_BYTES, f"{settings.trainer.ranks:,} trainer ranks", "trainer.ranks")
    agents = settings.rollouts.num_agent_workers
    yield Claim(agents * WORKER_BYTES, f"{agents:,} agent workers", "rollouts.agent_workers")


def _caches(settings: RunSettings) -> Iterator[Claim]:
    """Of models whose widths a folder of this machine tells: others would have to be looked up with transformers."""
    if _has_all_elsewhere(settings):
        return
    source = resolve_model(settings.model.name)
    config = read_json(Path(source.location) / "config.json") if source.is_local and not source.gguf_file else {}
    generator, trainer = settings.generator, settings.trainer
    layers, hidden, keys = (
        _number(config, name) for name in ("num_hidden_layers", "hidden_size", "num_key_value_heads")
    )
    heads = _number(config, "num_attention_heads")
    head_size = _number(config, "head_dim") or hidden // max(heads, 1)
    if not generator.connect and not generator.device.startswith("cuda") and generator.engine == "torch":
        tokens = generator.concurrency * settings.max_model_tokens
        width = 2 * layers * (keys or heads) * head_size * _BYTES[settings.model.dtype]
        what = f"keys and values of {generator.concurrency:,} requests of {settings.max_model_tokens:,} tokens"
        yield Claim(generator.replicas.min * tokens * width, what, "generator.slots", BEYOND_REASON)
    if trainer.feed == "batch" and not trainer.device.startswith("cuda"):
        tokens = settings.scheduling.row_tokens
        inputs = layers * hidden * 4 * -(-tokens // trainer.sequence_parallel)
        yield Claim(inputs, f"layers' inputs of a row of {tokens:,} tokens", "scheduling.row_tokens", BEYOND_REASON)


def _has_all_elsewhere(settings: RunSettings) -> bool:
    """Whether the roles are on machines of a cluster, whose memory is not known here."""
    return launcher_class(settings.placement).finds_devices


def _orders(tasks: Sequence[int]) -> Iterator[Claim]:
    """Of data sets; their rows may be made when they are asked for."""
    for index, count in enumerate(tasks):
        yield Claim(order_bytes(count), f"the order of {count:,} tasks", f"environments.{index}.args")


def _number(config: Mapping[str, Json], name: str) -> int:
    """0 where it is not told; of models of text and more, that of the text."""
    text = config.get("text_config")
    value = (text if isinstance(text, dict) else config).get(name)
    return value if isinstance(value, int) else 0


def _size(num_bytes: int) -> str:
    """For people.

    >>> _size(24_960_000_000), _size(5_000_000_000_000)
    ('25.0 GB', '5.0 TB')
    """
    return f"{num_bytes / 1e12:,.1f} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:,.1f} GB"
