import dataclasses
from typing import Any

import pytest

from rllm.store.codec import unpack_ids
from rllm.store.turns import KnownTurns, PackedTrace, Turn, draft_of, pack, unpack_document_of
from rllm.types import Trace

from .sample_traces import trace_of, turn_of


def pack_trace(trace: Trace, base: Turn | None = None) -> PackedTrace:
    return pack(draft_of(trace), base)


def test_later_changes_to_a_trace_do_not_reach_its_draft():
    trace = trace_of(metadata={"k": 1})
    draft = draft_of(trace)
    before = pack(draft)
    trace.metadata["k"], trace.prompt_ids[0], trace.messages[0]["content"] = 2, 9, "other"
    assert pack(draft) == before


def test_a_turn_is_kept_as_what_it_adds():
    before = pack_trace(turn_of(9))
    alone, added = pack_trace(turn_of(10)), pack_trace(turn_of(10), before.turn)
    assert added.base is before.turn
    assert unpack_ids(alone.prompt_ids) == list(range(1000, 1320))
    assert unpack_ids(added.prompt_ids) == list(range(1300, 1320))  # without those that turn 9 ended with
    assert len(added.document) < len(alone.document) / 2
    # Everything that a later turn may leave out is known by the same name, however it was written.
    assert alone.turn == added.turn


def test_what_was_left_out_is_put_back():
    packed = pack_trace(turn_of(10), pack_trace(turn_of(9)).turn)
    document, shared_ids, _ = unpack_document_of(packed.document, turn_of(9))
    assert shared_ids == list(range(1000, 1300))
    assert document["messages"] == turn_of(10).messages
    assert (document["tools"], document["metadata"]) == (turn_of(10).tools, {"task": 7})


def test_a_turn_is_not_read_without_its_base():
    packed = pack_trace(turn_of(10), pack_trace(turn_of(9)).turn)
    with pytest.raises(LookupError, match="that this one continues is missing"):
        unpack_document_of(packed.document, None)


def test_to_depend_on_a_trace_has_to_pay():
    first, other = trace_of("a", metadata={"k": 1}), trace_of("b", metadata={"k": 1}, prompt_ids=[9], messages=[])
    assert pack_trace(other, pack_trace(first).turn).base is None


CHANGES = [
    {"prompt_ids": [1]},
    {"response_ids": [1]},
    {"messages": []},
    {"response": {}},
    {"tools": None},
    {"sampling": {}},
    {"requested_sampling": {"n": 2}},
    {"metadata": {"task": 8}},
]


@pytest.mark.parametrize("change", CHANGES, ids=[next(iter(change)) for change in CHANGES])
def test_the_digest_is_of_all_that_a_later_turn_may_leave_out(change: dict[str, Any]):
    assert pack_trace(turn_of(1, **change)).digest != pack_trace(turn_of(1)).digest


def test_a_prompt_and_its_answer_are_not_taken_for_a_longer_prompt():
    """The same ids, split elsewhere."""
    one = trace_of(prompt_ids=[1, 2], response_ids=[3])
    two = dataclasses.replace(one, prompt_ids=[1], response_ids=[2, 3])
    assert pack_trace(one).digest != pack_trace(two).digest


def test_the_base_is_the_parent_else_the_latest_and_only_of_the_same_session():
    known = KnownTurns()
    assert known.base_of(turn_of(1)) is None
    known.learn([pack_trace(turn_of(0)), pack_trace(turn_of(1)), pack_trace(turn_of(0, "other"))])
    assert [known.base_of(turn_of(k)).id for k in (1, 2, 3)] == ["turn 0", "turn 1", "turn 1"]
    assert known.base_of(turn_of(1, "other")).id == "turn 0"


def test_what_is_remembered_does_not_grow():
    known = KnownTurns()
    for number in range(20):
        known.learn([pack_trace(trace_of(f"{number}"))])
    for number in range(5000):
        known.learn([pack_trace(trace_of("a", f"session {number}", messages=[], prompt_ids=[]))])
    assert sum(len(turns) for turns in known._sessions.values()) == 4096
