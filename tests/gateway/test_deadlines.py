"""Deadlines are called in time, once, and not after they were dropped."""

import asyncio

from rllm.gateway.deadlines import Deadlines


class Item:
    def __init__(self):
        self.expired = asyncio.Event()
        self.count = 0

    def expire(self):
        self.count += 1
        self.expired.set()


async def test_what_is_due_is_called_once_whatever_else_was_set_before_it():
    deadlines, loop = Deadlines(0.01), asyncio.get_running_loop()
    late, soon, dropped, reset = (Item() for _ in range(4))
    deadlines.set(late, 3600.0, loop)
    deadlines.set(dropped, 0.01, loop)
    deadlines.set(reset, 0.01, loop)
    deadlines.set(soon, 0.02, loop)
    deadlines.set(reset, 3600.0, loop)
    deadlines.drop(dropped)
    deadlines.drop(dropped)
    async with asyncio.timeout(60):
        await soon.expired.wait()
    later = Item()
    deadlines.set(later, -1.0, loop)
    async with asyncio.timeout(60):
        await later.expired.wait()
    assert [item.count for item in (late, soon, dropped, reset, later)] == [0, 1, 0, 0, 1]


def test_a_second_event_loop_does_not_wait_for_the_timer_of_one_that_ended():
    deadlines = Deadlines(0.01)

    async def expires(after_s):
        item = Item()
        deadlines.set(item, after_s, asyncio.get_running_loop())
        if after_s < 1:
            async with asyncio.timeout(60):
                await item.expired.wait()

    asyncio.run(expires(3600.0))
    asyncio.run(expires(0.01))
