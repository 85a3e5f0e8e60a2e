"""Invalid requests and failing upstreams: always an OpenAI error object, never a lost or a false trace."""

import json

import openai
import pytest

from rllm.errors import InferenceError
from rllm.gateway.config import GatewayConfig

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/sessions/s/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "JSON array"),
        ("null", "JSON null"),
        ("{}", "'messages' is missing"),
        ('{"messages": []}', "'messages' is empty"),
        ('{"messages": "hi"}', "JSON string"),
        ('{"messages": ["hi"]}', "messages[0]='hi'"),
        ('{"messages": [{"content": "hi"}]}', "'role'"),
        ('{"messages": [{"role": "user", "content": 5}]}', "'messages[0].content' is a JSON number"),
        ('{"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}', "'messages[0].tool_calls' is a JSON object"),
        ('{"messages": [{"role": "assistant", "tool_calls": [1]}]}', "messages[0].tool_calls[0]=1"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}',
            "'messages[0].tool_calls[0].function' is a JSON string",
        ),
        ('{"messages": [{"role": "user"}], "max_completion_tokens": "x"}', "max_completion_tokens='x'"),
        ('{"messages": [{"role": "user"}], "n": 0}', "n=0"),
        ('{"messages": [{"role": "user"}], "n": true}', "n=True"),
        ('{"messages": [{"role": "user"}], "stream": "yes"}', "stream='yes'"),
        ('{"messages": [{"role": "user"}], "temperature": "hot"}', "temperature='hot'"),
        ('{"messages": [{"role": "user"}], "temperature": -1}', "temperature=-1"),
    ],
)
def test_malformed_request_error_names_the_field(refusing, body, named):
    refused = refusing.http.post(CHAT, content=body)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "invalid_request_error"
    *_, trace = refusing.store.by_session("s")
    assert (trace.error, trace.finish_reason) == (refused.json()["error"]["message"], "error")
    assert refused.headers["x-rllm-session"] == "s"


ROUTES = {"chat/completions": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}


def nested(num_levels):
    return "[" * num_levels + "]" * num_levels


@pytest.mark.parametrize("route", ROUTES)
def test_overly_nested_json_is_rejected(serve, route):
    served = serve(upstream="http")
    for num_levels, status in ((199, 200), (200, 400), (1000, 400)):
        text = "hi" if ROUTES[route] != "messages" else MESSAGES
        body = json.dumps({"model": "m", "max_tokens": 5, ROUTES[route]: text})[:-1]
        answer = served.http.post(
            f"/sessions/s/v1/{route}", content=f'{body}, "tools": [], "x": {nested(num_levels)}}}'
        )
        assert answer.status_code == status
        assert status == 200 or "levels" in answer.json()["error"]["message"]
    assert [trace.error is None for trace in served.store.by_session("s")] == [True, False, False]


def test_unparsable_arguments_stay_text(serve, upstream):
    """As an untrained policy that repeats itself writes them."""
    served = serve(upstream=upstream)
    for arguments in (nested(2000), "[" * 2000, '{"a":' * 2000 + "1" + "}" * 2000):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, *MESSAGES]
        assert served.post(json={"model": "m", "messages": messages}).status_code == 200


def test_unknown_members_and_nulls_are_accepted(serve, upstream):
    served = serve(upstream=upstream)
    body = {"model": "m", "messages": MESSAGES, "seed": None, "self": 1, "tools": None, "x": {"y": []}, "n": None}
    assert served.post(json=body).status_code == 200


def test_body_over_the_limit_is_rejected(serve):
    served = serve(config=GatewayConfig(max_body_bytes=1000, shutdown_timeout_s=1))
    assert served.post(json={"messages": [{"role": "user", "content": "x" * 2000}]}).status_code == 413


def test_unknown_paths_and_methods_get_openai_errors(refusing):
    assert refusing.http.get("/nowhere").json()["error"]["code"] == "not_found"
    wrong = refusing.http.get(CHAT)
    assert wrong.status_code == 405
    assert "GET" in wrong.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/healthz", {"GET", "HEAD"}),
        ("/sessions", {"GET", "HEAD", "POST"}),
        ("/sessions/s", {"DELETE", "GET", "HEAD"}),
    ],
)
def test_wrong_method_error_lists_the_allowed_ones(refusing, path, methods):
    wrong = refusing.http.put(path)
    assert wrong.status_code == 405
    assert set(wrong.headers["allow"].split(", ")) == methods


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [("html", 502, "Bad Gateway"), ("error", 500, "engine core"), ("malformed", 502, "begins with")],
)
def test_upstream_failure_is_reported_and_recorded(serve, fault, status, message, stream):
    served = serve(upstream="http")
    served.upstream.fault = fault
    with pytest.raises(openai.InternalServerError, match=message) as failed:
        served.client().chat.completions.create(model="m", messages=MESSAGES, stream=stream)
    assert failed.value.status_code == status
    [trace] = served.store.by_session("s")
    assert message in trace.error
    assert (trace.response_ids, trace.finish_reason) == ([], "error")
    served.upstream.fault = None
    assert served.post().status_code == 200


def test_interrupted_stream_ends_with_an_error_event_and_keeps_what_arrived(serve):
    served = serve(["hello"], upstream="http")
    served.upstream.fault = "cut"
    stream = served.client().chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="upstream"):
        list(stream)
    [trace] = served.store.by_session("s")
    assert trace.response_ids == [*b"he"]
    assert trace.finish_reason == "error"
    assert "upstream" in trace.error


def test_unreachable_upstream_is_reported_and_recorded(serve):
    served = serve(upstream="http")
    served.upstream.stop()
    with pytest.raises(openai.InternalServerError, match="inference server is running") as failed:
        served.client().chat.completions.create(model="m", messages=MESSAGES)
    assert failed.value.status_code == 502
    assert "cannot be reached" in served.store.by_session("s")[0].error


@pytest.mark.parametrize("stream", [False, True])
def test_status_of_an_engine_error_is_kept(serve, upstream, stream):
    served = serve([InferenceError("paused", status_code=503)], upstream=upstream)
    refused = served.post(json={"messages": MESSAGES, "stream": stream})
    assert refused.status_code == 503
    assert "paused" in refused.json()["error"]["message"]
    assert served.store.by_session("s")[0].error == "paused"


def test_overlong_prompt_has_the_error_code_that_clients_expect(serve):
    served = serve(context_length=10)
    refused = served.post()
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_contradicting_tokens_are_never_passed_on(serve, stream):
    served = serve(["hello"], upstream="http")
    served.upstream.fault = "mismatch"
    body = {"messages": MESSAGES, "stream": stream}
    answered = served.post(json=body)
    assert "every sampled id needs one log-probability" in answered.text
    assert stream or answered.status_code == 502
    [trace] = served.store.by_session("s")
    assert trace.error is not None
    assert trace.response_ids == []


def test_answer_without_tokens_is_passed_on_and_its_trace_has_the_reason(serve):
    served = serve(["hello"], upstream="http")
    served.upstream.fault = "no_tokens"
    assert served.post().json()["choices"][0]["message"]["content"] == "hello"
    [trace] = served.store.by_session("s")
    assert "return_token_ids" in trace.error


def test_answer_without_tokens_is_rejected_if_tokens_are_required(serve):
    served = serve(["hello"], upstream="http", config=GatewayConfig(require_tokens=True, shutdown_timeout_s=1))
    served.upstream.fault = "no_tokens"
    refused = served.post()
    assert refused.status_code == 502
    assert refused.json()["error"]["code"] == "tokens_unusable"


def test_calls_fail_if_the_store_cannot_write(serve):
    served = serve()
    served.store.close()
    refused = served.post()
    assert refused.status_code == 500
    assert "not stored" in refused.json()["error"]["message"]
