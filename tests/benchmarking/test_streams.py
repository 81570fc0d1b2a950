"""What `benchmarks/streams.py` times, and what it judges."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import redis

from tests.support.benchmark_programs import benchmark

streams = benchmark("streams")


@dataclass
class Entries:
    """A client of Redis that has every entry, and what was printed when it was asked for the first."""

    output: pytest.CaptureFixture[str]
    printed: list[str] = field(default_factory=list)
    asked: int = 0

    def ping(self) -> None:
        self.printed.append(self.output.readouterr().out)

    def xread(self, _after: object, *, count: int, block: int) -> list[tuple[bytes, list[tuple[bytes, object]]]]:
        assert count == 1
        if self.asked == 0:
            self.printed.append(self.output.readouterr().out)
        data = json.dumps({"input_ids": [0] * streams.TOKENS}).encode()
        entry = {b"index": b"%d" % self.asked, b"data": data}
        self.asked += 1
        return [(b"key", [(b"%d-0" % self.asked, entry)])]


def test_a_reader_of_entries_is_connected_before_it_says_that_it_is_ready_and_tells_when_it_is_warm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Entries(capsys)
    monkeypatch.setattr(redis.Redis, "from_url", lambda _url: client)
    streams.receive({"case": "json", "url": "redis://localhost", "key": "key", "entries": 5, "warm_up": 3})
    assert client.printed == ["", "ready\n"]
    warm_s, end_s = map(float, capsys.readouterr().out.split())
    assert client.asked == 5
    assert 0 < warm_s <= end_s


def row(case: str, samples_per_s: float, sender_us: float = 50.0) -> object:
    return streams.Row(case, 1, 1, 1, samples_per_s, sender_us, 0.0, 0.0)


def test_a_case_that_ran_without_those_that_it_is_held_against_is_not_judged() -> None:
    for beside in (
        [],
        [row("pickled", 100)],
        [row("server-redis", 1000)],
        [row("pickled", 100), row("server-feed", 1)],
    ):
        assert streams.judged([row("redis", 900), *beside])[0].met is None


@pytest.mark.parametrize(
    ("samples_per_s", "sender_us", "met"), [(900, 50, True), (400, 50, False), (900, 200, False), (550, 50, False)]
)
def test_all_three_targets_are_to_be_met(samples_per_s: float, sender_us: float, met: bool) -> None:
    beside = [row("pickled", 100), row("server-redis", 1000), row("server-feed", 1)]
    assert streams.judged([row("redis", samples_per_s, sender_us), *beside])[0].met is met


@pytest.mark.parametrize(("case", "num_bytes"), [("server-redis", 1 << 20), ("server-feed", 16 * 13_000)])
def test_what_redis_does_itself_is_with_values_as_large_as_the_ways_own_and_the_fastest_clients(
    case: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def rate(_server: object, _count: int, clients: int, *_command: str, value: str | None = None) -> float:
        sizes.append(len(value or ""))
        return {1: 50.0, 4: 100.0, 50: 80.0}[clients]

    monkeypatch.setattr(streams, "server_rate", rate)
    assert streams.of_server(case, None, 4).samples_per_s == pytest.approx(100.0 * num_bytes / 13_000 / 2)
    assert sizes == [num_bytes] * 3 + [0] * 3
