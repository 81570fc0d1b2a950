"""Whole runs that feed a trainer outside while Redis has troubles: each sample is trained on once, none is lost."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.feed import Feed
from tailrace.records import SampleId
from tests.examples.test_external_trainer import TINY, started, summary
from tests.run.runs import PATIENCE_S, records
from tests.support.redis_servers import ReplicatedServer, ask, needs_redis, redis_server
from tests.support.wilful_trainer import QUICKSTART

pytestmark = needs_redis

STEPS, SIZE = 8, 4
TROUBLE_AT = 3


class Trainer(threading.Thread):
    """Takes its steps, whatever happens to Redis."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.took: list[list[SampleId]] = []
        """The samples of each step."""
        self.ignored = 0
        self.has_taken = threading.Event()
        """Steps enough for trouble to come."""

    def run(self) -> None:
        with Feed(self._folder / "runs" / "outside") as feed:
            for step in range(1, STEPS + 1):
                samples = feed.pull(SIZE)
                shutil.copytree(QUICKSTART, self._folder / f"{step}")
                feed.step_done(step, samples, weights=self._folder / f"{step}")
                self.took.append([one.sample_id for one in samples])
                if step == TROUBLE_AT:
                    self.has_taken.set()
            self.ignored = feed.num_ignored


def away(seconds: float) -> Callable[[ReplicatedServer], None]:
    def go(server: ReplicatedServer) -> None:
        server.kill()
        time.sleep(seconds)
        server.start()

    return go


def flush(server: ReplicatedServer) -> None:
    ask(server, "FLUSHALL")


def full(server: ReplicatedServer) -> None:
    ask(server, "CONFIG", "SET", "maxmemory", "1")
    time.sleep(5.0)
    ask(server, "CONFIG", "SET", "maxmemory", "0")


def fail_over(server: ReplicatedServer) -> None:
    server.replicate()
    server.lag()
    time.sleep(1.0)
    server.fail_over()


OUTAGES = {"away for 0.5 s": away(0.5), "away for 5 s": away(5.0), "away for 20 s": away(20.0), "full for 5 s": full}
"""Redis is not there meanwhile, or takes nothing."""
TROUBLES = {**OUTAGES, "flushed": flush, "failed over without the last second": fail_over}
SHORT = {"away for 0.5 s"}


@pytest.mark.parametrize(
    "trouble", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in TROUBLES]
)
@pytest.mark.parametrize(
    "keeps_data", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forgets", "keeps data"]
)
def test_a_trainer_gets_all_its_steps_though_redis_is_in_trouble(
    tmp_path: Path, trouble: str, keeps_data: bool
) -> None:
    with redis_server(tmp_path / "redis", keeps_data=keeps_data) as server:
        through = ("--transport.redis.start", "false", "--transport.redis.url", server.url)
        with started(tmp_path, *TINY, *through) as run:
            trainer = Trainer(tmp_path)
            trainer.start()
            assert trainer.has_taken.wait(PATIENCE_S), (tmp_path / "output").read_text()
            TROUBLES[trouble](server)
            trainer.join(PATIENCE_S)
            assert run.wait(PATIENCE_S) == 0, (tmp_path / "output").read_text()
    assert [len(samples) for samples in trainer.took] == [SIZE] * STEPS
    trained = [one for samples in trainer.took for one in samples]
    assert len({*trained}) == len(trained)
    said = summary(tmp_path)
    ledger = said["ledger"]
    assert (said["status"], said["steps"], ledger["in_flight"]) == ("finished", STEPS, 0)
    assert ledger["admitted"] == sum(ledger["by_state"].values())
    assert ledger["by_state"]["trained"] == len({one.rpartition("/")[0] for one in trained})
    lines = records(tmp_path / "runs" / "outside" / "metrics.jsonl")
    assert [line["batch/samples"] for line in lines] == [SIZE] * STEPS
    assert lines[-1]["redis/ignored"] == trainer.ignored == 0
    if trouble in OUTAGES:  # of which each is counted, and held admission
        assert lines[-1]["redis/outages"] >= 1
        assert lines[-1]["redis/away_s"] > 0
        assert sum(line["scheduler/transport_wait_s"] for line in lines) > 0
