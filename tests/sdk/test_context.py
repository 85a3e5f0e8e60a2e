from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from multiprocessing.pool import ThreadPool

import pytest

from rllm.sdk.context import (
    Session,
    current_frame,
    get_current_metadata,
    get_current_session,
    get_current_session_name,
    session,
)
from rllm.types import Trace


def call(trace_id: str) -> None:
    """Record a model call in the enclosing sessions."""
    frame = current_frame()
    assert frame is not None
    frame.reserve_call().traces.append(trace(trace_id))


def trace(trace_id: str) -> Trace:
    return Trace(
        id=trace_id,
        call_id=trace_id,
        session_id="s",
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        response={"role": "assistant", "content": "ho"},
    )


def test_current_session_is_none_outside_of_sessions() -> None:
    assert get_current_session() is None
    assert get_current_session_name() is None
    assert get_current_metadata() == {}


def test_nested_sessions_share_the_name_and_merge_metadata() -> None:
    with session(agent="solver", run=1) as outer:
        with session(agent="judge", depth=2) as inner:
            assert get_current_session() is inner
            assert inner.name == outer.name == get_current_session_name()
            assert inner.metadata == {"agent": "judge", "depth": 2}
            assert get_current_metadata() == {"agent": "judge", "run": 1, "depth": 2}
        assert get_current_session() is outer
        assert get_current_metadata() == {"agent": "solver", "run": 1}


def test_any_key_is_allowed_in_metadata() -> None:
    with session(name="x", self="y", metadata=1, base_url="z", session=2) as sess:
        assert get_current_metadata() == {"name": "x", "self": "y", "metadata": 1, "base_url": "z", "session": 2}
        assert sess.name != "x"
        assert sess.base_url is None


def test_outer_session_contains_inner_calls_in_call_order() -> None:
    with session() as outer:
        call("a")
        with session() as inner:
            call("b")
        call("c")
    assert [item.id for item in outer.llm_calls] == ["a", "b", "c"]
    assert [item.id for item in inner.llm_calls] == ["b"]
    assert len(outer) == 3


def test_call_order_is_the_order_of_requests() -> None:
    with session() as sess:
        frame = current_frame()
        assert frame is not None
        first, second = frame.reserve_call(), frame.reserve_call()
        second.traces.append(trace("second"))
        assert [item.id for item in sess.llm_calls] == ["second"]
        first.traces.append(trace("first"))
    assert [item.id for item in sess.llm_calls] == ["first", "second"]


def test_rewards_set_on_steps_are_kept() -> None:
    with session() as outer, session() as inner:
        call("a")
    inner.steps[0].reward = 1.0
    assert inner.steps[0].reward == 1.0
    assert inner.steps[0].id == "a"
    assert outer.steps[0].reward == 0.0  # each session scores for itself


def test_session_without_calls_is_truthy() -> None:
    assert session()
    assert len(session()) == 0


def test_session_can_be_reentered_and_nested() -> None:
    sess = session(a=1)
    own_name = sess.name
    with session() as outer, sess:
        call("a")
        assert sess.name == outer.name
    with sess, sess:
        call("b")
        assert sess.name == own_name
    assert current_frame() is None
    assert [item.id for item in sess.llm_calls] == ["a", "b"]


async def test_tasks_have_separate_sessions() -> None:
    async def agent(name: str) -> list[str]:
        with session(agent=name) as sess:
            await asyncio.sleep(0)
            call(f"{name}1")
            await asyncio.sleep(0)
            assert get_current_metadata() == {"agent": name}
            call(f"{name}2")
        return [item.id for item in sess.llm_calls]

    assert await asyncio.gather(*map(agent, "abc")) == [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]
    assert current_frame() is None


async def test_session_shared_by_tasks_collects_from_all() -> None:
    shared = session()

    async def agent(name: str) -> None:
        with shared:
            await asyncio.sleep(0)
            call(name)

    await asyncio.gather(*map(agent, "abc"))
    assert {item.id for item in shared.llm_calls} == {"a", "b", "c"}


def test_threads_and_executors_inherit_the_session() -> None:
    executor = ThreadPoolExecutor(max_workers=1)
    with session() as first:
        thread = threading.Thread(target=call, args=("thread",))
        thread.start()
        thread.join()
        executor.submit(call, "job").result()
    with session() as second:
        executor.submit(call, "same worker, other session").result()
    executor.shutdown()
    assert {item.id for item in first.llm_calls} == {"thread", "job"}
    assert [item.id for item in second.llm_calls] == ["same worker, other session"]


def test_jobs_of_a_thread_pool_belong_to_their_submitter() -> None:
    with session() as first, ThreadPool(2) as pool:
        pool.map(call, ["one"])
        with session() as second:
            pool.map(call, ["a", "b"], chunksize=1)
            pool.starmap(call, [["c"]])
            pool.apply(call, ["d"])
            list(pool.imap(call, ["e"]))
            list(pool.imap_unordered(call, ["f"], chunksize=2))
    assert sorted(item.id for item in second.llm_calls) == ["a", "b", "c", "d", "e", "f"]
    assert len(first.llm_calls) == 7


async def test_run_in_executor_inherits_the_session() -> None:
    with session() as sess:
        await asyncio.get_running_loop().run_in_executor(None, call, "a")
    assert len(sess) == 1


def test_thread_that_outlives_its_session_has_no_session() -> None:
    closed = threading.Event()
    seen: list[object] = []

    def work() -> None:
        closed.wait(60)
        seen.append(get_current_session())

    with session():
        thread = threading.Thread(target=work)
        thread.start()
    closed.set()
    thread.join()
    assert seen == [None]


def test_threads_outside_of_sessions_are_not_changed() -> None:
    before = threading.Thread.start
    with session():
        assert threading.Thread.start is not before
    assert threading.Thread.start is before


def test_subclass_with_its_own_run_keeps_it() -> None:
    class Worker(threading.Thread):
        def run(self) -> None:
            call(self.name)

    with session() as sess:
        worker = Worker(name="own")
        worker.start()
        worker.join()
    assert [item.id for item in sess.llm_calls] == ["own"]


def test_thread_that_failed_to_start_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    starts = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
    with session() as sess:
        thread = threading.Thread(target=call, args=["second try"])
        with monkeypatch.context() as full:
            full.setattr(threading, starts, no_room)
            with pytest.raises(RuntimeError):
                thread.start()
        thread.start()
        thread.join()
    assert [item.id for item in sess.llm_calls] == ["second try"]


def test_exit_in_another_context_than_entry_is_harmless() -> None:
    def generator() -> Iterator[None]:
        with session():
            yield

    steps = generator()
    next(steps)
    thread = threading.Thread(target=lambda: next(steps, None))
    thread.start()
    thread.join()
    assert current_frame() is None


def test_exiting_a_session_of_another_context_keeps_the_current_one() -> None:
    elsewhere = session(of="a generator")
    copy_context().run(elsewhere.__enter__)
    with session() as ours:
        elsewhere.__exit__(None, None, None)
        assert get_current_session() is ours


def test_sessions_may_be_exited_in_any_order() -> None:
    first, second = session(which="first"), session(which="second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert get_current_session() is second
    assert get_current_metadata() == {"which": "second"}
    second.__exit__(None, None, None)
    assert get_current_session() is None


def test_threads_in_one_session_stay_in_their_own_rollouts() -> None:
    shared, strayed = Session({"agent": "judge"}), []

    def rollout(name: str) -> None:
        with Session(name=name):
            for _ in range(500):
                with shared:
                    strayed.extend({get_current_session_name()} - {name})

    threads = [threading.Thread(target=rollout, args=(f"r{number}",)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert strayed == []
