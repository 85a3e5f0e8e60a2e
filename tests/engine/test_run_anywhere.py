from __future__ import annotations

import asyncio
import signal
import sys
import threading
from contextlib import suppress

import pytest

from rllm.engine.event_loop import run_anywhere
from rllm.errors import RolloutError


async def where() -> str:
    return threading.current_thread().name


def test_work_runs_in_this_thread_if_it_has_no_loop() -> None:
    assert run_anywhere(where) == threading.current_thread().name


async def test_work_inside_a_loop_runs_in_its_own_thread_and_loop() -> None:
    assert run_anywhere(where) == "rllm training"


async def test_exception_of_the_work_is_raised() -> None:
    async def stop() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)

    with pytest.raises(RolloutError, match="stopped the event loop"):
        run_anywhere(stop)


def test_exit_of_the_work_is_raised() -> None:
    async def leave() -> None:
        sys.exit(3)

    with pytest.raises(SystemExit, match="3"):
        run_anywhere(leave)


def test_signal_handler_that_exits_ends_the_work() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGTERM]).start)
        await asyncio.sleep(60)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    try:
        with pytest.raises(SystemExit, match="5"):
            run_anywhere(work)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_task_that_ignores_cancellation_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rllm.engine.event_loop.CANCEL_GRACE_S", 0.01)
    release, cleaned_up = threading.Event(), []

    async def stubborn() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def tidy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned_up.append(True)

    async def work() -> str:
        tasks.extend([asyncio.create_task(stubborn(), name="stubborn"), asyncio.create_task(tidy())])
        await asyncio.sleep(0)
        return "done"

    tasks: list[asyncio.Task[None]] = []
    rescue = threading.Timer(60.0, release.set)
    rescue.start()
    assert run_anywhere(work) == "done"
    assert not release.is_set()
    rescue.cancel()
    assert cleaned_up
    assert "'stubborn'" in caplog.text


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
