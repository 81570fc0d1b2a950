"""A run whose roles are started by a launcher that Tailrace does not know, and meet over TCP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typing_extensions import override

from tailrace.free_ports import free_port
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.run.training import train
from tests.run.runs import records, tiny_settings
from tests.support.light_roles import LightLauncher


class TcpLauncher(LocalLauncher):
    """Processes of this machine that meet as those of several would."""

    @override
    def address(self, name: str) -> str:
        return f"tcp://127.0.0.1:{free_port()}"


class LightTcpLauncher(TcpLauncher, LightLauncher):
    """Of roles without a model."""


@pytest.mark.parametrize("launcher", [pytest.param(TcpLauncher, marks=pytest.mark.long), LightTcpLauncher])
def test_a_launcher_of_ones_own_runs_the_roles(tmp_path: Path, launcher: type[TcpLauncher]) -> None:
    placement = ("--placement", f"{__name__}:{launcher.__name__}", "--transport.batches", "zmq")
    settings = tiny_settings(*placement, "--max_steps", "2", "--observability.live", "off")
    summary = asyncio.run(train(settings, tmp_path))
    assert (summary.status, summary.steps) == ("finished", 2)
    assert [line["step"] for line in records(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) >= ["generator.log", "orchestrator.log"]
