from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from rllm.errors import RolloutError
from rllm.trainer.own_loop import run_anywhere


async def where() -> str:
    return threading.current_thread().name


def test_without_a_loop_work_is_done_here() -> None:
    assert run_anywhere(where) == threading.current_thread().name


async def test_inside_a_loop_work_has_a_thread_and_a_loop_of_its_own() -> None:
    assert run_anywhere(where) == "rllm training"


async def test_what_the_work_raises_is_raised_here() -> None:
    async def stop() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)

    with pytest.raises(RolloutError, match="stopped the event loop"):
        run_anywhere(stop)


async def test_ctrl_c_ends_the_work_before_it_is_raised() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended = True

    main, before = threading.get_ident(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_anywhere(work)
    assert ended
    assert signal.getsignal(signal.SIGINT) is before
