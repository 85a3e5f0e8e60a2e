"""The real `anthropic` package against the gateway, judged by the client's results."""

import anthropic
import pytest
from pydantic import BaseModel

from rllm.errors import InferenceError
from rllm.gateway.config import GatewayConfig
from rllm.testing.scripted import TURN_END, encode

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}]
CALLS = {
    "reasoning": "hm",
    "content": "adding",
    "tool_calls": [{"name": "add", "arguments": '{"a":  7.0}'}, {"name": "add", "arguments": {}}],
}


def blocks_of(message):
    return sorted(
        (block.model_dump(include={"type", "text", "thinking", "input", "name", "id"}) for block in message.content),
        key=lambda block: block["type"],
    )


def test_message_has_an_exact_trace(serve, upstream, anthropic_client):
    served = serve(["héllo"], upstream=upstream)
    message = anthropic_client(served).messages.create(
        model="m", max_tokens=100, messages=HI, system="be", extra_body={"temperature": 0.5}
    )
    assert (message.content[0].text, message.stop_reason) == ("héllo", "end_turn")
    assert message.usage.output_tokens == len(encode("héllo")) + 1
    [trace] = served.store.by_session("s")
    assert trace.id == message.id
    assert trace.response_ids == [*encode("héllo"), TURN_END]
    assert trace.messages == [{"role": "system", "content": "be"}, *HI]
    assert trace.sampling["temperature"] == 0.5
    assert trace.error is None


def test_stream_gives_the_whole_message_and_trace(serve, upstream, anthropic_client):
    served = serve([CALLS], upstream=upstream)
    client = anthropic_client(served)
    asked = {"model": "m", "max_tokens": 1000, "messages": HI, "tools": TOOLS}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]
    assert (streamed.stop_reason, streamed.usage) == ("tool_use", whole.usage)
    without_ids = [[{**block, "id": None} for block in blocks_of(message)] for message in (whole, streamed)]
    assert without_ids[0] == without_ids[1]
    first, second = served.store.by_session("s")
    assert (first.response_ids, first.logprobs) == (second.response_ids, second.logprobs)
    assert (first.id, second.id) == (whole.id, streamed.id)


def test_text_is_streamed_as_it_is_generated(serve, anthropic_client):
    served = serve(["abcdefgh" * 4], latency_s=0.1)
    with anthropic_client(served).messages.stream(model="m", max_tokens=100, messages=HI) as stream:
        pieces = list(stream.text_stream)
    assert "".join(pieces) == "abcdefgh" * 4
    assert len(pieces) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_conversation_with_tools_continues_its_tokens(serve, upstream, anthropic_client, stream):
    served = serve([CALLS, "It is 3."], upstream=upstream)
    client = anthropic_client(served)
    messages = list(HI)
    for _ in range(2):
        asked = {"model": "m", "max_tokens": 1000, "messages": messages, "tools": TOOLS}
        if stream:
            with client.messages.stream(**asked) as sent:
                answer = sent.get_final_message()
        else:
            answer = client.messages.create(**asked)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    first, second = served.store.by_session("s")
    assert second.parent_id == first.id
    assert second.messages[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in second.messages[1]["tool_calls"]] == [
        call["id"] for call in first.response["tool_calls"]
    ]


def test_token_count_equals_that_of_the_call(serve, upstream, anthropic_client):
    served = serve(["hello"], upstream=upstream)
    client = anthropic_client(served)
    counted = client.messages.count_tokens(model="m", messages=HI, system="be", tools=TOOLS)
    assert served.store.by_session("s") == []
    message = client.messages.create(model="m", max_tokens=10, messages=HI, system="be", tools=TOOLS)
    assert counted.input_tokens == message.usage.input_tokens


def test_models_are_listed_and_found(serve, upstream, anthropic_client):
    served = serve(upstream=upstream)
    client = anthropic_client(served)
    assert [model.id for model in client.models.list()] == ["scripted"]
    for models in (client.models, client.beta.models):
        found = models.retrieve("scripted")
        assert (found.display_name, found.to_dict().get("lifecycle")) == ("scripted", "active")
        type(found).model_validate_json(found.to_json())
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_structured_answer_is_parsed(serve, anthropic_client):
    served = serve(['{"a": 1}'], upstream="http")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    client = anthropic_client(served)
    assert (
        client.messages.create(model="m", max_tokens=99, messages=HI, output_config=form).content[0].text == '{"a": 1}'
    )
    assert served.upstream.requests[0]["response_format"]["json_schema"]["schema"] == schema


def test_structured_answer_that_ended_in_its_thinking_is_none(serve, upstream, anthropic_client):
    class Sum(BaseModel):
        a: int

    served = serve([{"reasoning": "hm"}], upstream=upstream)
    client = anthropic_client(served)
    asked = {"model": "m", "max_tokens": 99, "messages": HI, "output_format": Sum}
    whole = client.messages.parse(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking"]
        assert message.parsed_output is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "expected", "type"),
    [
        (InferenceError("slow down", status_code=429), anthropic.RateLimitError, "rate_limit_error"),
        (InferenceError("paused", status_code=503), anthropic.InternalServerError, "overloaded_error"),
        (InferenceError("broken", status_code=500), anthropic.InternalServerError, "api_error"),
    ],
)
def test_upstream_failures_have_anthropic_error_names(serve, upstream, anthropic_client, fault, expected, type, stream):
    served = serve([fault], upstream=upstream)
    with pytest.raises(expected) as failed:
        anthropic_client(served).messages.create(model="m", max_tokens=9, messages=HI, stream=stream)
    assert failed.value.status_code == fault.status_code
    assert failed.value.body["error"]["type"] == type
    assert served.store.by_session("s")[0].error is not None


def test_rejected_requests_have_anthropic_error_format(serve, anthropic_client):
    served = serve(config=GatewayConfig(api_key="secret", max_body_bytes=500, shutdown_timeout_s=1))
    create = anthropic_client(served, api_key="secret").messages.create
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client(served, api_key="wrong").messages.create(model="m", max_tokens=9, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="'messages' is empty"):
        create(model="m", max_tokens=9, messages=[])
    with pytest.raises(anthropic.APIStatusError) as too_large:
        create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x" * 600}])
    assert too_large.value.body["error"]["type"] == "request_too_large"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        anthropic_client(served, api_key="secret").post("/v1/nowhere", cast_to=object)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert create(model="m", max_tokens=9, messages=HI).content[0].text == "hello"


def test_overlong_prompt_is_a_400_that_clients_recognize(serve, upstream, anthropic_client):
    served = serve(context_length=10, upstream=upstream)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as refused:
        anthropic_client(served).messages.create(model="m", max_tokens=9, messages=HI)
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_interrupted_stream_ends_with_an_error_event(serve, anthropic_client):
    served = serve(["hello"], upstream="http")
    served.upstream.fault = "cut"
    with pytest.raises(anthropic.APIStatusError, match="upstream"):
        list(anthropic_client(served).messages.create(model="m", max_tokens=9, messages=HI, stream=True))
    assert served.store.by_session("s")[0].response_ids == [*b"he"]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_recovers_from_the_rejection_of_its_thread(serve, anthropic_client, stream):
    served = serve([CALLS, "It is 3."])
    client = anthropic_client(served)

    @anthropic.beta_tool
    def add(a: float = 0) -> str:
        """Add."""
        return f"{a + 1}"

    runner = client.beta.messages.tool_runner(model="m", max_tokens=1000, messages=HI, tools=[add], stream=stream)
    final = runner.until_done()
    assert final.content[0].text == "It is 3."
    *refused, first, second = served.store.by_session("s")
    assert all("thread" in trace.error for trace in refused), "older clients never ask for a thread"
    assert [message["role"] for message in second.messages] == ["user", "assistant", "tool", "tool"]
    assert second.parent_id == first.id


def test_rejected_summary_is_not_a_turn_of_the_session(serve, anthropic_client):
    served = serve(["hello"])
    client = anthropic_client(served)
    asked = {"model": "m", "messages": HI, "extra_body": {"compaction": {"type": "summarize"}}}
    with pytest.raises(anthropic.BadRequestError, match="does not summarize") as refused:
        client.beta.messages.create(max_tokens=9, **asked)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="does not summarize"):
        client.beta.messages.count_tokens(**asked)
    [trace] = served.store.by_session("s")
    assert (trace.response_ids, "compaction" in trace.error) == ([], True)
