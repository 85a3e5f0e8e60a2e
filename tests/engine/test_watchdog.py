from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rllm.engine.watchdog import watched_loop


async def test_a_blocked_loop_is_reported_once_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(patience_s=0.1):
        time.sleep(0.6)  # noqa: ASYNC251  # this is the blocking call
    assert len(caplog.records) == 1
    assert "time.sleep(0.6)" in caplog.text
    assert "an async agent makes a blocking call" in caplog.text


async def test_a_loop_that_turns_is_not_reported_and_no_thread_stays(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(patience_s=0.4):
        for _ in range(10):
            await asyncio.sleep(0.06)
    await asyncio.sleep(0.2)
    assert not caplog.records
    assert "rllm loop watchdog" not in {thread.name for thread in threading.enumerate()}
