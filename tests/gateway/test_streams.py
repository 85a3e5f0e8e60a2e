"""Properties of streams: relayed as they arrive, ended only when durable, cancelled when the client disconnects."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from rllm.testing.scripted import TURN_END, ScriptedEngine, encode_prompt

from ..waiting import wait_for
from .held_engine import HeldEngine, HeldStore

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
CHAT = "/sessions/s/v1/chat/completions"


def events_of(text):
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def test_text_is_relayed_while_the_answer_is_being_generated(serve):
    engine = HeldEngine(["abcdefgh"], num_pieces=1)
    served = serve(engine)
    with served.http.stream("POST", CHAT, json=BODY) as answer:
        pieces, early = answer.iter_text(), ""
        while "abcd" not in early:
            early += next(pieces)
        assert "efgh" not in early
        engine.go.set()
        assert "efgh" in "".join(pieces)


@pytest.mark.parametrize("stream", [True, False])
def test_answers_are_acknowledged_after_their_trace_is_durable(serve, upstream, stream):
    store = HeldStore()
    served = serve(["hello"], upstream=upstream, store=store)
    seen = []

    def call():
        with httpx.stream("POST", f"{served.server.url}{CHAT}", json={**BODY, "stream": stream}, timeout=60) as answer:
            seen.append(answer.status_code)
            for piece in answer.iter_text():
                seen.append(piece)

    agent = threading.Thread(target=call)
    agent.start()
    assert store.asked.wait(60)
    if stream:
        wait_for(lambda: len(seen) > 1)
    time.sleep(0.1)  # Any further event would arrive now.
    early = "".join(map(str, seen))
    assert "stop" not in early
    assert "[DONE]" not in early
    assert bool(early) == stream
    store.release.set()
    agent.join(60)
    whole = "".join(map(str, seen))
    assert '"finish_reason":"stop"' in whole
    assert whole.endswith("data: [DONE]\n\n") == stream


def test_disconnect_cancels_the_generation_and_leaves_a_partial_trace(serve):
    served = serve(HeldEngine(["abcdefgh" * 100], num_pieces=1))
    with served.http.stream("POST", CHAT, json=BODY) as answer:
        pieces = answer.iter_text()
        while "abcd" not in next(pieces):
            pass
    traces = wait_for(lambda: served.store.by_session("s"))
    assert traces[0].finish_reason == "abort"
    assert traces[0].error is not None
    assert bytes(traces[0].response_ids[:4]) == b"abcd"
    assert len(traces[0].response_ids) == len(traces[0].logprobs)
    assert traces[0].prompt_ids == encode_prompt(BODY["messages"])
    assert served.engine.outputs == []


def test_disconnect_closes_the_stream_of_the_http_upstream(serve):
    served = serve(["abcdefgh" * 200_000], upstream="http")
    with served.http.stream("POST", CHAT, json=BODY) as answer:
        next(answer.iter_raw())
    wait_for(lambda: served.upstream.num_cancelled)
    [trace] = wait_for(lambda: served.store.by_session("s"))
    assert trace.finish_reason == "abort"
    assert TURN_END not in trace.response_ids


def test_turn_after_an_abandoned_answer_continues_from_it(serve):
    served = serve(["abcdefgh" * 200_000, "hello"], upstream="http")
    with served.http.stream("POST", CHAT, json=BODY) as answer:
        next(answer.iter_raw())
    [broken_off] = wait_for(lambda: served.store.by_session("s"))
    messages = [*BODY["messages"], broken_off.response, {"role": "user", "content": "on"}]
    served.post(json={"model": "m", "messages": messages})
    _, later = served.store.by_session("s")
    assert later.parent_id == broken_off.id


def test_disconnect_before_the_answer_cancels_it(serve):
    served = serve(HeldEngine(["never"]))
    served.ask_and_leave()
    [trace] = wait_for(lambda: served.store.by_session("s"))
    assert (trace.finish_reason, trace.response_ids) == ("abort", [])
    assert served.engine.outputs == []


def test_every_chunk_is_a_standard_one(serve, upstream):
    served = serve([{"content": "hello", "tool_calls": [{"name": "f", "arguments": {}}]}], upstream=upstream)
    answer = served.http.post(CHAT, json=BODY)
    assert answer.headers["content-type"] == "text/event-stream"
    chunks = events_of(answer.text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert {"id", "created", "model", "choices"} <= chunk.keys()
        assert chunk["choices"][0]["index"] == 0
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    [call] = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert (call["index"], call["type"]) == (0, "function")
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


class Fatal(ScriptedEngine):
    """Engine that ends its first call with an unusual error."""

    def __init__(self, error):
        super().__init__(["abcdefgh"])
        self.error = error

    async def get_model_response(self, messages, **params):
        is_first = self.num_calls == 0
        output = await super().get_model_response(messages, **params)
        if is_first:
            raise self.error
        return output

    async def stream_model_response(self, messages, **params):
        is_first = self.num_calls == 0
        async for piece in super().stream_model_response(messages, **params):
            yield piece
            if is_first:
                raise self.error


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (False, 2), (True, 1)])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        # Of an engine that cancels its own tasks, and of one that exits.
        (asyncio.CancelledError(), "the engine cancelled the call by itself: ask again"),
        (SystemExit(3), "the engine raised SystemExit: 3"),
    ],
)
def test_engine_that_cancels_a_call_or_exits_has_failed(serve, error, message, stream, n):
    served = serve(Fatal(error))
    refused = served.post(CHAT, json={**BODY, "stream": stream, "n": n})
    assert refused.status_code == (200 if stream else 503)
    assert message in refused.text
    assert "[DONE]" not in refused.text
    trace, *_ = served.store.by_session("s")
    assert (trace.finish_reason, trace.error) == ("error", message)
    assert bytes(trace.response_ids) == (b"abcd" if stream else b"")
    assert served.post(CHAT, json=BODY).status_code == 200


def test_engine_without_streaming_yields_its_answer_in_one_delta(serve):
    class Whole:
        def __init__(self, engine):
            self.get_model_response = engine.get_model_response

    served = serve(["hello"])
    served.server.stop()
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.server import GatewayServer
    from rllm.gateway.upstream import EngineUpstream

    upstream = EngineUpstream(Whole(served.engine), "m")
    with GatewayServer(served.store, upstream, GatewayConfig(shutdown_timeout_s=1)) as gateway:
        chunks = events_of(httpx.post(f"{gateway.url}{CHAT}", json=BODY, timeout=60).text)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["hello", None]
    assert served.store.by_session("s")[0].response_ids == [*b"hello", TURN_END]
