from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from rllm.engine.awake import GAP_S, AwakeClock


class Clocks:
    """A clock, and how much the processor has worked by it."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.clock = AwakeClock(lambda: self.now, lambda: self.cpu)

    def pass_time(self, seconds: float, *, busy: float = 0.0) -> float:
        self.now += seconds
        self.cpu += busy * seconds
        return self.clock()


def test_what_is_missing_between_two_looks_does_not_count() -> None:
    clocks = Clocks()
    with clocks.clock.watched():
        assert clocks.pass_time(1.0) == 1.0
        assert clocks.pass_time(600.0) == 1.0
        assert clocks.pass_time(GAP_S) == 1.0 + GAP_S


def test_a_program_that_keeps_the_lock_while_it_works_is_awake() -> None:
    clocks = Clocks()
    with clocks.clock.watched():
        assert clocks.pass_time(60.0, busy=0.9) == 60.0


def test_where_nobody_looks_all_time_counts() -> None:
    clocks = Clocks()
    assert clocks.pass_time(60.0) == 60.0
    with clocks.clock.watched():
        clocks.pass_time(60.0)
    assert clocks.pass_time(60.0) == 120.0


SUSPENDED = """
import asyncio, logging
from rllm.engine import awake, watchdog
awake.GAP_S = watchdog.GAP_S = 0.4
from rllm.engine.runner import Attempt, RolloutRunner
from rllm.types import Episode

class Slow:
    async def rollout(self, attempt):
        print("begun", flush=True)
        for _ in range(7):
            await asyncio.sleep(0.1)
        return Episode(task=attempt.task, task_id=attempt.task_id, index=attempt.index)

class Stuck:
    async def rollout(self, attempt):
        await asyncio.sleep(60)

logging.basicConfig()
attempt = Attempt(task={}, task_id="t", index=0)
[kept] = asyncio.run(RolloutRunner(Slow(), timeout_s=1.0).run([attempt]))
[cut] = asyncio.run(RolloutRunner(Stuck(), timeout_s=1.0).run([attempt]))
print(kept.info.get("error"), cut.info["error"]["type"])
"""


def test_a_rollout_has_its_time_after_the_run_was_suspended() -> None:
    with subprocess.Popen([sys.executable, "-c", SUSPENDED], text=True, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)  # longer than its deadline
        os.kill(process.pid, signal.SIGCONT)
        told, errors = process.communicate(timeout=60)
    assert told == "None RolloutTimeout\n"
    assert "blocked" not in errors
