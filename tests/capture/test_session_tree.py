import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.capture import CallNode, ParentIndex, SessionTree, continues, packed_ids, parent_of
from rllm.types import Trace

tokens = st.lists(st.integers(0, 1), max_size=4)


def call(
    trace_id: str, prompt_ids: list[int], response_ids: list[int], parent_id: str | None = None, **fields
) -> Trace:
    return Trace(
        id=trace_id,
        call_id=trace_id,
        session_id="s",
        parent_id=parent_id,
        model="m",
        messages=[],
        response={},
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        **fields,
    )


CALLS = [
    call("one", [1, 2], [3]),
    call("two", [1, 2, 3, 4], [5], parent_id="one"),
    call("other", [1, 9], [3]),
    call("failed", [], []),
    call("sibling", [1, 2], [3]),
]


def index_of(traces: list[Trace]) -> ParentIndex:
    index = ParentIndex()
    for trace in traces:
        index.add(CallNode.of_trace(trace))
    return index


@pytest.mark.parametrize(
    ("prompt_ids", "parent"),
    [
        ([1, 2, 3, 4, 5, 6], "two"),
        ([1, 2, 3, 4, 5], "two"),
        ([1, 2, 3, 4], "sibling"),  # as long as "one", and later
        ([1, 2], None),
        ([1, 2, 4, 4, 5], None),
    ],
)
def test_parent_is_the_longest_and_latest_call(prompt_ids, parent):
    assert parent_of(prompt_ids, CALLS) == parent
    assert index_of(CALLS).parent_of(packed_ids(prompt_ids)) == parent


@given(st.lists(st.tuples(tokens, tokens), max_size=6), tokens)
def test_hashes_find_the_same_parent_as_tokens(calls, prompt_ids):
    traces = [call(str(number), *ids) for number, ids in enumerate(calls)]
    assert index_of(traces).parent_of(packed_ids(prompt_ids)) == parent_of(prompt_ids, traces)


def test_values_that_are_not_token_ids_are_not_packed():
    assert packed_ids([1, 258]).tobytes() == b"\1\0\0\0\2\1\0\0"
    assert [packed_ids(ids) for ids in ([1, -1], [1, "2"], [2**32], None, "12")] == [None] * 5


def test_tree_follows_parent_ids():
    tree = SessionTree(CALLS)
    assert [trace.id for trace in tree.path_to(CALLS[1])] == ["one", "two"]
    assert [trace.id for trace in tree.leaves()] == ["two", "other", "sibling"]


def test_parent_with_different_tokens_is_ignored():
    parent, child = call("a", [1], [2], parent_id="b"), call("b", [1, 9, 3], [4], parent_id="a")
    assert SessionTree([parent, child]).path_to(child) == [child]
    assert not continues(child.prompt_ids, parent)


def test_failed_call_is_not_part_of_the_tree():
    failed, child = call("a", [1], [2], error="cut off"), call("b", [1, 2, 3], [4], parent_id="a")
    assert SessionTree([failed, child]).path_to(child) == [child]
    assert SessionTree([failed, child]).leaves() == [child]
