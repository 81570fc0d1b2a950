"""Checkpoints: one folder per step, complete or absent.

    checkpoints/step_000050/
      config.json, model.safetensors, tokenizer.json, chat_template.jinja, ...   what `from_pretrained` loads
      trainer.pt         optimizer, step, version, randomness
      manifest.json      written last: size and checksum of every other file

Written under a temporary name, synced, then renamed. A folder without a manifest is no checkpoint; files that differ
from the manifest are refused.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import SafetensorError

from tailrace.errors import CheckpointError, ModelError
from tailrace.models.loading import copy_tokenizer, load_causal_lm, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.pt"
_FORMAT = "tailrace-checkpoint-1"
_STEP_FOLDER = re.compile(r"^step_(\d{6,})$")
_TEMPORARY = ".writing_"

_log = logging.getLogger(__name__)


class TrainerState(NamedTuple):
    """All of a trainer but its weights and the state of random generators."""

    step: int
    version: int
    optimizer: dict[str, Any]
    skipped_in_a_row: int


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


def write_checkpoint(folder: Path, model: PreTrainedModel, model_name: str, state: TrainerState) -> Path:
    """Write `folder`/step_N and return its path once it is durable.

    Tokenizer files come from `model_name`. Raises `CheckpointError`, after removing what was written; what was there
    before is intact.
    """
    final = folder / f"step_{state.step:06d}"
    temporary = folder / f"{_TEMPORARY}{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_files(temporary, model, model_name, state)
        _publish(temporary, final)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} cannot be written: {_reason(error, folder)}") from error
    return final


def read_checkpoint(path: Path, model: PreTrainedModel) -> TrainerState:
    """Load the checkpoint at `path` into `model`, restore random generators, return the rest.

    Raises `CheckpointError` for an incomplete checkpoint, or one of another model.
    """
    verify_checkpoint(path)
    try:
        saved = load_causal_lm(str(path), dtype="float32")  # on the CPU: a GPU need not hold the model twice
        model.load_state_dict(saved.state_dict())
        state = torch.load(path / TRAINER_STATE, map_location="cpu", weights_only=True)
    except (ModelError, OSError, RuntimeError, KeyError) as error:
        raise not_of_this_model(path, error) from error
    _set_randomness(state["randomness"])
    return TrainerState(*(state[name] for name in TrainerState._fields))


def scheduler_state_in(path: Path) -> bytes:
    """The scheduler's state in a checkpoint of before the orchestrator kept it; empty in any other.

    Raises `CheckpointError` for an incomplete checkpoint.
    """
    verify_checkpoint(path)
    state = torch.load(path / TRAINER_STATE, map_location="cpu", weights_only=True, mmap=True)
    return state.get("scheduler_state") or b""


def verify_checkpoint(path: Path) -> Manifest:
    """Read every byte of the checkpoint at `path`; raise `CheckpointError` where it differs from its manifest."""
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        if _entry(file) != expected:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was written")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Raises `CheckpointError` for a folder without one."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{path} is no checkpoint: it has no readable {MANIFEST} ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is no checkpoint: its {MANIFEST} is not one ({error})") from error
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
    """Delete all but the newest `keep` checkpoints; other files stay."""
    ours = [path for path in _step_folders(folder) if (path / MANIFEST).is_file()]
    for path in ours[:-keep]:
        # Without its manifest it is no checkpoint any more, whatever interrupts the deletion.
        (path / MANIFEST).unlink()
        shutil.rmtree(path, ignore_errors=True)


def not_of_this_model(path: Path, error: Exception) -> CheckpointError:
    """The error for a complete checkpoint that does not fit the model being trained."""
    return CheckpointError(f"checkpoint {path} does not fit this run's model: {error}")


def _write_files(folder: Path, model: PreTrainedModel, model_name: str, state: TrainerState) -> None:
    copy_tokenizer(model_name, folder)
    with quiet_transformers():
        model.save_pretrained(folder)
    with (folder / TRAINER_STATE).open("wb") as file:
        torch.save(state._asdict() | {"randomness": _randomness()}, file)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {str(path.relative_to(folder)): _entry(path) for path in files}
    for path in files:
        _sync(path)
    manifest = Manifest(format=_FORMAT, step=state.step, version=state.version, files=entries)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    _sync(folder / MANIFEST)
    _sync(folder)


def _publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint; one of the same step (from before a resume) is replaced."""
    replaced = temporary.with_name(f"{temporary.name}_replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    _sync(final.parent)


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        torch.cuda.set_rng_state_all(state["cuda"])


def _reason(error: Exception, folder: Path) -> str:
    cause: BaseException | None = error
    while cause is not None:  # torch raises its own error in place of the system's
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or "os error 28" in str(cause):
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            free = shutil.disk_usage(existing).free / 1e6
            return f"the disk is full ({free:.0f} MB free); free some space, or set trainer.keep_checkpoints lower"
        cause = cause.__cause__ or cause.__context__
    return str(error)
