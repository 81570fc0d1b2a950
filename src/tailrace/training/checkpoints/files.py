"""Checkpoints: one folder per step, complete or absent.

    checkpoints/step_000050/
      config.json, model.safetensors, tokenizer.json, chat_template.jinja, ...   what `from_pretrained` loads
      optimizer/         the optimizer's moments: each rank's shares in a file of its own (torch DCP)
      adapter/           with LoRA, whose sum with the frozen weights is in model.safetensors: what peft loads
      trainer.pt         step, version, randomness
      manifest.json      written last: size and checksum of every other file

Training stands still while the state is copied (`stage`); a thread writes the copies while it goes on. Written under a
temporary name, synced, then renamed. A folder without a manifest is no checkpoint; files that differ from the manifest
are refused. Any number of ranks reads what any other number wrote.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tailrace.errors import CheckpointError, ModelError, RankLost
from tailrace.guards import guarded, read_at_most
from tailrace.models.loading import load_causal_lm, quiet_transformers
from tailrace.output_files import sync
from tailrace.training.checkpoints.moments import (
    Moments,
    Shares,
    copy_moments,
    empty_moments,
    other_optimizer,
    read_moments,
    set_moments,
    write_moments,
)
from tailrace.training.model.adapter import ADAPTER, Adapter, AdapterCopy, plain_weights, require_own_kind
from tailrace.training.model.sharding import own_part
from tailrace.training.ranks import ALONE, Ranks
from tailrace.training.settings.trainer import OptimizerName
from tailrace.training.step.optimizer import optimizer_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 64 << 20
_MOST_AHEAD_BYTES = 1 << 30
"""Of weights, which other ranks gather before rank 0 has copied them."""
TRAINER_STATE = "trainer.pt"
OPTIMIZER = "optimizer"
_FORMAT = "tailrace-checkpoint-2"
_STEP_FOLDER = re.compile(r"^step_(\d{6,})$")
_TEMPORARY, _REPLACED = ".writing_", "_replaced"

_log = logging.getLogger(__name__)


class TrainerState(NamedTuple):
    """All of a trainer but its weights, its optimizer and the state of random generators."""

    step: int
    version: int
    skipped_in_a_row: int


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """Copies of all that a checkpoint holds, of which `write` makes one while training goes on."""

    folder: Path
    """That checkpoints go to."""
    state: TrainerState
    model: PreTrainedModel
    """For its configuration alone."""
    tokenizer: Mapping[str, bytes]
    """Its files, by their names."""
    weights: Mapping[str, Tensor]
    """All of them, on the CPU; nothing on a rank that is not 0."""
    moments: Moments
    """This rank's shares."""
    randomness: dict[str, Any]
    adapter: AdapterCopy | None
    ranks: Ranks

    @property
    def _final(self) -> Path:
        return self.folder / f"step_{self.state.step:06d}"

    @property
    def _temporary(self) -> Path:
        return self.folder / f"{_TEMPORARY}{self._final.name}"

    def write(self) -> Path:
        """Return the checkpoint's path once it is durable. All ranks call it, each in a thread of its own.

        Raises `CheckpointError`, and `RankLost` where another rank is gone, after removing what was written; what was
        there before is intact.
        """
        try:
            write_moments(self._temporary / OPTIMIZER, self.moments, self.ranks)
            if self.ranks.rank == 0:
                self._write_rest(self._temporary)
                _publish(self._temporary, self._final)
        except RankLost:
            self._remove()
            raise
        except (Exception, CheckpointException) as error:  # libraries raise what they like, and DCP no Exception
            self._remove()
            raise _not_written(self._final, error) from error
        return self._final

    def _remove(self) -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
            put_back(self.folder)

    def _write_rest(self, folder: Path) -> None:
        for name, content in self.tokenizer.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        with quiet_transformers():
            self.model.save_pretrained(folder, state_dict=dict(self.weights))
        if self.adapter is not None:
            self.adapter.write(folder / ADAPTER)
        with (folder / TRAINER_STATE).open("wb") as file:
            torch.save(self.state._asdict() | {"randomness": self.randomness}, file)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = {str(path.relative_to(folder)): _entry(path) for path in files}
        for path in (*files, *{path.parent for path in files}):
            sync(path)
        manifest = Manifest(format=_FORMAT, step=self.state.step, version=self.state.version, files=entries)
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        sync(folder / MANIFEST)
        sync(folder)


class FileEntry(msgspec.Struct, frozen=True):
    """Expected size and checksum of a file."""

    num_bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True):
    """Makes a folder a checkpoint."""

    format: str
    step: int
    version: int
    files: dict[str, FileEntry]


def stage(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Mapping[str, bytes],
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    *,
    adapter: Adapter | None = None,
    ranks: Ranks = ALONE,
) -> StagedCheckpoint:
    """Copy what a checkpoint under `folder` holds, and begin its folder. All ranks call it together.

    The files of the `tokenizer` are by their names. Raises `CheckpointError`.
    """
    randomness = _randomness()
    with ranks.exchanging():
        weights = _copy_weights(model, ranks)
        own = None if adapter is None else adapter.copy(keep=ranks.rank == 0)
    moments = copy_moments(model, optimizer, ranks)
    staged = StagedCheckpoint(folder, state, model, tokenizer, weights, moments, randomness, own, ranks)
    ranks.agree(lambda: _begin(folder, staged.state.step) if ranks.rank == 0 else None, of_checkpoint=True)
    return staged


def read_checkpoint(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    *,
    adapter: Adapter | None = None,
    ranks: Ranks = ALONE,
) -> TrainerState:
    """Load the checkpoint at `path` into a model, its adapter and its optimizer, restore random generators, return the
    rest.

    Raises `CheckpointError` for an incomplete checkpoint, or one of another model or adapter, on all ranks alike.
    """
    return ranks.agree(lambda: _read_checkpoint(path, model, optimizer, adapter, ranks), of_checkpoint=True)


def _read_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, adapter: Adapter | None, ranks: Ranks
) -> TrainerState:
    ranks.agree(lambda: verify_checkpoint(path) if ranks.rank == 0 else None, of_checkpoint=True)
    shares = Shares(ranks)
    # A rank that fails here must be heard before the others read moments together, over the same connections.
    own = optimizer_name(optimizer)
    state, moments = ranks.agree(lambda: _read_own(path, model, adapter, own, shares), of_checkpoint=True)
    with guarded(f"checkpoint {path} does not fit this run's model", CheckpointError):
        read_moments(path / OPTIMIZER, moments, ranks)
        set_moments(moments, model, optimizer)
    with guarded(f"checkpoint {path} is damaged: {TRAINER_STATE} lacks something", CheckpointError):
        _set_randomness(state["randomness"])
        return msgspec.convert([state[name] for name in TrainerState._fields], TrainerState)


def _read_own(
    path: Path, model: PreTrainedModel, adapter: Adapter | None, optimizer: OptimizerName, shares: Shares
) -> tuple[dict[str, Any], Moments]:
    """What each rank reads by itself: the weights, into the model, and the trainer's state, which is returned with the
    moments that are to be read together.
    """
    require_own_kind(path, adapter)
    if why_not := other_optimizer(path / OPTIMIZER, optimizer):
        raise CheckpointError(why_not)
    state = read_trainer_state(path)
    try:
        with guarded(f"checkpoint {path} does not fit this run's model", CheckpointError):
            if adapter is None:
                saved = load_causal_lm(str(path), dtype="float32")  # on the CPU: a GPU need not hold the model twice
                _load_weights(model, saved.state_dict())
            else:
                adapter.load(path)
            return state, empty_moments(path / OPTIMIZER, model, shares)
    except ModelError as error:
        raise CheckpointError(f"checkpoint {path} does not fit this run's model: {error}") from error


def read_trainer_state(path: Path) -> dict[str, Any]:
    """What a checkpoint's `trainer.pt` holds, whatever that is. Raises `CheckpointError`."""
    with guarded(f"checkpoint {path} is damaged: {TRAINER_STATE} is not one", CheckpointError):
        return {**torch.load(path / TRAINER_STATE, map_location="cpu", weights_only=True)}


def verify_checkpoint(path: Path) -> Manifest:
    """Read every byte of the checkpoint at `path`; raise `CheckpointError` where it differs from its manifest."""
    manifest = read_manifest(path)
    with guarded(f"checkpoint {path} is damaged", CheckpointError):
        for name, expected in manifest.files.items():
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
            if _entry(file) != expected:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was written")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Raises `CheckpointError` for a folder without one, or with one of another format."""
    with guarded(f"{path} is no checkpoint: its {MANIFEST} is not one", CheckpointError):
        try:
            manifest = msgspec.json.decode(read_at_most(path / MANIFEST, _MOST_MANIFEST_BYTES), type=Manifest)
        except OSError as error:
            why = f"it has no readable {MANIFEST} ({error.strerror})"
            raise CheckpointError(f"{path} is no checkpoint: {why}") from error
    if manifest.format != _FORMAT:
        raise CheckpointError(f"{path} has the format {manifest.format!r}; this version reads {_FORMAT!r}")
    return manifest


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`, or None when there is none yet.

    Folders named like checkpoints that are none are passed over with a warning; raises `CheckpointError` when there is
    nothing else.
    """
    refused: CheckpointError | None = None
    for path in reversed(_step_folders(folder)):
        try:
            read_manifest(path)
            return path
        except CheckpointError as error:
            _log.warning("%s", error)
            refused = refused or error
    if refused is not None:
        raise refused
    return None


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a crash left half-written; other files stay.

    Call it while none is being written.
    """
    put_back(folder)
    for path in folder.glob(f"{_TEMPORARY}step_*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in [path for path in _step_folders(folder) if _is_checkpoint(path)][:-keep]:
        # Without its manifest it is no checkpoint any more, whatever interrupts the deletion.
        (path / MANIFEST).unlink()
        shutil.rmtree(path, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Rename back what a crash left of a checkpoint that was being replaced. Call it while none is being written."""
    for path in folder.glob(f"{_TEMPORARY}step_*{_REPLACED}"):
        final = folder / path.name.removeprefix(_TEMPORARY).removesuffix(_REPLACED)
        if not final.exists():
            with contextlib.suppress(OSError):
                path.rename(final)


def _is_checkpoint(path: Path) -> bool:
    """Whether a run can be resumed from it, as far as its manifest says: no other counts among those that are kept."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _begin(folder: Path, step: int) -> None:
    """Make the folder that ranks write to. It names its step, whose scheduler's state is kept from now on."""
    final = folder / f"step_{step:06d}"
    temporary = folder / f"{_TEMPORARY}{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / OPTIMIZER).mkdir(parents=True)
    except OSError as error:
        raise _not_written(final, error) from error


def _copy_weights(model: PreTrainedModel, ranks: Ranks) -> dict[str, Tensor]:
    """The model's state dict without adapters, whole and on the CPU; gathered by all ranks, kept by rank 0.

    On GPUs the others wait for no copy, and the deadline of what they gather runs from when they ask for it: they meet
    rank 0 now and then.
    """
    copies: dict[str, Tensor] = {}
    ahead_bytes = 0
    for name, weight in plain_weights(model):
        found = weight.whole()
        if ranks.rank == 0:
            copies[name] = torch.empty_like(found, device="cpu").copy_(found)
        ahead_bytes += found.nbytes
        if ahead_bytes >= _MOST_AHEAD_BYTES:
            ahead_bytes = 0
            ranks.agree(lambda: None, of_checkpoint=True)
    return copies


def _load_weights(model: PreTrainedModel, saved: Mapping[str, Tensor]) -> None:
    """Into the model, of which this rank may hold a share. Raises `RuntimeError` for other names or shapes."""
    own = model.state_dict(keep_vars=True)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    if wrong := [name for name, tensor in saved.items() if shapes.get(name) not in (None, tensor.shape)]:
        raise RuntimeError(f"its {wrong[0]} is {list(saved[wrong[0]].shape)}, and the model's {list(shapes[wrong[0]])}")
    model.load_state_dict({name: own_part(t, own[name]) if name in own else t for name, t in saved.items()})


def _publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint; one of the same step (from before a resume) is replaced."""
    replaced = temporary.with_name(f"{temporary.name}{_REPLACED}")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    sync(final.parent)


def _step_folders(folder: Path) -> list[Path]:
    """Folders named like checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _STEP_FOLDER.match(path.name)) and path.is_dir()]
    return [path for _, path in sorted(named, key=lambda pair: int(pair[0].group(1)))]


def _entry(path: Path) -> FileEntry:
    checksum = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum.update(block)
    return FileEntry(num_bytes=path.stat().st_size, xxh3=checksum.hexdigest())


def _randomness() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.array(keys)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_randomness(state: dict[str, Any]) -> None:
    name, keys, position, has_gauss, cached = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy(), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def _not_written(final: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"checkpoint {final} cannot be written: {_reason(error, final.parent)}")


def _reason(error: BaseException, folder: Path) -> str:
    if isinstance(error, CheckpointException) and error.failures:  # by rank, with where it was raised
        error = min(error.failures.items())[1][0]
    cause: BaseException | None = error
    while cause is not None:  # torch raises its own error in place of the system's
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or "os error 28" in str(cause):
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            free = shutil.disk_usage(existing).free / 1e6
            return f"the disk is full ({free:.0f} MB free); free some space, or set trainer.keep_checkpoints lower"
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
