"""Arbitrary requests of clients and answers of upstreams: each is answered, each 5xx has its cause, and nothing leaks.

By default few examples are tried; `RLLM_FUZZ_EXAMPLES=1000` tries more, cuts streams at every byte, and tests all
routes against their description.
"""

import asyncio
import contextlib
import copy
import gc
import json
import os
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.upstream import EngineUpstream, HTTPUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine

from .openapi import openapi

NUM_EXAMPLES = int(os.environ.get("RLLM_FUZZ_EXAMPLES", "10"))
THOROUGH = "RLLM_FUZZ_EXAMPLES" in os.environ
DEADLINE_S = 60
SOMEHOW = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "temperature": 0.5,
        "top_p": 0.5,
        "max_tokens": 5,
        "stop": ["x"],
        "n": 1,
        "seed": 1,
        "logprobs": True,
        "stream": False,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    },
    "completions": {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 5,
        "n": 1,
        "echo": False,
        "logprobs": 1,
        "stream": False,
    },
    "responses": {
        "model": "m",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "instructions": "s",
        "tools": [{"type": "function", **TOOL}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "reasoning": {"effort": "low"},
        "previous_response_id": None,
        "max_output_tokens": 5,
        "stream": False,
    },
    "messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "1"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "metadata": {"user_id": "u"},
        "stream": False,
    },
    "models/m:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "f", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "f", "response": {"result": "1"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "nullable": True}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["f"]}},
        "generationConfig": {"temperature": 0.5, "topK": 4.0, "maxOutputTokens": 5, "stopSequences": ["x"]},
    },
}


def path_of(route, stream):
    """Return the path of a call; Google's names the stream."""
    return f"{route.replace(':g', ':streamG')}?alt=sse" if stream and ":" in route else route


keys = st.sampled_from(["type", "text", "role", "content", "name", "id", "function", "arguments", "input", "schema"])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 10**9, -(10**18), 2**63, 10**40, 0.5, -0.0, 1e308, "", "auto", "none", "text", "user"]),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | keys, inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """Yield the path of every value inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield from ((*path, name) for name, _ in items)
    for name, inner in items:
        yield from places(inner, (*path, name))


@st.composite
def spoilt(draw, body):
    """Strategy for a valid body in which up to three values are changed or removed."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(0, 3))):
        *path, name = draw(st.sampled_from(sorted(places(body), key=repr)))
        inside = body
        for step in path:
            inside = inside[step]
        if draw(st.booleans()) or draw(st.booleans()):
            inside[name] = draw(values)
        else:
            del inside[name]
        if not body:
            break
    return body


class Running:
    """A gateway in its own event loop, which is checked when it ends."""

    def __init__(self, make_upstream):
        self._runner = asyncio.Runner()
        self.run = self._runner.run
        self.store = MemoryTraceStore()
        self.upstream = make_upstream(self._runner)
        app = create_app(self.store, self.upstream, GatewayConfig(keep_alive_s=0.5))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=DEADLINE_S
        )

    def post(self, path, **request):
        async def bounded():
            async with asyncio.timeout(DEADLINE_S):
                return await self.client.post(path, **request)

        return self.run(bounded())

    def check_healthy(self):
        async def check():
            assert (await self.client.get("/healthz")).status_code == 200
            assert (await self.client.get("/metrics")).text.count("rllm_gateway_requests_in_flight 0.0\n") == 1

        self.run(check())

    def close(self):
        """Stop, and check that no task is left."""

        async def end():
            await self.client.aclose()
            await self.upstream.close()
            for _ in range(6_000):
                if len(asyncio.all_tasks()) == 1:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"tasks are left: {asyncio.all_tasks()}")

        self.run(end())
        self._runner.close()


@pytest.fixture(scope="module")
def little_garbage():
    """Freeze existing objects, so that garbage collection for each test is fast."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_leaks(little_garbage):
    """Check that as many files are open after a test as before."""
    gc.collect()
    before = num_open_files()
    yield
    gc.collect()
    assert num_open_files() <= before


def num_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def gateway(no_leaks):
    running = Running(lambda runner: EngineUpstream(ScriptedEngine(["hello"]), "m"))
    yield running
    assert running.post("/v1/chat/completions", json=NORMAL).status_code == 200
    running.check_healthy()
    running.close()


NORMAL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def check_answer(answer):
    """Check that a call was answered, or rejected with the reason."""
    assert answer.status_code < 500 or cause_of(answer.json()), answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error.get("type") or error["status"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "internal_error" not in answer.text
        assert "the gateway failed" not in answer.text


def cause_of(body):
    return "the gateway failed" not in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_requests_with_unusual_values_are_answered_or_rejected(gateway, route, stream):
    @SOMEHOW
    @given(spoilt({**BODIES[route], "stream": stream}))
    def check(body):
        url = f"/sessions/s/v1/{path_of(route, stream)}"
        check_answer(gateway.post(url, content=json.dumps(body).encode("utf-8", "surrogatepass")))

    check()


@pytest.mark.parametrize(
    "spoils",
    [
        {"input": [{"type": [None]}]},
        {
            "tools": [{"type": "function", "name": ["f"]}],
            "tool_choice": {"type": "allowed_tools", "tools": [{"name": []}]},
        },
    ],
)
def test_earlier_findings_are_rejected(gateway, spoils):
    answer = gateway.post("/v1/responses", json={**BODIES["responses"], **spoils})
    assert answer.status_code < 500
    check_answer(answer)


@pytest.mark.parametrize("route", [*BODIES, "messages/count_tokens", "responses/input_tokens"])
def test_arbitrary_bytes_are_rejected(gateway, route):
    @SOMEHOW
    @given(st.binary(max_size=40) | st.builds(lambda value: json.dumps(value).encode(), values))
    def check(body):
        answer = gateway.post(f"/v1/{route}", content=body)
        assert 400 <= answer.status_code < 500 or b'"input"' in body, answer.text
        check_answer(answer)

    check()


@pytest.mark.parametrize("cut", range(1, 4))
def test_body_that_is_not_utf8_is_rejected(gateway, cut):
    body = '{"model": "m", "messages": [{"role": "user", "content": "\U0001f600"}]}'.encode()
    at = body.index(b"\xf0")
    answer = gateway.post("/v1/chat/completions", content=body[: at + cut] + body[at + 4 :])
    assert answer.status_code == 400
    check_answer(answer)


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "n",
    "seed",
    "repetition_penalty",
    "presence_penalty",
)


@pytest.mark.parametrize("name", SAMPLING)
def test_extreme_sampling_parameters_are_rejected_or_passed_on(gateway, name):
    for value in (-1, 0, 10**30, -0.5, 1e308, "1", [], {}, True):
        check_answer(gateway.post("/v1/chat/completions", json={**NORMAL, name: value}))
    for literal in ("NaN", "Infinity", "1e999"):
        body = json.dumps({**NORMAL, name: 0})[:-2] + f"{literal}}}"
        check_answer(gateway.post("/v1/chat/completions", content=body.encode()))


def test_arbitrary_identities_are_accepted_or_rejected(gateway):
    header = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip)

    @SOMEHOW
    @given(st.sampled_from(["a", "b", "%20", "%00", "..", "%ff", "\u00fc"]), header, header, header)
    def check(path, session, key, metadata):
        headers = {"x-rllm-session": session, "authorization": f"Bearer rllm-{key}", "x-rllm-metadata": metadata}
        answer = gateway.post(
            f"/sessions/{path}/v1/chat/completions",
            json=NORMAL,
            headers=headers,
        )
        check_answer(answer)

    check()


# The upstream disconnects.

EVENTS = (
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]},
    {
        "choices": [
            {
                "index": 0,
                "delta": {"content": "h\u00e9"},
                "token_ids": [7],
                "logprobs": {"content": [{"logprob": -0.5}]},
            }
        ]
    },
    {
        "choices": [
            {
                "index": 0,
                "delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                "token_ids": [8],
                "logprobs": {"content": [{"logprob": -0.25}]},
                "finish_reason": "tool_calls",
            }
        ]
    },
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}},
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


STREAM = HEAD % b"text/event-stream" + chunked(
    *(b"data: %s\n\n" % json.dumps(event, ensure_ascii=False).encode() for event in EVENTS), b"data: [DONE]\n\n"
)
WHOLE = HEAD % b"application/json" + chunked(
    json.dumps(
        {
            "prompt_token_ids": [1, 2],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "h\u00e9"},
                    "token_ids": [7],
                    "logprobs": {"content": [{"logprob": -0.5}]},
                    "finish_reason": "stop",
                }
            ],
        },
        ensure_ascii=False,
    ).encode()
)
ENDINGS = {
    "chat/completions": "[DONE]",
    "completions": "[DONE]",
    "responses": "response.completed",
    "messages": "message_stop",
    "models/m:generateContent": '"finishReason"',
}


PLAIN = {
    "chat/completions": NORMAL,
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {**NORMAL, "max_tokens": 5},
    "models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}


class Cutting:
    """Upstream that sends `num_bytes` bytes of an answer and disconnects."""

    answer = STREAM
    num_bytes = 0

    def __init__(self, runner):
        self._server = runner.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def _serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            writer.write(self.answer[: self.num_bytes])
            await writer.drain()
        writer.close()

    async def close(self):
        self._server.close()
        await self._server.wait_closed()


@pytest.fixture
def cutting(no_leaks):
    servers = []

    def make_upstream(runner):
        servers.append(Cutting(runner))
        return HTTPUpstream(servers[0].url)

    running = Running(make_upstream)
    running.server = servers[0]
    yield running
    running.run(running.server.close())
    running.check_healthy()
    running.close()


def cuts(answer):
    """Return the numbers of bytes after which an answer is cut off."""
    step = 1 if THOROUGH else max(1, len(answer) // 15)
    return [*range(0, len(answer), step), len(answer) - 1, len(answer)]


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_answer_interrupted_anywhere_is_reported_and_recorded(cutting, route, stream):
    cutting.server.answer = STREAM if stream else WHOLE
    for number, num_bytes in enumerate(cuts(cutting.server.answer)):
        cutting.server.num_bytes = num_bytes
        url = f"/sessions/{number}/v1/{path_of(route, stream)}"
        answer = cutting.post(url, json={**PLAIN[route], "stream": stream})
        check_answer(answer)
        (trace,) = cutting.store.by_session(str(number))
        is_whole = answer.status_code == 200 and (not stream or ENDINGS[route] in answer.text)
        assert is_whole is (trace.error is None), (num_bytes, answer.text, trace.error)
        assert "error" in answer.text or is_whole
        assert len(trace.response_ids) == len(trace.logprobs)
    assert is_whole, "the last answer is complete"


# All routes, as they are described.


@pytest.mark.skipif(not THOROUGH, reason="RLLM_FUZZ_EXAMPLES is not set")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("path", "method"), [(path, method) for path, item in openapi(needs_key=False)["paths"].items() for method in item]
)
def test_every_route_keeps_its_description(gateway, path, method):
    schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
    operation = schemathesis.openapi.from_dict(openapi(needs_key=False))[path][method.upper()]
    modes = schemathesis.GenerationMode

    @SOMEHOW
    @given(st.one_of(operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE)))
    def check(case):
        request = case.as_transport_kwargs(base_url="http://gateway")
        wanted = {name: request[name] for name in ("method", "url", "params", "headers", "json") if request.get(name)}
        if isinstance(request.get("data"), bytes | str):
            wanted["content"] = request["data"]
        with contextlib.suppress(UnicodeEncodeError, httpx.InvalidURL, TypeError):
            answer = gateway.run(gateway.client.request(**{**wanted, "headers": dict(wanted.get("headers") or {})}))
            check_answer(answer)

    check()
