"""The real `openai` package against responses and completions; `tests/gateway/test_clients.py` has chat completions."""

import openai
import pytest
from pydantic import BaseModel

from rllm.errors import InferenceError
from rllm.testing.scripted import TURN_END, encode

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
CALLS = {
    "reasoning": "hm",
    "content": "adding",
    "tool_calls": [{"name": "add", "arguments": '{"a":  7.0}'}, {"name": "add", "arguments": {}}],
}


class Sum(BaseModel):
    a: int


def items_of(response):
    """Return items without ids and in a fixed order: engines that return their reasoning last stream it last."""
    fields = {"type", "content", "arguments", "name", "summary"}
    return sorted(
        (item.model_dump(include=fields, exclude={"content": {"__all__": {"parsed"}}}) for item in response.output),
        key=str,
    )


def present(message):
    return {name: value for name, value in message.items() if value is not None}


def outputs_of(response):
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]


def test_response_has_an_exact_trace(serve, upstream):
    served = serve(["héllo"], upstream=upstream)
    response = served.client().responses.create(model="m", input="hi", instructions="be", temperature=0.5)
    assert (response.output_text, response.status) == ("héllo", "completed")
    assert response.usage.output_tokens == len(encode("héllo")) + 1
    [trace] = served.store.by_session("s")
    assert trace.id == response.id
    assert trace.response_ids == [*encode("héllo"), TURN_END]
    assert trace.messages == [{"role": "system", "content": "be"}, *HI]
    assert (trace.sampling["temperature"], trace.error) == (0.5, None)


def test_stream_gives_the_whole_response_and_trace(serve, upstream):
    served = serve([CALLS], upstream=upstream)
    client = served.client()
    whole = client.responses.create(model="m", input="hi", tools=TOOLS)
    with client.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert items_of(streamed) == items_of(whole)
    assert streamed.usage == whole.usage
    first, second = served.store.by_session("s")
    assert (first.response_ids, first.logprobs) == (second.response_ids, second.logprobs)
    assert (first.id, second.id) == (whole.id, streamed.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", ["its items", "nothing"])
def test_conversation_with_tools_continues_its_tokens(serve, upstream, keeps, stream):
    served = serve([CALLS, "It is 3."], upstream=upstream)
    client = served.client()
    asked = {"model": "m", "tools": TOOLS, "instructions": "be", "input": HI}
    for _ in range(2):
        if stream:
            with client.responses.stream(**asked) as sent:
                response = sent.get_final_response()
        else:
            response = client.responses.create(**asked)
        if keeps == "nothing":
            asked |= {"input": outputs_of(response), "previous_response_id": response.id}
        else:
            asked["input"] = [*asked["input"], *response.output, *outputs_of(response)]
    first, second = served.store.by_session("s")
    assert second.parent_id == first.id
    assert present(second.messages[2]) == present(first.response)
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "tool", "tool"]


def test_unnamed_conversation_continues_in_its_session(serve):
    served = serve(["one", "two", "three"])
    create = served.client(base_url=f"{served.server.url}/v1").responses.create
    first = create(model="m", input="a")
    second = create(model="m", input="b", previous_response_id=first.id)
    third = create(model="m", input="c", previous_response_id=second.id)
    [session] = served.store.sessions()
    traces = served.store.by_session(session.id)
    assert [trace.id for trace in traces] == [first.id, second.id, third.id]
    assert [trace.parent_id for trace in traces] == [None, first.id, second.id]


def test_answer_of_another_session_cannot_be_continued(serve):
    served = serve()
    first = served.client("a").responses.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError) as refused:
        served.client("b").responses.create(model="m", input="hi", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"


def test_response_can_be_continued_twice(serve):
    served = serve(["root", "left", "right"])
    create = served.client().responses.create
    root = create(model="m", input="hi")
    for side in ("left", "right"):
        assert create(model="m", input=side, previous_response_id=root.id).output_text == side
    assert [trace.parent_id for trace in served.store.by_session("s")] == [None, root.id, root.id]


def test_structured_answer_is_parsed(serve):
    served = serve(['{"a": 1}'], upstream="http")
    assert served.client().responses.parse(model="m", input="hi", text_format=Sum).output_parsed == Sum(a=1)
    with served.client().responses.stream(model="m", input="hi", text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed == Sum(a=1)
    sent = served.upstream.requests[0]["response_format"]
    assert (sent["type"], sent["json_schema"]["name"]) == ("json_schema", "Sum")


def test_token_count_equals_that_of_the_call(serve, upstream):
    served = serve(["hello"], upstream=upstream)
    client = served.client()
    counted = client.responses.input_tokens.count(model="m", input="hi", instructions="be", tools=TOOLS)
    assert served.store.by_session("s") == []
    response = client.responses.create(model="m", input="hi", instructions="be", tools=TOOLS)
    assert counted.input_tokens == response.usage.input_tokens


def test_answer_that_ran_out_of_tokens_is_incomplete(serve, upstream):
    served = serve(["hello"], upstream=upstream)
    create = served.client().responses.create
    response = create(model="m", input="hi", max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(create(model="m", input="hi", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "he"


@pytest.mark.parametrize("stream", [False, True])
def test_upstream_failures_keep_their_status(serve, upstream, stream):
    served = serve([InferenceError("slow down", status_code=429)], upstream=upstream)
    client = served.client()
    for create in (client.responses.create, client.completions.create):
        given = {"input": "hi"} if create == client.responses.create else {"prompt": "hi"}
        with pytest.raises(openai.RateLimitError, match="slow down"):
            create(model="m", stream=stream, **given)
    assert [trace.error for trace in served.store.by_session("s")] == ["slow down"] * 2


def test_overlong_prompt_has_the_error_code_that_clients_expect(serve, upstream):
    served = serve(context_length=10, upstream=upstream)
    client = served.client()
    for call in (
        lambda: client.responses.create(model="m", input="hi"),
        lambda: client.completions.create(model="m", prompt="hi"),
        lambda: client.chat.completions.create(model="m", messages=HI),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            call()
        assert refused.value.code == "context_length_exceeded"


def test_interrupted_stream_ends_with_an_error_event(serve):
    served = serve(["hello"], upstream="http")
    served.upstream.fault = "cut"
    events = list(served.client().responses.create(model="m", input="hi", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert "upstream" in events[-1].response.error.message
    assert served.store.by_session("s")[0].response_ids == [*b"he"]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_has_exact_traces(serve, upstream, stream):
    served = serve(["one", "two"], upstream=upstream)
    created = served.client().completions.create(model="m", prompt="hi", n=2, stream=stream)
    texts = ["", ""]
    for part in created if stream else [created]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert sorted(texts) == ["one", "two"]
    traces = served.store.by_session("s")
    assert [trace.response["content"] for trace in traces] == texts
    assert all(trace.error is None for trace in traces)


def test_models_are_found(serve, upstream):
    client = serve(upstream=upstream).client()
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("other/one")
    assert unknown.value.code == "model_not_found"
