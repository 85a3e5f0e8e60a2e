"""What asyncio says of tasks that a second Ctrl-C has ended."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rllm.engine.interrupts import say_nothing_of_interrupted_tasks


async def alone(error: BaseException) -> None:
    raise error


async def in_a_group(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(alone(error))


async def work(error: BaseException) -> None:
    say_nothing_of_interrupted_tasks()
    under_way = [asyncio.create_task(how(error)) for how in (in_a_group, alone)]
    await asyncio.sleep(0.01)
    del under_way


def test_tasks_that_are_interrupted_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work(KeyboardInterrupt()))
    gc.collect()
    assert caplog.records == []


def test_other_errors_that_nobody_awaits_are(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(work(ValueError("no")))
    gc.collect()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("never retrieved" in message for message in told)
