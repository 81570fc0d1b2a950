"""How a trainer outside makes its weights reachable; that they arrive: tests/generation/engines."""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.errors import CorruptData, SettingsError
from tailrace.records import ModelStateDictRef, WeightsWritten
from tailrace.transport.channels import create_socket_folder
from tailrace.transport.weights.outside import WeightAnnouncer
from tailrace.transport.weights.transfer_sockets import TransferPlace
from tailrace.transport.weights.transfers import MakeInitInfo, TransferReceiver, TransferringModelStateDictStore


def test_a_folder_is_told_by_the_path_that_others_find_it_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = WeightAnnouncer("", 30).tell("rank-0", 3, "weights")
    assert told == WeightsWritten(consumer="rank-0", version=3, folder=str(tmp_path / "weights"))


def test_tensors_are_refused_where_the_run_reads_folders() -> None:
    with pytest.raises(SettingsError, match=r'by transport\.weights = "nccl", and join it by its folder'):
        WeightAnnouncer("", 30).tell("rank-0", 1, {})


def test_without_vllm_tensors_cannot_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "tailrace.transport.weights.outside.find_spec", lambda name: None if name == "vllm" else find(name)
    )
    with pytest.raises(SettingsError, match="install the vllm of the run's generators in this environment too"):
        WeightAnnouncer(str(tmp_path), 30).tell("rank-0", 1, {})


def test_a_generator_may_take_as_long_for_a_call_of_a_transfer_as_the_run_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls_s: list[float] = []

    class Store(TransferringModelStateDictStore):
        def __init__(self, place: TransferPlace, deadline_s: float, make_init_info: MakeInitInfo) -> None:
            super().__init__(place, deadline_s, make_init_info)
            calls_s.append(deadline_s)

    monkeypatch.setattr("tailrace.transport.weights.outside.find_spec", lambda name: object())
    monkeypatch.setattr("tailrace.transport.weights.outside.TransferringModelStateDictStore", Store)
    folder = create_socket_folder()
    with closing(WeightAnnouncer(str(folder), 7)) as announcer:
        announcer.tell("rank-0", 1, {})
    shutil.rmtree(folder)
    assert calls_s == [7]


@pytest.mark.parametrize("uri", ["../elsewhere", "/tmp/socket", "a\nb", ""])
def test_a_reference_that_leaves_the_run_s_folder_is_refused(tmp_path: Path, uri: str) -> None:
    ref = ModelStateDictRef(version=1, uri=uri, num_bytes=0)
    with (
        closing(TransferReceiver(TransferPlace(tmp_path))) as receiver,
        pytest.raises(CorruptData, match="names no socket of its folder"),
        receiver.open(ref),
    ):
        pass
