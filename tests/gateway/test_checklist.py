"""Requirements of agent frameworks on HTTP requests and answers, one by one, in every dialect."""

import json
import socket
import threading
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from rllm.capture import SSEDecoder
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import TURN_END, encode
from rllm.testing.scripted_server import ScriptedServer

from ..ports import free_port
from ..waiting import wait_for
from .held_engine import HeldEngine

REQUESTS = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
}
TOOL = {
    "chat/completions": {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    "responses": {"type": "function", "name": "f", "parameters": {"type": "object"}},
    "messages": {"name": "f", "input_schema": {"type": "object"}},
}
CALL = {"content": "so", "tool_calls": [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"a": 1}}]}

every_dialect = pytest.mark.parametrize("route", list(REQUESTS))
every_dialect_with_tools = pytest.mark.parametrize("route", list(TOOL))


def events_of(text):
    return [orjson.loads(payload) for payload in SSEDecoder().feed(text.encode()) if payload != b"[DONE]"]


def text_of(answer):
    """Return the text of an answer, in any dialect."""
    if "choices" in answer:
        return "".join(
            choice.get("text") or choice.get("message", {}).get("content") or "" for choice in answer["choices"]
        )
    if answer.get("object") == "response":
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    return "".join(block["text"] for block in answer["content"])


# Routes


@every_dialect
@pytest.mark.parametrize("prefix", ["", "/v1", "/sessions/k%3A1/v1", "/sessions/k%3A1", "/sessions/k%3A1/v1/v1"])
def test_every_route_is_served_with_and_without_v1_and_with_a_session(serve, route, prefix):
    served = serve(["hello"])
    answer = served.post(f"{prefix}/{route}?beta=true", json={"model": "m", **REQUESTS[route]})
    assert text_of(answer.json()) == "hello"
    assert len(served.store.by_session(answer.headers["x-rllm-session"])) == 1
    assert (answer.headers["x-rllm-session"] == "k:1") is ("sessions" in prefix)


@pytest.mark.parametrize("prefix", ["", "/v1", "/sessions/s/v1", "/sessions/s"])
def test_models_are_listed_and_found(serve, prefix):
    served = serve()
    assert served.http.get(f"{prefix}/models").json()["data"][0]["id"] == "scripted"
    assert served.http.get(f"{prefix}/models/scripted").json()["object"] == "model"
    assert served.http.get(f"{prefix}/models/other").json()["error"]["code"] == "model_not_found"
    anthropic = served.http.get(f"{prefix}/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (anthropic["first_id"], anthropic["has_more"], anthropic["data"][0]["type"]) == ("scripted", False, "model")


@pytest.mark.parametrize("prefix", ["", "/v1", "/sessions/s/v1"])
def test_tokens_are_counted_and_nothing_is_stored(serve, upstream, prefix):
    served = serve(["hello"], upstream=upstream)
    messages = served.post(f"{prefix}/messages/count_tokens", json={"model": "m", **REQUESTS["messages"]})
    responses = served.post(f"{prefix}/responses/input_tokens", json={"model": "m", **REQUESTS["responses"]})
    expected = served.post(json={"model": "m", **REQUESTS["chat/completions"]}).json()["usage"]["prompt_tokens"]
    assert messages.json() == {"input_tokens": expected}
    assert responses.json() == {"object": "response.input_tokens", "input_tokens": expected}
    assert sum(info.num_traces for info in served.store.sessions()) == 1


def test_tokens_of_an_overlong_prompt_are_counted(serve):
    served = serve(["hello"], context_length=10)
    counted = served.post("/v1/messages/count_tokens", json={"model": "m", **REQUESTS["messages"]})
    whole = serve(["hello"]).post("/v1/messages/count_tokens", json={"model": "m", **REQUESTS["messages"]})
    assert counted.json() == whole.json()
    assert counted.json()["input_tokens"] > 10


@pytest.mark.parametrize("path", ["/", "/api/hello", "/v1/messages", "/sessions/s/v1", "/sessions/s/api/hello"])
def test_head_requests_are_answered(refusing, path):
    assert refusing.http.head(path).status_code == 200


def test_websocket_is_rejected_at_once(refusing):
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    refused = refusing.http.get("/v1/responses", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (426, "upgrade_required")


# Unknown members


@every_dialect
def test_unknown_and_null_members_are_accepted(serve, route):
    body = {"model": "m", **REQUESTS[route], "x": {"y": []}, "temperature": None, "tools": None, "stream": None}
    assert serve().post(f"/v1/{route}", json=body).status_code == 200


@every_dialect
def test_unknown_members_reach_the_upstream(serve, route):
    served = serve(upstream="http")
    served.post(f"/v1/{route}", json={"model": "m", **REQUESTS[route], "chat_template_kwargs": {"a": 1}, "min_p": 0.1})
    [sent] = served.upstream.requests
    assert (sent["chat_template_kwargs"], sent["min_p"]) == ({"a": 1}, 0.1)


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_messages_with_unknown_members_names_and_parts_are_accepted(serve, route):
    served = serve(upstream="http")
    part = {"type": "input_text" if route == "responses" else "text", "text": "hi", "cache_control": None}
    message = {"role": "user", "name": "ann", "content": [part], "index": 0, "audio": None}
    body = {**REQUESTS[route], ("input" if route == "responses" else "messages"): [message]}
    assert served.post(f"/v1/{route}", json={"model": "m", **body}).status_code == 200
    [sent] = served.upstream.requests
    assert sent["messages"][0]["content"] in ("hi", [part])


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_developer_and_system_messages_become_one_system_message(serve, upstream, route):
    served = serve(upstream=upstream)
    answer = [("system", "a"), ("developer", "b"), ("user", "hi"), ("developer", "c")]
    messages = [{"role": role, "content": content} for role, content in answer]
    served.post(f"/v1/{route}", json={"model": "m", ("input" if route == "responses" else "messages"): messages})
    [output] = served.engine.outputs
    prompt = bytes(token for token in output.prompt_ids if token < 256).decode()
    assert prompt == "system\na\n\nb\nuser\nhi\nsystem\nc\nassistant\n"
    [session] = served.store.sessions()
    assert served.store.by_session(session.id)[0].messages == messages


# Conversations kept on the server


def test_deferred_tool_and_its_reference_become_text(serve):
    served = serve(upstream="http")
    reference = {"type": "tool_reference", "tool_name": "f"}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [reference]}
    use = {"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {}}
    messages = [*REQUESTS["messages"]["messages"], {"role": "assistant", "content": [use]}]
    body = {"model": "m", "max_tokens": 9, "messages": [*messages, {"role": "user", "content": [found]}]}
    body["tools"] = [{**TOOL["messages"], "defer_loading": True}]
    assert served.post("/v1/messages", json=body).status_code == 200
    [sent] = served.upstream.requests
    assert sent["tools"] == [TOOL["chat/completions"]]
    assert sent["messages"][-1]["content"] == "The tool f can be called now."


def test_cache_and_context_hints_are_ignored(serve):
    served = serve(upstream="http")
    cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [cached]}],
        "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "enabled", "budget_tokens": 31999, "display": "omitted"},
    }
    assert served.post("/v1/messages", json=body, headers={"anthropic-beta": "a,b"}).status_code == 200
    [sent] = served.upstream.requests
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert not {"metadata", "context_management", "thinking", "cache_control"} & sent.keys()


def test_continued_response_survives_a_restart_of_the_gateway(serve):
    served = serve(["one", "two"])
    first = served.post("/sessions/s/v1/responses", json={"model": "m", "input": "a"}).json()
    served.server.stop()
    again = serve(store=served.store)
    body = {"model": "m", "input": "b", "previous_response_id": first["id"]}
    assert again.post("/sessions/s/v1/responses", json=body).status_code == 200
    assert [message["content"] for message in served.store.by_session("s")[1].messages] == ["a", "one", "b"]


# Standard fields of answers


class SloppyUpstream:
    """Upstream that sends as few fields as any real server: no ids, roles, indexes, types, dates, models or usage."""

    def prepare(self, request):
        return dict(request)

    def ignored(self, request):
        return ()

    def lost(self, messages, tools=None):
        return ()

    def continued_prompt(self, request, prior):
        return None

    async def complete(self, call):
        calls = [{"function": {"name": "f", "arguments": "{}"}} for _ in range(2)]
        ids = {"prompt_token_ids": [1, 2, 3]}
        return {"choices": [{"message": {"content": "so", "tool_calls": calls}, "token_ids": [4, 5]}], **ids}

    async def stream(self, call):
        yield [{"choices": [{"delta": {"content": "s"}, "token_ids": [4]}], "prompt_token_ids": [1, 2, 3]}]
        yield [{"choices": [{"delta": {"content": "o"}}]}]
        for _ in range(2):
            yield [{"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}]
        yield [{"choices": [{"delta": {}, "finish_reason": "tool_calls", "token_ids": [5]}]}]

    async def models(self):
        return []

    async def close(self):
        pass


@pytest.fixture(scope="module")
def sloppy():
    with GatewayServer(MemoryTraceStore(), SloppyUpstream(), GatewayConfig(shutdown_timeout_s=1)) as server:
        yield lambda route, **body: httpx.post(
            f"{server.url}/v1/{route}", json={"model": "m", **REQUESTS[route], **body}, timeout=60
        )


def test_chat_completion_has_every_standard_field(sloppy):
    answer = sloppy("chat/completions").json()
    assert {"id", "object", "created", "model", "choices"} <= answer.keys()
    [choice] = answer["choices"]
    assert (choice["index"], choice["message"]["role"], choice["finish_reason"]) == (0, "assistant", "tool_calls")
    assert [call["type"] for call in choice["message"]["tool_calls"]] == ["function"] * 2
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


def test_every_chunk_has_every_standard_field_and_its_finish_reason(sloppy):
    chunks = events_of(sloppy("chat/completions", stream=True).text)
    assert all({"id", "object", "created", "model", "choices"} <= chunk.keys() for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {choice["index"] for choice in choices} == {0}
    assert choices[0]["delta"]["role"] == "assistant"
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call["type"]) for call in calls] == [(0, "function"), (1, "function")]
    assert len({call["id"] for call in calls}) == 2


def test_response_has_every_standard_field(sloppy):
    whole = sloppy("responses").json()
    [*_, last] = events_of(sloppy("responses", stream=True).text)
    for response in (whole, last["response"]):
        assert {"id", "created_at", "model", "parallel_tool_calls", "tools", "tool_choice"} <= response.keys()
        message, *calls = response["output"]
        assert (message["role"], message["content"][0]["text"]) == ("assistant", "so")
        assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
        assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (3, 2)


def test_message_has_every_standard_field_and_ordered_events(sloppy):
    whole = sloppy("messages").json()
    assert (whole["model"], whole["role"], whole["stop_reason"]) == ("m", "assistant", "tool_use")
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (3, 2)
    streamed = sloppy("messages", stream=True).text
    names = [line.removeprefix("event: ") for line in streamed.split("\n") if line.startswith("event: ")]
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    events = events_of(streamed)
    assert [event["type"] for event in events] == names
    assert events[0]["message"]["model"] == "m"
    assert events[-2]["usage"]["output_tokens"] == 2


@every_dialect
def test_usage_is_always_included(serve, upstream, route):
    served = serve(["hello"], upstream=upstream)
    usage = served.post(f"/v1/{route}", json={"model": "m", **REQUESTS[route]}).json()["usage"]
    assert 6 in usage.values()
    body = {"model": "m", **REQUESTS[route], "stream": True, "stream_options": {"include_usage": True}}
    shown = [
        event.get("usage") or event.get("response", {}).get("usage")
        for event in events_of(served.post(f"/v1/{route}", json=body).text)
    ]
    assert [value for value in shown if value][-1] == usage


@every_dialect
def test_silent_stream_is_kept_alive_and_text_is_streamed_as_generated(serve, route):
    engine = HeldEngine(["abcdefgh"], num_pieces=1)
    served = serve(engine, config=GatewayConfig(keep_alive_s=0.05, shutdown_timeout_s=1))
    body = {"model": "m", **REQUESTS[route], "stream": True}
    spoken = silence = ""
    with served.http.stream("POST", f"/v1/{route}", json=body) as answer:
        pieces = answer.iter_text()
        while "abcd" not in spoken:
            spoken += next(pieces)
        while "keep-alive" not in silence and "ping" not in silence:
            silence += next(pieces)
        engine.go.set()
        rest = "".join(pieces)
    assert "efgh" not in spoken + silence
    assert "efgh" in rest


# Stop strings


@every_dialect
def test_stop_string_is_removed_from_the_answer_and_recorded_as_sampled(serve, upstream, route):
    served = serve(["yes STOP no"], upstream=upstream)
    name = {"messages": "stop_sequences"}.get(route, "stop")
    answer = served.post(f"/sessions/s/v1/{route}", json={"model": "m", **REQUESTS[route], name: ["STOP"]}).json()
    assert text_of(answer) == "yes "
    if route == "messages":
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    elif route != "responses":  # responses have no field for it
        assert answer["choices"][0]["stop_reason"] == "STOP"
    [trace] = served.store.by_session("s")
    assert trace.response_ids == encode("yes STOP")
    assert (trace.finish_reason, trace.sampling["stop"]) == ("stop", ["STOP"])


@every_dialect
def test_sampled_end_token_is_recorded(serve, upstream, route):
    served = serve(["yes"], upstream=upstream)
    served.post(f"/sessions/s/v1/{route}", json={"model": "m", **REQUESTS[route]})
    assert served.store.by_session("s")[0].response_ids[-1] == TURN_END


# The trainer's sampling parameters


@every_dialect
def test_sampling_of_the_trainer_overrides_the_client_and_is_logged(serve, upstream, route):
    served = serve(["hello"], upstream=upstream)
    base_url = served.server.open_session("s", sampling={"temperature": 1.0, "max_tokens": 3})
    limit = {"responses": "max_output_tokens"}.get(route, "max_tokens")
    body = {"model": "m", **REQUESTS[route], "temperature": 0.1, limit: 4096}
    served.http.post(f"{base_url}/{route}", json=body)
    [trace] = served.store.by_session("s")
    assert (trace.sampling["temperature"], trace.sampling["max_tokens"]) == (1.0, 3)
    assert trace.requested_sampling == {"temperature": 0.1, "max_tokens": 4096}
    assert len(trace.response_ids) == 3


@every_dialect_with_tools
def test_guided_decoding_is_recorded_with_log_probabilities(serve, route):
    served = serve(["{}"], upstream="http")
    schema = {"type": "object"}
    guided = {
        "chat/completions": {
            "tool_choice": "required",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        },
        "responses": {
            "tool_choice": "required",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        },
        "messages": {
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    }[route]
    body = {"model": "m", **REQUESTS[route], "tools": [{**TOOL[route], "strict": True}], **guided}
    served.post(f"/sessions/s/v1/{route}", json=body)
    [trace] = served.store.by_session("s")
    assert trace.sampling["tool_choice"] == "required"
    assert trace.sampling["response_format"]["json_schema"]["schema"] == schema
    assert trace.tools is not None
    assert trace.logprobs


# Sessions, and failures that clients recover from


@pytest.mark.parametrize("header", ["X-Claude-Code-Session-Id", "x-session-id", "session-id"])
def test_session_defaults_to_the_session_id_of_the_client(serve, header):
    served = serve()
    own = {header: "ses_4a7"}
    others = [
        ("/v1/chat/completions", {}, "ses_4a7"),
        ("/v1/chat/completions", {"authorization": "Bearer rllm-key"}, "key"),
        ("/v1/chat/completions", {"x-rllm-session": "header", "authorization": "Bearer rllm-key"}, "header"),
        ("/sessions/path/v1/chat/completions", {"authorization": "Bearer rllm-key"}, "path"),
    ]
    for path, headers, session_id in others:
        assert served.post(path, headers={**own, **headers}).headers["x-rllm-session"] == session_id
    for strange in ("a b/c", ".."):
        answer = served.post("/v1/chat/completions", headers={header: strange})
        assert answer.status_code == 200, "an invalid id of another program is ignored"


def test_side_calls_are_tagged_and_sub_agents_are_named(serve):
    served = serve()
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    served.post(json={**asked, "tools": [tool]}, headers={"x-claude-code-agent-id": "a1", "x-parent-session-id": "p1"})
    served.post(json=asked)
    task, title = served.store.by_session("s")
    assert task.metadata == {"x-claude-code-agent-id": "a1", "x-parent-session-id": "p1"}
    assert title.metadata == {"rllm.side_call": "without tools"}


@every_dialect
@pytest.mark.parametrize("stream", [False, True])
def test_overlong_prompt_is_a_400_with_the_message_that_clients_expect(serve, upstream, route, stream):
    served = serve(context_length=10, upstream=upstream)
    refused = served.post(f"/v1/{route}", json={"model": "m", **REQUESTS[route], "stream": stream})
    assert refused.status_code == 400
    error = refused.json()["error"]
    if route == "messages":
        assert error["message"].startswith("prompt is too long: ")
    else:
        assert error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is" in error["message"]
        assert error["param"] == {"responses": "input", "completions": "prompt"}.get(route, "messages")


@every_dialect
@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"model": "\xff"}', 400), (b"[]", 400), (b"{}", 400), (b" " * 2000, 413)],
    ids=["truncated", "not UTF-8", "not an object", "empty", "too long"],
)
def test_unreadable_request_gets_the_error_format_of_the_dialect(serve, route, body, status):
    served = serve(config=GatewayConfig(max_body_bytes=1000, shutdown_timeout_s=1))
    refused = served.http.post(f"/v1/{route}", content=body)
    assert refused.status_code == status
    assert refused.json().get("type") == ("error" if route == "messages" else None)
    assert refused.json()["error"]["type"] in ("invalid_request_error", "request_too_large")
    [trace] = served.store.by_session(refused.headers["x-rllm-session"])
    assert (trace.error, trace.messages, trace.response_ids) == (refused.json()["error"]["message"], [], [])


def test_rejected_thread_is_not_a_failed_call(serve):
    served = serve()
    body = {"model": "m", **REQUESTS["messages"], "thread": {"type": "create"}}
    assert served.post("/sessions/s/v1/messages", json=body).status_code == 400
    assert served.store.by_session("s") == []


@every_dialect
@pytest.mark.parametrize(
    ("key", "status"),
    [({}, 401), ({"x-api-key": "no"}, 401), ({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200)],
)
def test_gateway_key_is_accepted_in_either_header(serve, route, key, status):
    served = serve(config=GatewayConfig(api_key="secret", shutdown_timeout_s=1))
    answer = served.post(f"/v1/{route}", json={"model": "m", **REQUESTS[route]}, headers=key)
    assert answer.status_code == status
    if status == 401 and route == "messages":
        assert answer.json()["error"]["type"] == "authentication_error"


def test_unknown_route_gets_the_error_format_of_the_dialect(refusing):
    assert refusing.http.post("/v1/embeddings").json()["error"]["code"] == "not_found"
    anthropic = refusing.http.post("/v1/complete", headers={"anthropic-version": "2026-10-21"})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")


@every_dialect
def test_disconnect_ends_the_generation_and_keeps_sampled_tokens(serve, route):
    served = serve(HeldEngine(["abcdefgh" * 100], num_pieces=1))
    address = urlsplit(served.server.url)
    body = json.dumps({"model": "m", **REQUESTS[route], "stream": True}).encode()
    head = f"POST /sessions/s/v1/{route} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head + body)
        seen = b""
        while b"abcd" not in seen:
            seen += client.recv(65536)
    traces = wait_for(lambda: served.store.by_session("s"))
    assert (traces[0].finish_reason, bytes(traces[0].response_ids[:4])) == ("abort", b"abcd")


@every_dialect
@pytest.mark.parametrize("stream", [False, True])
def test_retry_gets_the_answer_of_the_repeated_request(serve, departures, route, stream, monkeypatch):
    monkeypatch.setattr("rllm.gateway.call_dedup._PAUSE_S", 60.0)
    engine = HeldEngine()
    served = serve(engine)
    body = {"model": "m", **REQUESTS[route], "stream": stream}
    path = f"/sessions/s/v1/{route}"
    first = {"x-stainless-retry-count": "0", "x-stainless-read-timeout": "0.01"}
    served.ask_and_leave(path, json=body, headers=first)
    wait_for(lambda: departures)
    threading.Timer(0.1, engine.go.set).start()
    again = served.post(path, json=body, headers={**first, "x-stainless-retry-count": "1"})
    assert again.status_code == 200
    [trace] = served.store.by_session("s")
    assert (trace.id in again.text, trace.error, served.engine.num_calls) == (True, None, 1)


@pytest.mark.slow
@every_dialect
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_held_during_a_restart_of_the_server(serve, route, stream):
    served = serve(["hello"], upstream="pool", upstream_port=(port := free_port()))
    served.upstream.stop()
    restarted = ScriptedServer(served.engine, port=port)
    starting = threading.Timer(0.3, restarted.start)
    starting.start()
    served.stack.callback(restarted.stop)
    body = {"model": "m", **REQUESTS[route], "stream": stream}
    assert served.post(f"/sessions/s/v1/{route}", json=body).status_code == 200
    [trace] = served.store.by_session("s")
    assert (trace.error, trace.response["content"]) == (None, "hello")
    assert trace.timings["queue_s"] > 0
