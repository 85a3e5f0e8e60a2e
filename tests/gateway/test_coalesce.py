import copy

from hypothesis import given
from hypothesis import strategies as st

from rllm.capture import ChatStream
from rllm.gateway.coalesce import coalesced

deltas = st.one_of(
    st.fixed_dictionaries({"content": st.text(max_size=3)}),
    st.sampled_from([{}, {"role": "assistant", "content": ""}, {"reasoning_content": "r"}, {"content": None}]),
)
choices = st.fixed_dictionaries(
    {"index": st.integers(0, 1), "delta": deltas, "finish_reason": st.sampled_from([None, None, None, "stop"])},
    optional={
        "token_ids": st.lists(st.integers(0, 9), max_size=2),
        "logprobs": st.one_of(st.none(), st.just({"content": [{"logprob": -1.0}]}), st.just({"content": None})),
    },
)
chunks = st.fixed_dictionaries(
    {"id": st.just("x"), "choices": st.lists(choices, max_size=2)},
    optional={"usage": st.just({"total_tokens": 3}), "prompt_token_ids": st.just([1])},
)


@given(st.lists(chunks, max_size=8))
def test_merged_chunks_rebuild_the_same_answer(stream):
    def rebuilt(chunks):
        answer = ChatStream()
        for chunk in chunks:
            answer.feed(chunk)
        return answer.response()

    assert rebuilt(coalesced(copy.deepcopy(stream))) == rebuilt(stream)


def test_text_that_arrived_together_is_one_chunk():
    def chunk(text, token_id):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": [token_id]}
        return {"id": "x", "choices": [choice]}

    [merged] = coalesced([chunk("a", 1), chunk("b", 2), chunk("c", 3)])
    assert merged["choices"][0]["delta"] == {"content": "abc"}
    assert merged["choices"][0]["token_ids"] == [1, 2, 3]
