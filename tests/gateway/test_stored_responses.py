"""`GET` and `DELETE /v1/responses/ID`, by the client that they are made for."""

import time
from contextlib import suppress

import httpx
import openai
import pytest

from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.upstream import HTTPUpstream
from rllm.store.memory import MemoryTraceStore

from .held import HeldEngine
from .servers import ANSWER, RawServer, http


@pytest.fixture
def served(serve):
    return serve(["four", "eight"])


def say(client, text, **fields):
    return client.responses.create(model="m", input=text, **fields)


def test_a_response_is_shown_as_it_was_given(served):
    client = served.client("s")
    given = say(client, "two and two?", instructions="be brief", temperature=0.5, max_output_tokens=9)
    shown = client.responses.retrieve(given.id)
    assert shown.output_text == "four"
    for name in ("id", "model", "status", "output", "instructions", "temperature", "max_output_tokens", "tools"):
        assert getattr(shown, name) == getattr(given, name), name
    assert (shown.usage.input_tokens, shown.usage.output_tokens) == (
        given.usage.input_tokens,
        given.usage.output_tokens,
    )


def test_its_calls_are_those_of_custom_tools_and_of_namespaces(serve):
    add, run = {"type": "function", "name": "add", "strict": None}, {"type": "custom", "name": "run"}
    tools = [*({"type": "namespace", "name": name, "description": "", "tools": [add]} for name in ("crm", "erp")), run]
    calls = [{"name": "erp__add", "arguments": "{}"}, {"name": "run", "arguments": '{"input": "ls"}'}]
    client = serve([{"content": "", "tool_calls": calls}]).client("s")
    given = say(client, "two and two?", tools=tools)
    shown = client.responses.retrieve(given.id)
    assert shown.output == given.output
    assert [call.type for call in shown.output[-2:]] == ["function_call", "custom_tool_call"]
    assert [(tool.type, tool.name) for tool in shown.tools] == [(tool.type, tool.name) for tool in given.tools]


async def test_its_usage_is_what_its_server_told():
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    async with RawServer(http(200, {**ANSWER, "usage": usage})) as server:
        upstream = HTTPUpstream(server.url)
        transport = httpx.ASGITransport(create_app(MemoryTraceStore(), upstream))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway/sessions/s/v1") as client:
            given = (await client.post("/responses", json={"model": "m", "input": "hi"})).json()
            shown = (await client.get(f"/responses/{given['id']}")).json()
        await upstream.close()
    assert shown["usage"] == given["usage"]
    assert shown["usage"]["input_tokens_details"]["cached_tokens"] == 1
    assert shown["usage"]["output_tokens_details"]["reasoning_tokens"] == 1


def test_usage_that_can_be_counted_again_is_not_kept(served):
    say(served.client("s"), "two and two?")
    assert served.store.by_session("s")[0].metadata == {}


def test_it_is_found_without_a_session_by_those_who_named_none(served):
    client = served.client(base_url=f"{served.server.url}/v1")
    given = say(client, "two and two?")
    assert client.responses.retrieve(given.id).output_text == "four"


def test_it_is_not_streamed_again(served):
    client = served.client("s")
    given = say(client, "two and two?")
    with pytest.raises(openai.BadRequestError, match="retrieve it without") as refused:
        client.responses.retrieve(given.id, stream=True)
    assert refused.value.param == "stream"
    assert client.responses.retrieve(given.id, stream=False).output_text == "four"


def test_unknown_answers_cannot_be_continued(served):
    with pytest.raises(openai.BadRequestError, match="Previous response"):
        say(served.client(base_url=f"{served.server.url}/v1"), "and twice that?", previous_response_id="resp_unknown")


def test_a_deleted_response_is_gone_for_clients_and_its_trace_stays(served):
    client = served.client("s")
    given = say(client, "two and two?")
    client.responses.delete(given.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(given.id)
    with pytest.raises(openai.BadRequestError, match="Previous response"):
        say(client, "and twice that?", previous_response_id=given.id)
    trace, refused = served.store.by_session("s")
    assert (trace.id, trace.response["content"], len(trace.logprobs)) == (given.id, "four", len(trace.response_ids))
    assert "Previous response" in refused.error


def test_deleting_a_response_of_a_vanishing_session(serve):
    class Vanishing(MemoryTraceStore):
        def trace(self, session_id, trace_id):
            found = super().trace(session_id, trace_id)
            self.delete(session_id)  # by another gateway, at this very moment
            return found

    served = serve(["four"], store=Vanishing())
    client = served.client("s")
    given = say(client, "two and two?")
    with pytest.raises(openai.APIStatusError, match="was deleted meanwhile") as gone:
        client.responses.delete(given.id)
    assert gone.value.status_code == 410
    assert served.store.session("s") is None


def test_nobody_is_shown_what_is_not_theirs(serve):
    served = serve(["four"], config=GatewayConfig(api_key="secret", shutdown_timeout_s=1.0))
    keys = {}
    for name in ("mine", "yours"):
        opened = served.http.post("/sessions", json={"id": name}, headers={"authorization": "Bearer secret"})
        keys[name] = {"authorization": f"Bearer {opened.json()['api_key']}"}
    given = served.post("/v1/responses", json={"model": "m", "input": "hi"}, headers=keys["mine"]).json()["id"]
    assert served.http.get(f"/v1/responses/{given}", headers=keys["mine"]).status_code == 200
    for path, status in (("/v1", 404), ("/sessions/yours/v1", 404), ("/sessions/mine/v1", 403)):
        assert served.http.get(f"{path}/responses/{given}", headers=keys["yours"]).status_code == status
        assert served.http.delete(f"{path}/responses/{given}", headers=keys["yours"]).status_code == status
    assert served.http.get(f"/v1/responses/{given}").status_code == 401


def broken_off(served, break_off):
    """How a streamed response is shown that did not come to its end."""
    client = served.client("s")
    with client.responses.create(model="m", input="hi", stream=True) as stream:
        events = iter(stream)
        given = next(events).response
        while next(events).type != "response.output_text.delta":
            pass
        break_off(events)
    deadline = time.monotonic() + 60
    while not served.store.by_session("s"):
        assert time.monotonic() < deadline, "nothing was stored"
        time.sleep(0.01)
    return client.responses.retrieve(given.id)


def test_a_response_whose_client_left_is_not_shown_as_a_whole_one(serve):
    shown = broken_off(serve(HeldEngine(["abcdefgh"], num_pieces=1)), lambda events: None)
    assert (shown.status, shown.output_text, shown.output[0].status) == ("cancelled", "abcd", "incomplete")
    assert (shown.error, shown.incomplete_details) == (None, None)


def test_a_response_that_its_upstream_broke_off_is_shown_as_failed(serve):
    served = serve(["abcdefghijklmnop"], upstream="http")
    served.upstream.fault = "cut"
    shown = broken_off(served, lambda events: list(suppressed(events)))
    assert (shown.status, shown.output[0].status) == ("failed", "incomplete")
    assert "abcdefghijklmnop".startswith(shown.output_text)
    assert "broke of" in shown.error.message


def test_an_untrainable_response_is_still_whole(serve):
    served = serve(["four"], upstream="http")
    served.upstream.fault = "no_tokens"
    client = served.client("s")
    given = say(client, "two and two?")
    shown = client.responses.retrieve(given.id)
    assert (shown.status, shown.output_text) == (given.status, given.output_text) == ("completed", "four")


def suppressed(events):
    """Events up to the one that the client raises as an error."""
    with suppress(openai.APIError):
        yield from events


def test_no_client_can_say_of_its_call_what_only_the_gateway_may(serve):
    served = serve()
    refused = served.post(headers={"x-rllm-metadata": '{"rllm.deleted": true}'})
    assert refused.status_code == 400
    assert "'rllm.deleted' begins with 'rllm.'" in refused.json()["error"]["message"]
    refused = served.http.post("/sessions", json={"id": "s", "metadata": {"rllm.sampling": {"temperature": -1}}})
    assert refused.status_code == 400
    assert "'rllm.sampling'" in refused.json()["error"]["message"]
    assert served.engine.num_calls == 0


def test_session_ids_admit_to_responses_and_models_only(serve):
    served = serve(["four"], config=GatewayConfig(api_key="secret", session_ids_admit=True, shutdown_timeout_s=1.0))
    name = "5" * 32
    served.server.open_session(name)
    given = served.post(f"/sessions/{name}/v1/responses", json={"model": "m", "input": "hi"}).json()["id"]
    assert served.http.get(f"/sessions/{name}/v1/responses/{given}").json()["status"] == "completed"
    assert served.http.get(f"/sessions/{name}/v1/models").status_code == 200
    assert served.http.delete(f"/sessions/{name}/v1/responses/{given}").status_code == 200
    for method, path in (("GET", f"/sessions/{name}/traces"), ("DELETE", f"/sessions/{name}"), ("GET", "/v1/models")):
        assert served.http.request(method, path).status_code == 401
    assert served.http.get(f"/sessions/never-begun/v1/responses/{given}").status_code == 401
    operator = {"authorization": "Bearer secret"}
    assert served.http.delete(f"/sessions/{name}", headers=operator).status_code == 200
