"""Answers to one prompt whose tool calls have the same ids: each is continued separately."""

import pytest

from rllm.capture import MessageDigests, conversations
from rllm.capture.conversations import canonical
from rllm.gateway.sessions import Sessions
from rllm.types import DRIFT_KEY

USER = {"role": "user", "content": "Which pets?"}
RESULT = {"role": "tool", "tool_call_id": "functions.search:0", "content": "42"}


def called(arguments):
    return {"tool_calls": [{"id": "functions.search:0", "name": "search", "arguments": arguments}]}


def written_back(message, arguments):
    (call,) = message["tool_calls"]
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}


@pytest.mark.parametrize("other", ['{"q": "dogs"}', '{"q": "do'])
@pytest.mark.parametrize("echo", ['{"q": "cats"}', '{"q":"cats"}'])
async def test_both_answers_with_the_same_call_ids_are_continued(serve, other, echo):
    served = serve([called('{"q": "cats"}'), called(other), "Done."])
    asked = {"model": "m", "messages": [USER], "n": 2}
    choices = served.post(json=asked).json()["choices"]
    for choice, arguments in zip(choices, [echo, other], strict=True):
        messages = [USER, written_back(choice["message"], arguments), RESULT]
        served.post(json={"model": "m", "messages": messages}).raise_for_status()
        traces = served.store.by_session("s")
        assert traces[-1].parent_id == traces[choice["index"]].id
        assert DRIFT_KEY not in traces[-1].metadata

    # A session that is read from the store again recognizes them, too.
    again = (await Sessions(served.store).get("s")).conversations
    first = written_back(choices[0]["message"], '{ "q": "cats" }')
    answer = MessageDigests.of([USER, first, RESULT, {"role": "assistant", "content": "Done."}, USER], None, again)
    assert again.missing_trace(answer) == traces[2].id


async def test_turn_compares_a_constant_number_of_messages(serve, monkeypatch):
    compared = []

    def counting(message):
        compared.append(message)
        return canonical(message)

    monkeypatch.setattr(conversations, "canonical", counting)
    served, messages, counts = serve([f"Answer {turn}." for turn in range(20)]), [], []
    for turn in range(20):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        compared.clear()
        messages.append(served.post(json={"model": "m", "messages": messages}).json()["choices"][0]["message"])
        counts.append(len(compared))
    assert counts[-1] == counts[2] < 10
    assert all(trace.parent_id for trace in served.store.by_session("s")[1:])
