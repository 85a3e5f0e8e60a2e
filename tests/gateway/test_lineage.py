from hypothesis import given
from hypothesis import strategies as st

from rllm.capture import parent_of
from rllm.gateway.lineage import Lineage
from rllm.types import Trace

tokens = st.lists(st.integers(0, 1), max_size=4)


@given(st.lists(st.tuples(tokens, tokens), max_size=6), tokens)
def test_lineage_finds_what_the_comparison_of_tokens_finds(calls, prompt_ids):
    lineage = Lineage()
    traces = []
    for number, (prompt, response) in enumerate(calls):
        trace = Trace(
            id=str(number),
            call_id=str(number),
            session_id="s",
            model="m",
            messages=[],
            response={},
            prompt_ids=prompt,
            response_ids=response,
        )
        traces.append(trace)
        lineage.add(trace)
    assert lineage.parent_of(prompt_ids) == parent_of(prompt_ids, traces)
