"""The real `google-genai` package against the gateway: whole and streamed answers, tools, counts, errors, sessions."""

import asyncio
import os
import subprocess
import sys

import pytest
from pydantic import BaseModel

from rllm.gateway.config import GatewayConfig
from rllm.sdk.variables import gateway_variables
from rllm.testing.scripted import TURN_END, encode

genai = pytest.importorskip("google.genai")
types = genai.types

CALLS = {
    "reasoning": "hm",
    "content": "adding",
    "tool_calls": [{"name": "add", "arguments": '{"a":  7.0}'}, {"name": "add", "arguments": {}}],
}
TOOLS = [
    types.Tool(
        function_declarations=[
            types.FunctionDeclaration(
                name="add",
                description="Add.",
                parameters=types.Schema(type="OBJECT", properties={"a": types.Schema(type="NUMBER", nullable=True)}),
            )
        ]
    )
]
MANUAL = types.AutomaticFunctionCallingConfig(disable=True)


@pytest.fixture
def google_client(serve):
    """Google's client of a session; the gateway's URL and key may be passed instead."""
    clients = []  # kept, since a client closes its connections when it is collected

    def client(served, base_url=None, api_key="unused", headers=None):
        url = base_url or served.server.session_url("s").removesuffix("/v1")
        options = types.HttpOptions(base_url=url, headers=headers)
        clients.append(genai.Client(api_key=api_key, vertexai=False, http_options=options))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def config(**options):
    return types.GenerateContentConfig(automatic_function_calling=MANUAL, **options)


def test_answer_has_an_exact_trace(serve, upstream, google_client):
    served = serve(["héllo"], upstream=upstream)
    answer = google_client(served).models.generate_content(
        model="m",
        contents="hi",
        config=config(system_instruction="be", temperature=0.5, max_output_tokens=100),
    )
    assert (answer.text, answer.candidates[0].finish_reason) == ("héllo", types.FinishReason.STOP)
    [trace] = served.store.by_session("s")
    assert trace.id == answer.response_id
    assert trace.response_ids == [*encode("héllo"), TURN_END]
    assert trace.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert (trace.sampling["temperature"], trace.error) == (0.5, None)
    usage = answer.usage_metadata
    assert usage.prompt_token_count == len(trace.prompt_ids)
    assert usage.candidates_token_count == len(trace.response_ids)


def test_stream_is_the_whole_answer_in_pieces(serve, upstream, google_client):
    served = serve([CALLS], upstream=upstream)
    client = google_client(served)
    asked = {"model": "m", "contents": "hi", "config": config(tools=TOOLS)}
    whole = client.models.generate_content(**asked)
    pieces = list(client.models.generate_content_stream(**asked))
    parts = [part for piece in pieces for part in piece.candidates[0].content.parts]
    assert "".join(part.text or "" for part in parts if not part.thought) == "adding"
    assert "".join(part.text for part in parts if part.thought) == "hm"
    assert [part.function_call.args for part in parts if part.function_call] == [{"a": 7.0}, {}]
    assert [call.args for call in whole.function_calls] == [{"a": 7.0}, {}]
    assert pieces[-1].usage_metadata == whole.usage_metadata
    assert pieces[-1].candidates[0].finish_reason == types.FinishReason.STOP
    first, second = served.store.by_session("s")
    assert (first.response_ids, first.logprobs) == (second.response_ids, second.logprobs)
    assert (first.id, second.id) == (whole.response_id, pieces[-1].response_id)


def test_text_is_streamed_as_it_is_generated(serve, google_client):
    served = serve(["abcdefgh" * 4], latency_s=0.1)
    pieces = [piece.text for piece in google_client(served).models.generate_content_stream(model="m", contents="hi")]
    assert "".join(filter(None, pieces)) == "abcdefgh" * 4
    assert len(pieces) > 2


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_conversation_with_tools_continues_its_tokens(serve, upstream, google_client, keeps_ids):
    served = serve([CALLS, "It is 7."], upstream=upstream)
    client = google_client(served)
    contents = [types.UserContent("hi")]
    for _ in range(2):
        answer = client.models.generate_content(model="m", contents=contents, config=config(tools=TOOLS))
        contents.append(answer.candidates[0].content)
        calls = answer.function_calls or []
        results = [
            types.FunctionResponse(id=call.id if keeps_ids else None, name=call.name, response={"result": "7"})
            for call in calls
        ]
        if results:
            contents.append(types.UserContent([types.Part(function_response=result) for result in results]))
    first, second = served.store.by_session("s")
    assert second.parent_id == first.id
    called = [call["id"] for call in first.response["tool_calls"]]
    assert [call["id"] for call in second.messages[1]["tool_calls"]] == called
    assert [message["tool_call_id"] for message in second.messages[2:]] == called
    assert [message["content"] for message in second.messages[2:]] == ["7", "7"]
    declared = first.tools[0]["function"]["parameters"]
    assert declared == {"type": "object", "properties": {"a": {"type": ["number", "null"]}}}


def test_functions_are_called_by_the_client(serve, google_client):
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    served = serve([{"tool_calls": [{"name": "add", "arguments": {"a": 3, "b": 4}}]}, "It is 7."])
    chat = google_client(served).chats.create(model="m", config=types.GenerateContentConfig(tools=[add]))
    assert chat.send_message("3 + 4?").text == "It is 7."
    first, second = served.store.by_session("s")
    assert second.parent_id == first.id
    assert second.messages[-1]["content"] == "7"


def test_each_candidate_has_its_own_trace(serve, upstream, google_client):
    served = serve(["a", "b"], upstream=upstream)
    answer = google_client(served).models.generate_content(
        model="m", contents="hi", config=config(candidate_count=2, seed=1, top_k=5, stop_sequences=["x"])
    )
    assert [candidate.index for candidate in answer.candidates] == [0, 1]
    assert len(served.store.by_session("s")) == 2


def test_truncated_answers_have_their_finish_reason(serve, upstream, google_client):
    served = serve(["hello"], upstream=upstream)
    answer = google_client(served).models.generate_content(model="m", contents="hi", config=config(max_output_tokens=2))
    assert answer.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS


def test_token_count_equals_that_of_the_call(serve, upstream, google_client):
    served = serve(["hello"], upstream=upstream)
    client = google_client(served)
    counted = client.models.count_tokens(model="m", contents="hi")
    assert served.store.by_session("s") == []
    answer = client.models.generate_content(model="m", contents="hi")
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count


def test_models_are_listed_and_found(serve, upstream, google_client):
    client = google_client(serve(upstream=upstream))
    assert [model.name for model in client.models.list()] == ["models/scripted"]
    assert client.models.get(model="scripted").supported_actions == ["generateContent", "countTokens"]
    with pytest.raises(genai.errors.ClientError) as refused:
        client.models.get(model="other")
    assert (refused.value.code, refused.value.status) == (404, "NOT_FOUND")


def test_errors_have_their_status(serve, google_client):
    from rllm.errors import InferenceError

    served = serve([InferenceError("overloaded", status_code=503)])
    client = google_client(served)
    for call in (client.models.generate_content, lambda **asked: list(client.models.generate_content_stream(**asked))):
        with pytest.raises(genai.errors.ServerError) as failed:
            call(model="m", contents="hi")
        assert (failed.value.code, failed.value.status) == (503, "UNAVAILABLE")
    with pytest.raises(genai.errors.ClientError) as refused:
        client.models.generate_content(model="m", contents="hi", config=config(cached_content="cachedContents/c"))
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
    assert "cachedContent" in refused.value.message
    turn = types.Content(role="assistant", parts=[types.Part(text="hi")])
    with pytest.raises(genai.errors.ClientError) as refused:
        client.models.generate_content(model="m", contents=[turn])
    assert (refused.value.code, "contents[0].role='assistant'" in refused.value.message) == (400, True)


def test_schemas_are_sent_to_the_server_as_json_schema(serve, google_client):
    class Sum(BaseModel):
        a: int
        note: str | None = None

    served = serve(['{"a": 1}'], upstream="http")
    answer = google_client(served).models.generate_content(
        model="m", contents="hi", config=config(response_mime_type="application/json", response_schema=Sum)
    )
    assert answer.parsed == Sum(a=1)
    schema = served.upstream.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["a"]["type"] == "integer"
    assert schema["properties"]["note"]["type"] == ["string", "null"]


@pytest.mark.parametrize("by", ["key", "header", "parameter"])
def test_key_and_header_name_the_session(serve, google_client, by):
    served = serve(["hello"], config=GatewayConfig(api_key="secret", shutdown_timeout_s=1.0))
    root = served.server.url
    if by == "key":
        google_client(served, root, "secret:rllm-s").models.generate_content(model="m", contents="hi")
    elif by == "header":
        client = google_client(served, root, "secret", {"x-rllm-session": "s"})
        client.models.generate_content(model="m", contents="hi")
    else:
        body = {"contents": [{"parts": [{"text": "hi"}]}]}
        answer = served.http.post("/v1beta/models/m:generateContent?key=secret:rllm-s", json=body)
        assert answer.json()["candidates"][0]["content"]["parts"] == [{"text": "hello"}]
        assert served.http.get("/v1beta/models?key=secret").json()["models"]
    assert len(served.store.by_session("s")) == 1
    refused = served.http.post("/v1beta/models/m:generateContent?key=other", json={})
    assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


@pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")  # from the client's use of aiohttp
async def test_asynchronous_clients_call_and_stream(serve, google_client):
    served = serve(["hello"])
    client = google_client(served)
    models = client.aio.models

    async def streamed():
        pieces = await models.generate_content_stream(model="m", contents="hi")
        return "".join([piece.text or "" async for piece in pieces])

    whole, text = await asyncio.gather(models.generate_content(model="m", contents="hi"), streamed())
    await client.aio.aclose()
    assert (whole.text, text) == ("hello", "hello")
    assert len(served.store.by_session("s")) == 2


@pytest.mark.slow
def test_environment_variables_direct_a_program_to_its_session(serve):
    served = serve(["hello"])
    variables = gateway_variables(served.server.session_url("s"))
    program = (
        "from google import genai; c = genai.Client(); print(c.models.generate_content(model='m', contents='hi').text)"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOOGLE_", "GEMINI_"))}
    run = subprocess.run(
        [sys.executable, "-c", program], env={**inherited, **variables}, capture_output=True, text=True
    )
    assert run.stdout == "hello\n", run.stderr
    assert len(served.store.by_session("s")) == 1
