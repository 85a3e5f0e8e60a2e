from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from rllm._runtime.threads import in_thread
from rllm.errors import EnvError
from rllm.workflows.environment import BlockingCalls, environment_of

from ..engine.stepping import Countdown


class Slow(Countdown):
    """Environment that is created when the test allows it."""

    go = threading.Event()
    begun = threading.Event()
    was_closed = threading.Event()

    @staticmethod
    def from_dict(info: Any) -> Countdown:
        Slow.begun.set()
        Slow.go.wait(60)
        return Slow(info["start"])

    def close(self) -> None:
        assert not self.was_closed.is_set()
        self.was_closed.set()


class SlowAsync(Slow):
    """Environment that is closed by a coroutine."""

    @staticmethod
    def from_dict(info: Any) -> Countdown:
        Slow.from_dict(info)
        return SlowAsync(info["start"])

    async def close(self) -> None:  # type: ignore[override]
        super().close()


@pytest.fixture(autouse=True)
def fresh() -> None:
    for event in (Slow.go, Slow.begun, Slow.was_closed):
        event.clear()


async def hold_environment(calls: BlockingCalls, had: asyncio.Event | None = None, kind: type[Slow] = Slow) -> None:
    async with environment_of(kind, {"start": 1}, calls):
        if had is not None:
            had.set()
        await asyncio.sleep(3600)


@pytest.mark.parametrize("kind", [Slow, SlowAsync])
@pytest.mark.parametrize("one_thread", [False, True])
async def test_environment_created_too_late_is_closed(one_thread: bool, kind: type[Slow]) -> None:
    calls = BlockingCalls(one_thread=one_thread)
    having = asyncio.create_task(hold_environment(calls, kind=kind))
    await in_thread(Slow.begun.wait, name="watcher")
    having.cancel()
    await asyncio.wait({having})
    assert not Slow.was_closed.is_set()
    Slow.go.set()
    assert Slow.was_closed.wait(60)
    calls.close()


async def test_environment_of_a_cancelled_user_is_closed_once() -> None:
    calls, had = BlockingCalls(), asyncio.Event()
    Slow.go.set()
    having = asyncio.create_task(hold_environment(calls, had))
    await had.wait()
    having.cancel()
    await asyncio.wait({having})
    assert having.cancelled()
    assert Slow.was_closed.is_set()


async def test_environment_created_during_cancellation_is_closed() -> None:
    calls = BlockingCalls()
    having = asyncio.create_task(hold_environment(calls))
    await asyncio.sleep(0)
    assert Slow.begun.wait(60)
    Slow.go.set()
    time.sleep(0.02)  # noqa: ASYNC251  # it is made, and the loop cannot learn of that before the cancellation
    having.cancel()
    await asyncio.wait({having})
    assert Slow.was_closed.wait(60)


async def test_constructor_error_names_the_environment() -> None:
    class Broken(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Any:
            raise OSError("no disk")

    with pytest.raises(EnvError, match=r"Broken.from_dict raised OSError: no disk"):
        async with environment_of(Broken, {}, BlockingCalls()):
            raise AssertionError


async def test_coroutines_may_create_and_close_an_environment() -> None:
    class Async(Countdown):
        @staticmethod
        async def from_dict(info: Any) -> Any:  # type: ignore[override]
            return Async(info["start"])

        async def close(self) -> None:  # type: ignore[override]
            closed.append(self.left)

    closed: list[int] = []
    async with environment_of(Async, {"start": 3}, BlockingCalls()) as env:
        assert isinstance(env, Async)
    assert closed == [3]


@pytest.mark.parametrize("calls", [{"one_thread": True}, {"max_workers": 1}])
async def test_environment_that_waits_for_a_thread_is_closed(
    calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rllm.workflows.environment.CLOSE_S", 0.5)
    shared, release, busy = BlockingCalls(**calls), threading.Event(), threading.Event()
    Slow.go.set()

    def step() -> None:
        busy.set()
        release.wait(60)

    async with environment_of(Slow, {"start": 1}, shared):
        stepping = asyncio.create_task(shared.call(step, name="the step of another"))
        await in_thread(busy.wait, name="watcher")
        asyncio.get_running_loop().call_later(0.8, release.set)
    await stepping
    assert Slow.was_closed.is_set()
    assert not caplog.records
    shared.close()


@pytest.mark.parametrize("is_async", [False, True])
async def test_environment_is_closed_if_its_user_is_cancelled_meanwhile(is_async: bool) -> None:
    class Held(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Countdown:
            return AsyncHeld(info["start"]) if is_async else Held(info["start"])

        def close(self) -> None:
            closed.append(self.left)

    class AsyncHeld(Held):
        async def close(self) -> None:  # type: ignore[override]
            await free.wait()
            super().close()

    async def use() -> None:
        async with environment_of(Held, {"start": 1}, calls):
            had.set()
            await over.wait()

    closed, had, over, free = list[int](), asyncio.Event(), asyncio.Event(), asyncio.Event()
    calls = BlockingCalls(max_workers=1)
    using = asyncio.create_task(use())
    await had.wait()
    async with calls._limiter.slot("another call"):
        over.set()
        await asyncio.sleep(0)
        using.cancel()
        await asyncio.sleep(0)
        free.set()
    await asyncio.wait({using})
    assert using.cancelled()
    assert closed == [1]


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(1), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
async def test_error_while_closing_is_logged(
    error: BaseException, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(Countdown):
        @staticmethod
        def from_dict(info: Any) -> Countdown:
            return AsyncStuck(1) if is_async else Stuck(1)

        def close(self) -> None:
            raise error

    class AsyncStuck(Stuck):
        async def close(self) -> None:  # type: ignore[override]
            super().close()

    async with environment_of(Stuck, {}, BlockingCalls()):
        pass
    assert f"close failed ({type(error).__name__}" in caplog.text
