from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable

import pytest

from rllm.engine.watchdog import watched_loop


def block_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_blocked_loop_is_reported_once_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(patience_s=0.1):
        block_until(lambda: caplog.records)  # this is the blocking call
        time.sleep(0.5)  # noqa: ASYNC251  # and so it goes on, long enough for another report
    assert len(caplog.records) == 1
    assert "in block_until" in caplog.text
    assert "an async agent makes a blocking call" in caplog.text


async def test_a_loop_that_turns_is_not_reported_and_no_thread_stays(caplog: pytest.LogCaptureFixture) -> None:
    turns = []
    with watched_loop(patience_s=0.4):
        for _ in range(10):
            turns.append(time.monotonic())
            await asyncio.sleep(0.06)
        turns.append(time.monotonic())
    # It turns every 0.06 s, unless the machine is so busy that it is blocked indeed.
    assert not caplog.records or max(later - turn for turn, later in itertools.pairwise(turns)) > 0.2
    await asyncio.to_thread(block_until, lambda: "rllm loop watchdog" not in {t.name for t in threading.enumerate()})
