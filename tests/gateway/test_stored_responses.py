"""`GET` and `DELETE /v1/responses/ID`, by the client that they are made for."""

import openai
import pytest

from rllm.gateway.config import GatewayConfig


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


def test_it_is_found_without_a_session_by_those_who_named_none(served):
    client = served.client(base_url=f"{served.server.url}/v1")
    given = say(client, "two and two?")
    assert client.responses.retrieve(given.id).output_text == "four"


def test_a_deleted_response_is_gone_for_clients_and_its_trace_stays(served):
    client = served.client("s")
    given = say(client, "two and two?")
    client.responses.delete(given.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(given.id)
    with pytest.raises(openai.BadRequestError, match="Previous response"):
        say(client, "and twice that?", previous_response_id=given.id)
    [trace] = served.store.by_session("s")
    assert (trace.id, trace.response["content"], len(trace.logprobs)) == (given.id, "four", len(trace.response_ids))


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
