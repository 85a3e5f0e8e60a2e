"""Calls in a line: served in order, and no turn lost by one who leaves."""

import asyncio
import time

import pytest

from rllm.gateway.upstream.line import WaitingLine


def soon():
    return time.monotonic() + 20


async def test_places_are_called_in_order_and_a_place_that_cannot_go_on_is_called_first_again():
    line = WaitingLine()
    places = [line.join() for _ in range(3)]
    line.call_next()
    await line.called(places[0], soon())
    line.call_next()
    await line.called(places[0], soon())
    line.leave(places[0])
    await line.called(places[1], soon())
    assert len(line) == 2


async def test_who_leaves_after_being_called_passes_the_turn_on():
    line = WaitingLine()
    first, second = line.join(), line.join()
    leaving = asyncio.create_task(line.called(first, soon()))
    await asyncio.sleep(0)
    line.call_next()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    line.leave(first)
    await line.called(second, soon())


async def test_a_wait_ends_in_time():
    line = WaitingLine()
    with pytest.raises(TimeoutError):
        await line.called(line.join(), time.monotonic() + 0.01)


async def test_all_are_called_at_once():
    line = WaitingLine()
    places = [line.join() for _ in range(3)]
    line.call_all()
    await asyncio.gather(*(line.called(place, soon()) for place in places))


async def test_a_place_can_be_waited_for_again_after_a_wait_that_ended():
    line = WaitingLine()
    place = line.join()
    with pytest.raises(TimeoutError):
        await line.called(place, time.monotonic() + 0.01)
    line.call_next()
    await line.called(place, soon())
