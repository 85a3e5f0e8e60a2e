"""What asyncio says of tasks that a second Ctrl-C has ended."""

from __future__ import annotations

import asyncio

import pytest

from rllm.engine.interrupts import say_nothing_of_interrupted_tasks

INTERRUPT, MISTAKE = KeyboardInterrupt(), ValueError("no")


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (INTERRUPT, False),
        (BaseExceptionGroup("unhandled errors in a TaskGroup", [INTERRUPT]), False),
        (BaseExceptionGroup("unhandled errors in a TaskGroup", [INTERRUPT, MISTAKE]), True),
        (MISTAKE, True),
        (None, True),
    ],
)
async def test_tasks_that_are_interrupted_are_no_news(
    caplog: pytest.LogCaptureFixture, error: BaseException | None, is_told: bool
) -> None:
    say_nothing_of_interrupted_tasks()
    ended = {"message": "Task exception was never retrieved", **({} if error is None else {"exception": error})}
    asyncio.get_running_loop().call_exception_handler(ended)
    assert [record.getMessage() for record in caplog.records] == ["Task exception was never retrieved"] * is_told
