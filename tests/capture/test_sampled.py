from __future__ import annotations

from typing import Any

import pytest

from rllm.capture import trace_from_output
from rllm.errors import TokenMismatchError
from rllm.inference.engine import ModelOutput
from rllm.types import Trace

ASK = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]


def output(**changes: Any) -> ModelOutput:
    facts: dict[str, Any] = {
        "text": "4",
        "content": "4",
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4],
        "logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "weight_version": 7,
        "sampling": {"temperature": 0.5, "max_tokens": 8},
    }
    return ModelOutput(**{**facts, **changes})


def trace(answer: ModelOutput, **changes: Any) -> Trace:
    facts: dict[str, Any] = {
        "call_id": "call-1",
        "session_id": "session",
        "messages": ASK,
        "tools": None,
        "requested_sampling": {},
        "model": "policy",
        "started_at": 0.0,
        "timings": {},
        "metadata": {},
    }
    return trace_from_output(answer, **{**facts, **changes})


def test_answer_equals_its_trace() -> None:
    kept = trace(output(), requested_sampling={"temperature": 1.0, "max_tokens": 8, "user": "me"})
    assert (kept.id, kept.prompt_ids, kept.response_ids, kept.logprobs) == ("call-1", [1, 2], [3, 4], [-0.5, -0.25])
    assert (kept.response, kept.finish_reason) == ({"role": "assistant", "content": "4"}, "stop")
    assert (kept.weight_version, kept.error) == (7, None)
    assert kept.sampling == {"temperature": 0.5, "max_tokens": 8}
    assert kept.requested_sampling == {"temperature": 1.0}


def test_tuple_of_stop_strings_matches_the_requested_list() -> None:
    kept = trace(output(sampling={"stop": ("a", "b")}), requested_sampling={"stop": ["a", "b"]})
    assert (kept.sampling, kept.requested_sampling) == ({"stop": ["a", "b"]}, {})


def test_changes_to_an_answer_do_not_affect_its_trace() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer = output(tool_calls=[call])
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]
    kept = trace(answer, messages=messages)
    messages[0]["content"][0]["text"] = "3 + 3?"
    messages.append({"role": "assistant"})
    call["function"]["name"] = "subtract"  # type: ignore[index]
    for values in (answer.prompt_ids, answer.completion_ids, answer.logprobs):
        values.append(0)  # type: ignore[attr-defined]
    assert kept.messages == ASK
    assert kept.response["tool_calls"][0]["function"]["name"] == "add"
    assert (kept.prompt_ids, kept.response_ids, kept.logprobs) == ([1, 2], [3, 4], [-0.5, -0.25])


def test_missing_tokens_are_reported_and_never_invented() -> None:
    kept = trace(output(prompt_ids=[], logprobs=[]))
    assert "no prompt_ids and no logprobs" in str(kept.error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-0.5]}, "2 sampled ids but 1 log-probabilities"),
        ({"logprobs": [-0.5, 1.0]}, r"logprobs\[1\].logprob=1.0"),
        ({"completion_ids": [3, -4]}, r"completion_ids\[1\]=-4"),
    ],
)
def test_contradicting_tokens_raise_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenMismatchError, match=message):
        trace(output(**changes))
