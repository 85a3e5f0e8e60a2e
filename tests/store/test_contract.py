"""Behaviour of every trace store."""

import asyncio
import random
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import SessionDeletedError, StoreError
from rllm.store import TraceStore, open_store
from rllm.store.base import SessionRef, session_pages
from rllm.types import StepCredit, Trace

from .sample_traces import trace_of, turn_of

OpenStore = Callable[[], TraceStore]


@pytest.fixture(params=["memory:", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TraceStore]:
    url = {"memory:": "memory:", "sqlite": str(tmp_path / "traces.db")}.get(request.param)
    store = open_store(url or request.getfixturevalue("postgres_url"))
    yield store
    store.close()


def credit_of(trace_id: str, training_step: int = 1, session_id: str = "s", **changes: Any) -> StepCredit:
    values: dict[str, Any] = {"episode_id": "t:0", "trajectory_name": "agent", "reward": 1.0}
    return StepCredit(trace_id=trace_id, training_step=training_step, session_id=session_id, **(values | changes))


FULL = trace_of(
    parent_id="z",
    choice_index=2,
    tools=[{"type": "function", "function": {"name": "add"}}],
    logprobs_kind="processed",
    sampling={"temperature": 0.7, "stop": ["x"]},
    requested_sampling={"top_p": 0.9},
    finish_reason="stop",
    weight_version=3,
    template_hash="ab" * 32,
    started_at=12.5,
    timings={"total_s": 0.25},
    metadata={"task": {"id": "a:b", "n": 2**70}, "words": "müsli 🥣 \ud800"},
    error="no tokens",
)
EMPTY = trace_of(prompt_ids=[], response_ids=[], logprobs=[], messages=[], response={})


@pytest.mark.parametrize("trace", [trace_of(), FULL, EMPTY, trace_of(session_id="a/b ü")])
@pytest.mark.parametrize("kind", [list, partial(array, "I")])
def test_trace_round_trip_is_lossless(store: TraceStore, trace: Trace, kind: Any):
    store.add([replace(trace, prompt_ids=kind(trace.prompt_ids))]).result()
    assert store.by_session(trace.session_id) == [trace]


@pytest.mark.parametrize("odd", ["half \ud83e", "nul \0"])
def test_names_with_invalid_characters_are_found(store: TraceStore, odd: str):
    """Agents and servers choose these names: a database may hold an escape in their place."""
    store.open_session(odd, {"of": "me"})
    store.add([trace_of("before", odd, started_at=1.0)]).result()
    store.add(
        [trace_of(odd, odd, parent_id="before", model=odd, finish_reason=odd, error=odd, started_at=2.0)]
    ).result()
    store.annotate([credit_of(odd, session_id=odd, trajectory_name=odd, group_id=odd)]).result()
    info = store.session(odd)
    assert info is not None
    assert (info.num_traces, info.metadata, info.number) == (2, {"of": "me"}, store.sessions()[0].number)
    assert len(store.by_session(odd)) == len(store.by_session(info.id)) == 2
    assert [trace.started_at for name in ("before", odd) if (trace := store.trace(odd, name))] == [1.0, 2.0]
    assert (store.last_call_at(odd), store.session_of(odd), len(store.credits(odd))) == (2.0, info.id, 1)
    assert store.delete(odd) == 2


def test_last_call_of_a_session_is_the_one_started_last(store: TraceStore):
    calls = [trace_of("a", started_at=7.0), trace_of("b", started_at=9.5), trace_of("c", started_at=8.0)]
    store.add([*calls, trace_of("a", "other", started_at=20.0)]).result()
    store.open_session("empty", {}).result()
    asked = ("s", "other", "empty", "unknown")
    assert [store.last_call_at(session_id) for session_id in asked] == [9.5, 20.0, None, None]


def test_traces_are_in_call_order_across_writes(store: TraceStore):
    names = ["m", "a", "z", "b", "y"]
    store.add([trace_of("m"), trace_of("a"), trace_of("other", "t")])
    store.add([trace_of("z")])
    store.add([trace_of("b"), trace_of("y")]).result()
    assert [trace.id for trace in store.by_session("s")] == names
    assert [trace.id for trace in store.by_session("t")] == ["other"]


def test_retried_id_is_replaced_in_place(store: TraceStore):
    store.add([trace_of("a"), trace_of("b"), trace_of("c")])
    store.add([trace_of("b", finish_reason="length", response_ids=[9, 9])]).result()
    stored = store.by_session("s")
    assert [trace.id for trace in stored] == ["a", "b", "c"]
    assert (stored[1].finish_reason, stored[1].response_ids) == ("length", [9, 9])
    info = store.session("s")
    assert info is not None
    assert info.num_traces == 3


def test_repeated_ids_do_not_overwrite_another_session(store: TraceStore):
    store.add([trace_of("same", "s"), trace_of("same", "t", response_ids=[8, 8])]).result()
    assert store.by_session("s") == [trace_of("same", "s")]
    assert store.by_session("t") == [trace_of("same", "t", response_ids=[8, 8])]


def test_metadata_is_merged_over_several_openings(store: TraceStore):
    store.open_session("s", {"task": 1, "split": "train"})
    store.open_session("s", {"split": "val", "n": None}).result()
    info = store.session("s")
    assert info is not None
    assert (info.id, info.num_traces, info.metadata) == ("s", 0, {"task": 1, "split": "val", "n": None})


def test_session_created_by_traces_has_no_metadata(store: TraceStore):
    store.add([trace_of()]).result()
    [info] = store.sessions()
    assert (info.num_traces, info.metadata) == (1, {})
    store.open_session("s", {"task": 1}).result()
    [later] = store.sessions()
    assert later == replace(info, metadata={"task": 1})


def test_sessions_are_listed_newest_first_in_pages(store: TraceStore):
    for name in ("one", "two", "three"):
        store.open_session(name, {}).result()
    store.add([trace_of("a", "one")]).result()
    assert [info.id for info in store.sessions()] == ["three", "two", "one"]
    assert [info.id for info in store.sessions(limit=1, offset=1)] == ["two"]
    assert store.sessions(offset=3) == []


def test_sessions_may_be_listed_after_a_given_one(store: TraceStore):
    for name in "abc":
        store.open_session(name, {})
    store.open_session("d", {}).result()
    first = store.sessions(oldest_first=True, limit=1)[0].number
    assert [info.id for info in store.sessions(oldest_first=True, beyond=first, limit=2)] == ["b", "c"]
    assert store.sessions(beyond=first) == []


def test_unknown_session_is_empty_and_not_an_error(store: TraceStore):
    assert store.session("nope") is None
    assert store.by_session("nope") == []
    assert store.credits("nope") == []
    assert store.delete("nope") == 0


def test_credits_are_in_call_order_and_the_latest_counts(store: TraceStore):
    store.add([trace_of("b"), trace_of("a")]).result()
    dropped = credit_of("b", 2, reward=None, dropped="no siblings")
    store.annotate([credit_of("unknown"), credit_of("a"), dropped, credit_of("b", 1)])
    full = credit_of("a", group_id="t", baseline=0.5, advantage=-0.25, trainer_logprobs=[-0.5, -0.1], reward=0.25)
    store.annotate([full]).result()
    assert store.credits("s") == [credit_of("b", 1), dropped, full, credit_of("unknown")]


def test_step_has_a_credit_in_each_trajectory_that_shares_it(store: TraceStore):
    store.add([trace_of("a")]).result()
    critic = credit_of("a", trajectory_name="critic", trajectory_index=1)
    store.annotate([critic, credit_of("a", reward=0.5)]).result()
    store.annotate([credit_of("a", reward=0.25)]).result()
    assert store.credits("s") == [credit_of("a", reward=0.25), critic]


def test_deleting_a_session_deletes_only_its_traces_and_credits(store: TraceStore):
    store.add([trace_of("a"), trace_of("b"), trace_of("a", "t")])
    store.annotate([credit_of("a"), credit_of("a", session_id="t")])
    assert store.delete("s") == 2
    assert store.session("s") is None
    assert store.by_session("s") == store.credits("s") == []
    assert (len(store.by_session("t")), len(store.credits("t"))) == (1, 1)


def test_deleted_session_may_be_created_again(store: TraceStore):
    store.add([trace_of("a"), trace_of("b")])
    store.delete("s")
    store.add([trace_of("c")]).result()
    assert [trace.id for trace in store.by_session("s")] == ["c"]


def test_deleted_session_gets_no_more_traces(store: TraceStore):
    session = SessionRef()
    store.open_session("s", {}, session=session).result()
    store.add([trace_of("a")], session=session).result()
    store.delete("s")
    for rerendered in (False, True):
        if rerendered:
            store.add([trace_of("b")]).result()
        with pytest.raises(SessionDeletedError, match="session 's' was deleted"):
            store.add([trace_of("c")], session=session).result()
    assert session.is_gone
    assert [trace.id for trace in store.by_session("s")] == ["b"]


def test_rejected_write_creates_nothing_and_fails_alone(store: TraceStore):
    gone = SessionRef()
    store.add([trace_of("a")], session=gone).result()
    store.delete("s")
    kept, refused = [], []
    for number in range(3):
        kept.append(store.add([trace_of(f"{number}", "t")]))
        refused.append(store.add([trace_of(f"{number}")], session=gone))
    assert [write.exception(60) for write in kept] == [None] * 3
    assert {type(write.exception(60)) for write in refused} == {SessionDeletedError}
    assert store.session("s") is None
    assert [trace.id for trace in store.by_session("t")] == ["0", "1", "2"]


def test_credits_of_a_deleted_session_are_ignored(store: TraceStore):
    store.add([trace_of("a"), trace_of("a", "t")]).result()
    store.delete("s")
    store.annotate([credit_of("a"), credit_of("a", session_id="t")]).result()
    assert store.session("s") is None
    assert store.credits("t") == [credit_of("a", session_id="t")]


def test_reference_gets_its_session_from_the_first_write(store: TraceStore):
    first, found = SessionRef(), store.session("s")
    assert found is None
    store.add([trace_of("a")], session=first).result()
    found = store.session("s")
    assert found is not None
    assert first == SessionRef(number=found.number)
    store.add([trace_of("b")], session=SessionRef(number=found.number)).result()
    assert len(store.by_session("s")) == 2


def test_conversation_round_trip_is_lossless(store: TraceStore):
    turns = [turn_of(number) for number in range(12)]
    for turn in turns:
        store.add([turn]).result()
    assert store.by_session("s") == turns


FORKS = {
    "an agent that edits its history": {"messages": [{"role": "user", "content": "summary"}], "prompt_ids": [9, 9]},
    "an agent that strips the reasoning": {"messages": [*turn_of(2).messages[:2], {"role": "user", "content": "?"}]},
    "other tools": {"tools": None, "metadata": {}},
    "another answer to the same prompt": {**{name: getattr(turn_of(1), name) for name in ("messages", "prompt_ids")}},
    "the same text as other ids": {"prompt_ids": list(range(5000, 5080))},
    "a prompt that ends within the answer before it": {"prompt_ids": turn_of(2).prompt_ids[:55]},
    "an unknown parent": {"parent_id": "unknown"},
    "values outside of JSON": {"messages": [*turn_of(2).messages, {"role": "user", "content": "half \ud83e"}]},
}


@pytest.mark.parametrize("changes", FORKS.values(), ids=FORKS)
def test_turn_with_an_edited_history_is_read_unchanged(store: TraceStore, changes: Any):
    turns = [turn_of(0), turn_of(1), turn_of(2, **changes), turn_of(3)]
    for turn in turns:
        store.add([turn]).result()
    assert store.by_session("s") == turns


def test_replacing_a_turn_leaves_its_continuations_unchanged(store: TraceStore):
    for number in range(4):
        store.add([turn_of(number)]).result()
    changed = turn_of(1, response_ids=[7], logprobs=[-1.0], messages=[{"role": "user", "content": "new"}])
    store.add([changed]).result()
    assert store.by_session("s") == [turn_of(0), changed, turn_of(2), turn_of(3)]
    store.add([turn_of(4)]).result()
    assert store.by_session("s")[4:] == [turn_of(4)]


def test_conversation_continues_after_its_session_was_deleted(store: TraceStore):
    for number in range(2):
        store.add([turn_of(number)]).result()
    store.delete("s")
    store.add([turn_of(2)]).result()
    assert store.by_session("s") == [turn_of(2)]


def test_reading_one_trace_reads_only_its_bases(store: TraceStore):
    turns = [turn_of(k) for k in range(5)]
    for trace in (*turns, trace_of("alone", "t")):
        store.add([trace]).result()
    session_id = turns[0].session_id
    for turn in turns:
        assert store.trace(session_id, turn.id) == turn
        assert store.session_of(turn.id) == session_id
    assert store.session_of("alone") == "t"
    assert store.trace(session_id, "alone") is store.trace("nobody's", turns[0].id) is store.session_of("nope") is None


def test_sessions_are_listed_oldest_first(store: TraceStore):
    for name in ("one", "two", "three"):
        store.open_session(name, {}).result()
    assert [info.id for info in store.sessions(oldest_first=True, limit=2)] == ["one", "two"]
    assert [info.id for info in store.sessions(oldest_first=True, offset=2)] == ["three"]


@pytest.mark.parametrize("oldest_first", [False, True])
def test_sessions_deleted_during_paging_hide_no_others(store: TraceStore, oldest_first: bool):
    for number in range(6):
        store.open_session(str(number), {}).result()
    pages = session_pages(store, oldest_first=oldest_first, page_size=2)
    first = [info.id for info in next(pages)]
    for session_id in first:
        store.delete(session_id)
    found = first + [info.id for page in pages for info in page]
    assert found == sorted(found, reverse=not oldest_first)
    assert len(found) == 6


def test_copied_session_keeps_its_age(store: TraceStore):
    store.open_session("s", {"a": 1}, created_at=12.5).result()
    store.open_session("s", {"b": 2}, created_at=99.0).result()
    info = store.session("s")
    assert info is not None
    assert (info.created_at, info.metadata) == (12.5, {"a": 1, "b": 2})


def test_size_grows_with_traces_and_shrinks_after_deletion(store: TraceStore):
    empty = store.num_bytes()
    ids = random.Random(0).choices(range(150_000), k=100_000)  # 17.2 bits of entropy each
    store.add([trace_of(prompt_ids=ids)]).result()
    assert 215_000 <= store.num_bytes() - empty < 260_000
    store.delete("s")
    assert store.num_bytes() - empty < 10_000


def test_empty_write_is_allowed(store: TraceStore):
    store.add([]).result()
    store.annotate([]).result()
    assert store.sessions() == []


async def test_cancelled_wait_for_a_write_loses_nothing(store: TraceStore):
    await asyncio.wrap_future(store.add([trace_of("a")]))
    waiting = asyncio.wrap_future(store.add([trace_of("b")]))
    waiting.cancel()
    await asyncio.wrap_future(store.add([trace_of("c")]))
    assert [trace.id for trace in store.by_session("s")] == ["a", "b", "c"]


def test_many_threads_may_write_and_read_concurrently(store: TraceStore):
    def use(worker: int) -> list[str]:
        session_id = f"s{worker}"
        for k in range(20):
            store.add([trace_of(f"{worker}-{k}", session_id)]).result()
            assert len(store.by_session(session_id)) == k + 1
        return [trace.id for trace in store.by_session(session_id)]

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(use, range(8)))
    assert ids == [[f"{worker}-{k}" for k in range(20)] for worker in range(8)]


def test_closed_store_raises_and_may_be_closed_again(store: TraceStore):
    store.close()
    store.close()
    for use in (lambda: store.add([trace_of()]), lambda: store.by_session("s"), lambda: store.delete("s")):
        with pytest.raises(StoreError, match="closed"):
            use()
