"""Weights that somebody else wrote, in Hugging Face layout, come into a store as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tailrace.errors import CorruptData, TransportError
from tailrace.transport.weights.stores import MemoryModelStateDictStore, SharedMemoryModelStateDictStore

TENSORS = {
    "model.embed.weight": torch.arange(12.0).reshape(3, 4),
    "model.norm.weight": torch.full((5,), 0.5, dtype=torch.bfloat16),
    "lm_head.weight": torch.ones(2, 2, dtype=torch.float16),
}


@pytest.fixture(params=["memory", "shared memory"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[MemoryModelStateDictStore | SharedMemoryModelStateDictStore]:
    (tmp_path / "store").mkdir()
    is_memory = request.param == "memory"
    store = MemoryModelStateDictStore() if is_memory else SharedMemoryModelStateDictStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "version_7"
    folder.mkdir()
    names = sorted(TENSORS)
    save_file({name: TENSORS[name] for name in names[:2]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: TENSORS[name] for name in names[2:]}, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_all_files_of_a_folder_are_one_state_dict_bit_for_bit(
    store: MemoryModelStateDictStore | SharedMemoryModelStateDictStore, folder: Path
) -> None:
    ref = store.publish_folder(folder, 7)
    assert (ref.version, ref.num_bytes) == (7, sum(tensor.nbytes for tensor in TENSORS.values()))
    with store.open(ref) as opened:
        assert set(opened) == set(TENSORS)
        for name, tensor in TENSORS.items():
            torch.testing.assert_close(opened[name], tensor, rtol=0, atol=0)


def test_what_is_published_outlives_its_folder(
    store: MemoryModelStateDictStore | SharedMemoryModelStateDictStore, folder: Path
) -> None:
    ref = store.publish_folder(folder, 7)
    for path in folder.iterdir():
        path.write_bytes(b"")
    with store.open(ref) as opened:
        torch.testing.assert_close(opened["model.embed.weight"], TENSORS["model.embed.weight"])


def _cut_short(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _emptied(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")


def _no_safetensors(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"a pointer to large storage, for example\n" * 3)


def _twice(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def _without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_cut_short, CorruptData, "model-00001"),
        (_emptied, TransportError, "cannot open .*model-00002"),
        (_no_safetensors, CorruptData, "was cut short, or is no file of safetensors"),
        (_twice, TransportError, "twice"),
        (_without_weights, TransportError, r"holds no weights \(\*.safetensors\)"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(
    store: MemoryModelStateDictStore | SharedMemoryModelStateDictStore,
    folder: Path,
    damage: Callable[[Path], None],
    error: type[TransportError],
    message: str,
) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        store.publish_folder(folder, 7)
