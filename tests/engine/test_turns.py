"""Who is let in next."""

from __future__ import annotations

import asyncio

from rllm.engine.runner import Attempt, RolloutRunner
from rllm.engine.turns import Turns
from rllm.types import Episode


async def test_the_lowest_rank_enters_first_and_then_who_came_first() -> None:
    turns, entered = Turns(1), []

    async def enter(rank: int, name: str) -> None:
        async with turns.one(rank):
            entered.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for rank, name in ((5, "a"), (2, "b"), (1, "c"), (2, "d"), (1, "e")):
            group.create_task(enter(rank, name))
    assert entered == ["a", "c", "e", "b", "d"], "a came when nobody was inside"


async def test_a_turn_is_not_lost_with_the_one_who_was_called() -> None:
    turns = Turns(1)

    async def enter() -> None:
        async with turns.one(0):
            await asyncio.sleep(0)

    first = asyncio.create_task(enter())
    await asyncio.sleep(0)
    for num_turns in range(4):  # cancel one that waits: before, while and after it is called
        waiting, behind = asyncio.create_task(enter()), asyncio.create_task(enter())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(first, waiting, behind, return_exceptions=True)
            async with turns.one(0):
                pass
        first = asyncio.create_task(enter())
        await asyncio.sleep(0)
    await first


async def test_calls_of_run_share_the_bound_and_the_lower_rank_goes_first() -> None:
    live, most, began = 0, 0, []

    class Counting:
        async def rollout(self, attempt: Attempt) -> Episode:
            nonlocal live, most
            began.append(attempt.task_id)
            live += 1
            most = max(most, live)
            await asyncio.sleep(0)
            live -= 1
            return Episode(task_id=attempt.task_id)

    runner = RolloutRunner(Counting(), max_concurrent=3)
    later = asyncio.create_task(runner.run([Attempt(task={}, task_id="later")] * 9, rank=7))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await runner.run([Attempt(task={}, task_id="earlier")] * 6, rank=3)
    await later
    assert most == 3
    assert began == ["later"] * 3 + ["earlier"] * 6 + ["later"] * 6
