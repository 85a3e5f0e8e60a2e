from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextvars import ContextVar
from types import FrameType

import pytest

from rllm._runtime.threads import SerialExecutor, SoftLimiter, UnboundedExecutor, in_thread

color: ContextVar[str] = ContextVar("color")


async def test_function_runs_in_its_own_thread_with_the_context_of_the_caller() -> None:
    color.set("red")
    name, seen = await in_thread(lambda: (threading.current_thread().name, color.get()), name="worker")
    assert (name, seen) == ("worker", "red")


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyError("y")])
async def test_exception_is_raised_to_the_caller(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await in_thread(fail, name="worker")
    assert raised.value is error


async def test_stuck_functions_may_outnumber_any_thread_pool() -> None:
    release = threading.Event()
    stuck = [asyncio.create_task(in_thread(release.wait, name=f"stuck {number}")) for number in range(100)]
    assert await in_thread(lambda: "free", name="worker") == "free"
    release.set()
    assert all(await asyncio.gather(*stuck))


def test_stuck_executor_threads_delay_neither_calls_nor_shutdown() -> None:
    release = threading.Event()

    async def main() -> tuple[int, str]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(UnboundedExecutor())
        for _ in range(100):
            loop.run_in_executor(None, release.wait)
        color.set("blue")
        with pytest.raises(ValueError, match="invalid literal"):
            await asyncio.to_thread(int, "four")
        return await asyncio.to_thread(int, "4"), await asyncio.to_thread(color.get)

    rescue = threading.Timer(60.0, release.set)
    rescue.start()
    assert asyncio.run(main()) == (4, "blue")
    assert not release.is_set()
    rescue.cancel()
    release.set()


async def test_cancellation_logs_the_stack_of_the_thread() -> None:
    release, started = threading.Event(), threading.Event()

    def wait_without_end() -> None:
        started.set()
        release.wait()

    task = asyncio.create_task(in_thread(wait_without_end, name="stuck one"))
    await in_thread(started.wait, name="watcher")
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    release.set()
    assert "in wait_without_end" in raised.value.__notes__[0]
    assert "'stuck one'" in raised.value.__notes__[0]


async def test_threads_are_reused() -> None:
    before = {
        thread.ident for thread in threading.enumerate()
    }  # a thread that hung in another test may return meanwhile
    used = {await in_thread(threading.get_ident, name=f"job {number}") for number in range(20)}
    assert len(used - before) <= 1
    assert len(used) < 20


async def test_reused_thread_keeps_nothing_of_the_previous_job() -> None:
    color.set("red")
    await in_thread(lambda: None, name="one")
    color.set("blue")
    assert await in_thread(lambda: color.get("none"), name="two") == "blue"


async def test_single_thread_runs_jobs_in_order_and_survives_stuck_ones() -> None:
    thread, release, started = SerialExecutor(), threading.Event(), threading.Event()
    used = await asyncio.gather(*(thread.run(threading.get_ident, name=f"job {number}") for number in range(20)))
    assert len(set(used)) == 1

    def hang() -> None:
        started.set()
        release.wait()

    stuck = asyncio.create_task(thread.run(hang, name="stuck"))
    await in_thread(started.wait, name="watcher")
    stuck.cancel()
    assert await thread.run(lambda: "free", name="next") == "free"
    release.set()
    thread.close()


async def test_slot_is_freed_after_a_while_or_when_its_call_ends() -> None:
    places, release = SoftLimiter(2, soft_timeout_s=0.05), asyncio.Event()

    async def take(name: str, until: asyncio.Event | None = None) -> None:
        async with places.slot(name):
            began.append(name)
            if until is not None:
                await until.wait()

    began: list[str] = []
    hung = [asyncio.create_task(take(f"hung {number}", release)) for number in range(6)]
    await asyncio.sleep(0)
    await take("last")
    assert began == ["hung 0", "hung 1", "hung 2", "hung 3", "hung 4", "hung 5", "last"]
    release.set()
    await asyncio.gather(*hung)
    never = SoftLimiter(1)
    async with never.slot("first"):
        waiting = asyncio.create_task(take("x"))
        await asyncio.sleep(0)
    await waiting


async def test_stuck_job_does_not_block_the_single_thread_forever() -> None:
    thread, release = SerialExecutor(soft_timeout_s=0.05), threading.Event()
    stuck = asyncio.create_task(thread.run(release.wait, name="stuck"))
    await asyncio.sleep(0)
    first = await thread.run(threading.get_ident, name="next")
    release.set()
    assert await stuck
    assert await thread.run(threading.get_ident, name="after") == first
    thread.close()


@pytest.mark.parametrize("ends", ["closed", "closed while it runs", "forgotten"])
async def test_single_thread_ends_after_use(ends: str) -> None:
    thread: SerialExecutor | None = SerialExecutor()
    assert thread is not None
    used = await thread.run(threading.current_thread, name="job")
    if ends == "closed while it runs":
        release = threading.Event()
        running = asyncio.create_task(thread.run(release.wait, name="job"))
        await asyncio.sleep(0)
        thread.close()
        release.set()
        await running
    elif ends == "closed":
        thread.close()
    running = thread = None  # type: ignore[assignment]
    used.join(60)
    assert not used.is_alive()


async def test_abandoned_thread_ends_when_its_function_returns() -> None:
    thread, began, release, seen = SerialExecutor(), threading.Event(), threading.Event(), []

    def hang() -> None:
        seen.append(threading.current_thread())
        began.set()
        release.wait()

    stuck = asyncio.create_task(thread.run(hang, name="stuck"))
    await in_thread(began.wait, name="watcher")
    stuck.cancel()
    await asyncio.wait({stuck})
    release.set()
    seen[0].join(60)
    assert not seen[0].is_alive()
    thread.close()


def test_forked_child_starts_its_own_threads() -> None:
    code = """
import asyncio, os
from rllm._runtime.threads import in_thread
asyncio.run(in_thread(lambda: None, name="parent"))
child = os.fork()
if child == 0:
    os._exit(asyncio.run(in_thread(lambda: 7, name="child")))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "7\n"


async def test_event_loop_starts_no_threads_except_the_starter() -> None:
    release, started = threading.Event(), []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is threading.Thread.start.__code__:
            started.append(frame)

    sys.setprofile(profile)  # of this thread only
    stuck = [asyncio.create_task(in_thread(release.wait, name=f"stuck {number}")) for number in range(50)]
    await in_thread(release.set, name="worker")
    sys.setprofile(None)
    assert all(await asyncio.gather(*stuck))
    assert len(started) <= 1


NO_ROOM = """
import asyncio, resource, threading
from rllm._runtime.threads import SerialExecutor, in_thread

async def tried(call):
    try:
        return await call
    except RuntimeError as error:
        return str(error)

async def main():
    one = SerialExecutor()
    print(await in_thread(lambda: "begun", name="first"))
    threading.stack_size(1 << 32)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
    release = threading.Event()
    held = asyncio.create_task(in_thread(release.wait, name="held"))
    await asyncio.sleep(0)
    print(await tried(in_thread(lambda: "begun", name="second")))
    print(await tried(one.run(lambda: "begun", name="third")))
    threading.stack_size(0)
    print(await one.run(lambda: "begun", name="fourth"))
    release.set()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
def test_failure_to_start_a_thread_is_an_error_of_its_call() -> None:
    printed = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["begun", "can't start new thread", "can't start new thread", "begun"]


AT_EXIT = """
import asyncio, atexit
from rllm._runtime.threads import in_thread

atexit.register(lambda: print(asyncio.run(in_thread(lambda: "closed", name="last"))))
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no thread can start then")
def test_functions_run_while_the_interpreter_ends() -> None:
    printed = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True).stdout
    assert printed == "closed\n"
