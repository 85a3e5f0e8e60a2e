"""Interrupted tasks, blocked loops and the garbage collector during rollouts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rllm.engine.event_loop import (
    GC_THRESHOLDS,
    rarely_collected,
    run_to_end,
    watched_loop,
)
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.types import Episode


def block_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_blocked_loop_is_reported_once_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(limit_s=0.1):
        block_until(lambda: caplog.records)  # this is the blocking call
        time.sleep(0.5)  # noqa: ASYNC251  # and so on, long enough for another report
    assert len(caplog.records) == 1
    assert "in block_until" in caplog.text
    assert "an async agent makes a blocking call" in caplog.text


async def test_responsive_loop_is_not_reported_and_the_thread_ends(caplog: pytest.LogCaptureFixture) -> None:
    turns = []
    with watched_loop(limit_s=0.4):
        for _ in range(10):
            turns.append(time.monotonic())
            await asyncio.sleep(0.06)
        turns.append(time.monotonic())
    # The loop turns every 0.06 s, unless the machine is so busy that the loop is really blocked.
    assert not caplog.records or max(later - turn for turn, later in itertools.pairwise(turns)) > 0.2
    await asyncio.to_thread(block_until, lambda: "rllm loop watchdog" not in {t.name for t in threading.enumerate()})


@pytest.fixture(autouse=True)
def default_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_collection_is_rare_until_the_outermost_block_ends() -> None:
    with rarely_collected():
        with rarely_collected():
            pass
        assert gc.get_threshold() == GC_THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)


def test_threshold_set_by_the_program_is_kept() -> None:
    gc.set_threshold(0)
    with rarely_collected():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


async def test_rollouts_run_with_rare_collection() -> None:
    seen = []

    class Looks:
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            seen.append(gc.get_threshold())
            return Episode(task=attempt.task)

    await RolloutRunner(Looks()).run([RolloutRequest(task={}, task_id="a")])
    assert seen == [GC_THRESHOLDS]
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_exit_in_a_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        sys.exit(3)

    async def work() -> None:
        await asyncio.gather(leave(), asyncio.sleep(60))

    with pytest.raises(SystemExit, match="3"):
        run_to_end(work())
    assert "sys.exit(3)" in caplog.text
