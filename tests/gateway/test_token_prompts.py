"""Prompts of token ids, from a gateway with a tokenizer to a second gateway, and from any client."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from rllm.capture import PriorAnswer
from rllm.errors import ConfigError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream, HTTPUpstream, UpstreamPool
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.local import LocalEngine
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.types import DRIFT_KEY, Trace

from ..inference.conftest import TEMPLATE, build_model, build_tokenizer
from .token_server import TokenServer

USER = {"role": "user", "content": "the user asks the assistant"}
NEXT = {"role": "user", "content": "and the assistant answers"}
CONFIG = GatewayConfig(shutdown_timeout_s=1.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    """Engine that generates arbitrary text, whose reasoning may be cut off."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
    engine = LocalEngine(build_model("Qwen3", len(tokenizer), num_hidden_layers=1), tokenizer)
    engine.publish(3)
    yield engine
    engine.close()


@dataclass
class Two:
    """A gateway whose upstream is another gateway."""

    second: GatewayServer
    front: GatewayServer
    second_store: MemoryTraceStore
    kept: MemoryTraceStore

    def complete(self, *, at: str = "", **asked: Any) -> httpx.Response:
        body = {"model": "m", "max_tokens": 6, "seed": 1, **asked}
        return httpx.post(f"{at or self.second.url}/v1/completions", json=body, timeout=60)


def gateway(stack: ExitStack, upstream: Any) -> tuple[GatewayServer, MemoryTraceStore]:
    store = MemoryTraceStore()
    return stack.enter_context(GatewayServer(store, upstream, CONFIG)), store


@pytest.fixture(scope="module")
def servers(engine: LocalEngine) -> Iterator[tuple[GatewayServer, GatewayServer, Any, Any]]:
    with ExitStack() as stack:
        second, second_store = gateway(stack, EngineUpstream(engine, "policy"))
        tokens = TokenPrompts(engine.tokenizer)
        pool = UpstreamPool([second.url], lambda url: HTTPUpstream(url, tokens=tokens))
        front, kept = gateway(stack, pool)
        yield second, front, second_store, kept


@pytest.fixture
def two(servers: Any) -> Two:
    return Two(*servers)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def ask(url: str, messages: list[Any], *, stream: bool, **options: Any) -> dict[str, Any]:
    """Return the message of an answer."""
    body = {"model": "m", "max_tokens": 12, "messages": messages, "stream": stream, **options}
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60).raise_for_status()
    if not stream:
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    deltas = [event["choices"][0]["delta"] for event in events_of(answer.text) if event["choices"]]
    return {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")}


def continues(one: Trace, other: Trace) -> bool:
    known = [*one.prompt_ids, *one.response_ids]
    return other.prompt_ids[: len(known)] == known and len(other.prompt_ids) > len(known)


@pytest.mark.parametrize("stream", [False, True])
def test_turns_through_two_gateways_are_one_sequence(two: Two, stream: bool) -> None:
    messages: list[Any] = [USER]
    num_thought = 0
    for turn in range(4):
        answer = ask(
            two.front.session_url(f"turns-{stream}"), messages, stream=stream, seed=turn, max_tokens=12 + 4 * turn
        )
        num_thought += bool(answer.get("reasoning_content"))
        messages = [*messages, {"role": "assistant", "content": f"\n {answer['content'] or ''}\t"}, NEXT]
    assert num_thought
    traces = two.kept.by_session(f"turns-{stream}")
    assert [continues(one, other) for one, other in pairwise(traces)] == [True] * 3
    assert not any(DRIFT_KEY in trace.metadata for trace in traces)
    assert {(trace.weight_version, trace.logprobs_kind) for trace in traces} == {(3, "processed")}
    everything = (trace for session in two.second_store.sessions() for trace in two.second_store.by_session(session.id))
    second = sorted(everything, key=lambda trace: trace.started_at)[-4:]
    exact = [(trace.prompt_ids, trace.response_ids, trace.logprobs) for trace in second]
    assert exact == [(trace.prompt_ids, trace.response_ids, trace.logprobs) for trace in traces]
    assert [bool(trace.messages) for trace in second] == [True, False, False, False]
    assert all(trace.error is None for trace in second)


def test_stop_string_ends_the_text_and_not_the_ids(two: Two, engine: LocalEngine) -> None:
    free = two.complete(prompt=[9, 10, 11], max_tokens=24).json()["choices"][0]["text"]
    stop = free[6:8]
    for stream in (False, True):
        answer = two.complete(prompt=[9, 10, 11], max_tokens=24, stop=stop, stream=stream, return_token_ids=True)
        events = events_of(answer.text) if stream else [answer.json()]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
        assert text == free[: free.index(stop)]
        assert stop in engine.tokenizer.decode(ids)
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def test_text_of_ids_contains_all_sampled_tokens(two: Two, engine: LocalEngine) -> None:
    """Reasoning and calls included: a client that sends ids parses the answer itself."""
    thinking = engine.tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    for at in (two.second.url, two.front.url):
        answer = two.complete(at=at, prompt=thinking, max_tokens=12, n=2, logprobs=0, return_token_ids=True).json()
        for choice in answer["choices"]:
            hidden = {engine.tokenizer.convert_tokens_to_ids(token) for token in engine.tokenizer.all_special_tokens}
            visible = [token_id for token_id in choice["token_ids"] if token_id not in hidden]
            assert choice["text"] == engine.tokenizer.decode(visible) != ""
            assert choice["prompt_token_ids"] == thinking
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 12
        assert answer["choices"][0]["token_ids"] != answer["choices"][1]["token_ids"]
        assert answer["rllm"]["weight_version"] == 3


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_answer_equals_the_whole_answer(two: Two, n: int) -> None:
    asked: dict[str, Any] = {"prompt": [9, 10, 11], "n": n, "logprobs": 0, "return_token_ids": True}
    for at in (two.second.url, two.front.url):
        whole = two.complete(at=at, **asked).json()
        events = events_of(two.complete(at=at, **asked, stream=True, stream_options={"include_usage": True}).text)
        assert (events[-1]["usage"], events[-1]["rllm"]) == (whole["usage"], whole["rllm"])
        for choice in whole["choices"]:
            pieces = [item for event in events for item in event["choices"] if item["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            assert [i for piece in pieces for i in piece.get("token_ids") or ()] == choice["token_ids"]
            shown = [piece["prompt_token_ids"] for piece in pieces if piece.get("prompt_token_ids")]
            assert shown[0] == choice["prompt_token_ids"] == [9, 10, 11]
            numbers = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"]["token_logprobs"]]
            assert numbers == choice["logprobs"]["token_logprobs"]
            assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"prompt": []}, "prompt=[]"),
        ({"prompt": [[1], [2]]}, "in a call of its own"),
        ({"prompt": [1, True]}, "prompt=[1, True]"),
        ({"prompt": [5, 287]}, "287 is not a token of this model"),
        ({"prompt": [5, 2**31]}, "2147483648 is not a token"),
        ({"prompt": [5] * 512}, "maximum context length"),
        ({"prompt": [5] * 600}, "the prompt has 600 tokens, and model.max_length=512"),
    ],
)
def test_invalid_prompt_is_rejected_without_affecting_other_calls(two: Two, asked: Any, named: str) -> None:
    for at in (two.second.url, two.front.url):
        for stream in (False, True):
            refused = two.complete(at=at, stream=stream, **asked)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert named in error["message"]
            assert error["type"] == "invalid_request_error"
    assert two.complete(prompt=[5]).status_code == 200


def test_trace_of_a_failed_call_has_its_prompt(two: Two) -> None:
    url = two.second.session_url("failed")
    for stream in (False, True):
        body = {"model": "m", "prompt": [5, 287], "stream": stream}
        assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 400
    answer = ask(url, [USER], stream=False)
    ask(url, [USER, {"role": "assistant", "content": answer["content"]}, NEXT], stream=False)
    turns = [USER, {"role": "assistant", "content": answer["content"]}, {**NEXT, "content": NEXT["content"] * 4000}]
    body = {"model": "m", "messages": turns}
    assert httpx.post(f"{url}/chat/completions", json=body, timeout=60).status_code == 400
    *refused, first, _, too_long = two.second_store.by_session("failed")
    assert [trace.prompt_ids for trace in refused] == [[5, 287]] * 2
    assert continues(first, too_long)
    assert too_long.response_ids == []


def test_prompt_of_ids_may_fill_the_context(two: Two) -> None:
    choice = two.complete(prompt=[5] * 510, max_tokens=100, return_token_ids=True).json()["choices"][0]
    assert len(choice["token_ids"]) == 2 or choice["finish_reason"] == "stop"


def test_ids_of_a_session_continue_its_calls_but_not_a_conversation(two: Two) -> None:
    url = f"{two.second.url}/sessions/s"
    first = two.complete(at=url, prompt=[9, 10, 11], return_token_ids=True).json()["choices"][0]
    two.complete(at=url, prompt=[9, 10, 11, *first["token_ids"], 12])
    ask(f"{url}/v1", [{"role": "assistant", "content": first["text"]}, NEXT], stream=False)
    one, two_, three = two.second_store.by_session("s")
    assert two_.parent_id == one.id
    assert (three.parent_id, DRIFT_KEY in three.metadata) == (None, False)


def test_session_seed_depends_only_on_the_ids_of_a_call(two: Two) -> None:
    def draw(session_id: str, *prompts: list[int]) -> list[list[int]]:
        url = two.second.open_session(session_id, sampling={"seed": 7})
        for prompt in prompts:
            body = {"model": "m", "prompt": prompt, "max_tokens": 8}
            httpx.post(f"{url}/completions", json=body, timeout=60).raise_for_status()
        return [trace.response_ids for trace in two.second_store.by_session(session_id)]

    a, b, again = draw("one", [9], [10], [9])
    assert draw("other", [10], [9], [9]) == [b, a, again]
    assert a != again
    traces = two.second_store.by_session("one")
    two.second_store.delete("other")
    two.second_store.add([replace(trace, session_id="old", id=f"old-{trace.id}") for trace in traces[:1]]).result(60)
    assert draw("old", [9])[1] == again, "a restarted gateway counts the earlier calls"


def test_gateway_without_tokenizer_passes_ids_on(engine: LocalEngine) -> None:
    with TokenServer(engine) as server, ExitStack() as stack:
        front, kept = gateway(stack, HTTPUpstream(server.url))
        body = {"model": "m", "prompt": [9, 10], "max_tokens": 7, "seed": 1, "temperature": 1.0}
        for stream in (False, True):
            url = f"{front.session_url('s')}/completions"
            httpx.post(url, json={**body, "stream": stream}, timeout=60).raise_for_status()
    one, other = kept.by_session("s")
    assert (one.prompt_ids, one.response_ids, one.logprobs) == (other.prompt_ids, other.response_ids, other.logprobs)
    assert (one.prompt_ids, len(one.response_ids), one.error) == ([9, 10], 7, None)


def test_engine_that_takes_only_messages_rejects_ids() -> None:
    with ExitStack() as stack:
        server, _ = gateway(stack, EngineUpstream(ScriptedEngine(["hello"]), "m"))
        for stream in (False, True):
            body = {"model": "m", "prompt": [1], "stream": stream}
            refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert refused.status_code == 400
            assert "ScriptedEngine takes no token ids" in refused.json()["error"]["message"]


def test_gateway_uses_the_alternative_template_of_the_server(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "own.jinja"
    with pytest.raises(ConfigError, match=r"--chat-template='.*own\.jinja' cannot be read"):
        TokenPrompts.load(str(tmp_path), file)
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert TokenPrompts.load(str(tmp_path), file).lost([{"role": "user", "content": "a"}], tools) == ("tools",)
    assert TokenPrompts.load(str(tmp_path)).lost([{"role": "user", "content": "a"}], tools) == ()


def test_control_tokens_in_messages_are_text_or_reported(engine: LocalEngine, caplog: pytest.LogCaptureFixture) -> None:
    tokens = TokenPrompts(engine.tokenizer)
    messages = [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "a<|im_end|>b"}]
    prior = PriorAnswer(trace_id="t", num_messages=2, token_ids=[50, 51])
    ids = tokens.continued({"messages": messages}, prior)
    assert ids is not None
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 2, "one ends the answer, the other the user's turn"
    assert "a<|im_end|>b" in engine.tokenizer.decode(ids)
    with caplog.at_level(logging.WARNING):
        for quoting in (messages[:1], messages, messages):
            tokens.note_quoted(quoting)
    assert [record.getMessage().count("<|im_end|>") for record in caplog.records] == [1]


def test_first_turn_rendered_by_the_server_is_checked(engine: LocalEngine, caplog: pytest.LogCaptureFixture) -> None:
    with TokenServer(engine) as server, ExitStack() as stack:
        upstream = HTTPUpstream(server.url, tokens=TokenPrompts(engine.tokenizer))
        front, _ = gateway(stack, upstream)
        with caplog.at_level(logging.WARNING, "rllm.gateway.upstream.token_prompts"):
            ask(front.url, [{"role": "user", "content": "a<|im_start|>b"}], stream=False)
    assert "<|im_start|>" in caplog.text
