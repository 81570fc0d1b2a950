"""What is read once a step: counts of now, and what happened since the last reading."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from tailrace.reporting.gauges import ProcessGauge, SchedulerGauge, usage_gauge
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.rollouts.scoring import JudgeUsage
from tailrace.scheduling import SchedulerStatistics, Verdict

START = SchedulerStatistics(
    running=0,
    waiting_groups=0,
    batches_ahead=0,
    in_flight=0,
    admitted=0,
    budget_free=8,
    budget_ceiling=8,
    verdict=Verdict.ADMIT,
    waited_s=dict.fromkeys(Verdict, 0.0),
    trainer_waited_s=0.0,
    held_s=0.0,
    restarted_groups=0,
    paused=(),
    set_aside=0,
)


def test_waits_are_since_the_last_reading_and_counts_are_of_now() -> None:
    now = START
    gauge = SchedulerGauge(lambda: now)
    now = replace(START, in_flight=3, waited_s=START.waited_s | {Verdict.BUDGET_SPENT: 2.0}, trainer_waited_s=5.0)
    first = gauge()
    now = replace(now, in_flight=4, trainer_waited_s=6.5)
    second = gauge()
    assert (first["scheduler/in_flight"], second["scheduler/in_flight"]) == (3, 4)
    assert (first["scheduler/budget_wait_s"], second["scheduler/budget_wait_s"]) == (2.0, 0.0)
    assert (first["scheduler/trainer_wait_s"], second["scheduler/trainer_wait_s"]) == (5.0, 1.5)


def test_every_name_is_in_the_table_of_metrics() -> None:
    metrics = MetricsAccumulator()
    metrics.update(SchedulerGauge(lambda: START)())
    metrics.update(ProcessGauge(lambda: {"trainer": os.getpid()})())
    assert "cpu/trainer_s" in metrics.flush()


def test_cpu_time_is_that_since_the_last_reading() -> None:
    gauge = ProcessGauge(lambda: {"run": os.getpid()})
    first = gauge()["cpu/run_s"]
    sum(number * number for number in range(2_000_000))
    second = gauge()
    used = sum(os.times()[:4])
    assert 0.0 < second["cpu/run_s"] <= used - first + 0.01  # the system counts in hundredths
    assert second["memory/run_rss_bytes"] > 0


def test_cpu_time_of_a_role_that_has_ended_is_not_counted_again_for_its_parent() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        pids = {"orchestrator": os.getpid(), "trainer": child.pid}
        gauge = ProcessGauge(lambda: pids)
        assert child.stdout is not None
        child.stdout.readline()
        assert gauge()["cpu/trainer_s"] >= 0.25
        child.communicate(b"\n")
    assert gauge()["cpu/orchestrator_s"] < 0.2  # it is waited for, and named still
    del pids["trainer"]
    assert gauge()["cpu/orchestrator_s"] < 0.2


def test_judges_that_were_never_asked_have_no_metrics() -> None:
    usage = JudgeUsage()
    gauge = usage_gauge(lambda: usage)
    assert gauge() == {}
    usage = JudgeUsage(calls=3, prompt_tokens=40)
    assert gauge()["judge/calls"] == 3
    usage = JudgeUsage(calls=4, prompt_tokens=50)
    assert gauge()["judge/prompt_tokens"] == 10
