import json
import subprocess
import sys
from typing import Any

import pytest

from rllm.capture import failed_trace, sampling_of, traces_from_chat
from rllm.errors import CaptureError, TokenMismatchError
from rllm.types import Trace

REQUEST: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "2+2?"}],
    "temperature": 0.7,
    "max_tokens": 8,
    "stream": False,
    "return_token_ids": True,
    "logprobs": True,
}


def logprobs_of(values: list[Any]) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": value, "top_logprobs": []} for value in values]}


def choice_of(index: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": "4"},
        "logprobs": logprobs_of([-0.5, -0.25, 0.0]),
        "finish_reason": "stop",
        "token_ids": [7, 8, 2],
        **changes,
    }


def response_of(*choices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "tiny-v2",
        "choices": list(choices) or [choice_of()],
        "prompt_token_ids": [1, 5, 6],
        **changes,
    }


def capture(response: dict[str, Any], **changes: Any) -> list[Trace]:
    defaults: dict[str, Any] = {"session_id": "s", "started_at": 10.0, "timings": {"total_s": 0.5}, "metadata": {}}
    return traces_from_chat(REQUEST, response, **(defaults | changes))


def test_completion_becomes_a_complete_trace():
    [trace] = capture(
        response_of(),
        metadata={"task": 3},
        weight_version=4,
        template_hash="ab",
        logprobs_kind="processed",
        requested_sampling={"temperature": 0.7, "top_p": 0.9, "messages": []},
        parent_id="chatcmpl-0",
    )
    assert trace == Trace(
        id="chatcmpl-1",
        call_id="chatcmpl-1",
        session_id="s",
        parent_id="chatcmpl-0",
        model="tiny-v2",
        messages=[{"role": "user", "content": "2+2?"}],
        response={"role": "assistant", "content": "4"},
        prompt_ids=[1, 5, 6],
        response_ids=[7, 8, 2],
        logprobs=[-0.5, -0.25, 0.0],
        logprobs_kind="processed",
        sampling={"temperature": 0.7, "max_tokens": 8},
        requested_sampling={"top_p": 0.9},
        finish_reason="stop",
        weight_version=4,
        template_hash="ab",
        started_at=10.0,
        timings={"total_s": 0.5},
        metadata={"task": 3},
    )


def test_choices_have_their_own_traces_of_one_call():
    traces = capture(response_of(choice_of(0), choice_of(1, token_ids=[9, 9, 2])))
    assert [trace.id for trace in traces] == ["chatcmpl-1", "chatcmpl-1:1"]
    assert [trace.choice_index for trace in traces] == [0, 1]
    assert {trace.call_id for trace in traces} == {"chatcmpl-1"}
    assert traces[1].response_ids == [9, 9, 2]


def test_prompt_ids_may_be_in_the_choice():
    response = response_of(choice_of(prompt_token_ids=[3, 4]))
    del response["prompt_token_ids"]
    assert capture(response)[0].prompt_ids == [3, 4]


def test_ids_may_have_the_names_of_sglang():
    [trace] = capture(response_of(choice_of(token_ids=None, response_token_ids=[7, 8, 2])))
    assert (trace.response_ids, trace.error) == ([7, 8, 2], None)


def test_ids_may_come_from_token_labels():
    content = [{"token": "token_id:70", "logprob": -1.5}, {"token": "token_id:2", "logprob": -0.5}]
    [trace] = capture(response_of(choice_of(token_ids=None, logprobs={"content": content})))
    assert (trace.response_ids, trace.logprobs, trace.error) == ([70, 2], [-1.5, -0.5], None)


def test_response_without_id_gives_unique_traces():
    first, second = capture(response_of(id=None))[0], capture(response_of(id=None))[0]
    assert first.id == first.call_id != second.id


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        (choice_of(token_ids=[7, 8]), r"token_ids has 2 ids .* has 3 entries"),
        (choice_of(token_ids=[]), r"token_ids has 0 ids .* has 3 entries"),
        (choice_of(token_ids=[7, -8, 2]), r"choices\[0\].token_ids\[1\]=-8"),
        (choice_of(token_ids=[7, 8, 2**32]), r"choices\[0\].token_ids\[2\]=4294967296"),
        (choice_of(token_ids=[7, 8.0, 2]), r"choices\[0\].token_ids\[1\]=8.0"),
        (choice_of(token_ids="782"), r"choices\[0\].token_ids='782': expected a list"),
        (choice_of(logprobs=logprobs_of([-0.5, 0.5, -1.0])), r"logprobs.content\[1\].logprob=0.5"),
        (choice_of(logprobs=logprobs_of([-0.5, float("nan"), -1.0])), r"content\[1\].logprob=nan"),
        (choice_of(logprobs=logprobs_of([float("-inf"), -0.5, -1.0])), r"content\[0\].logprob=-inf"),
        (choice_of(logprobs=logprobs_of([-0.5, None, -1.0])), r"content\[1\].logprob=None"),
        (choice_of(logprobs={"content": [{"token": "t"}]}), "needs a 'logprob'"),
        (choice_of(logprobs={"content": [{"token": "token_id:7", "logprob": -1.0}, None]}), "needs a 'logprob'"),
        (choice_of(logprobs={"content": [{"token": "token_id:9", "logprob": -1.0}]}), "contradicts itself"),
        (
            choice_of(logprobs={"content": [{"token": "token_id:7", "logprob": -1}, {"token": "x", "logprob": -1}]}),
            "mixes",
        ),
    ],
)
def test_contradicting_tokens_are_rejected(choice: dict[str, Any], complaint: str):
    with pytest.raises(TokenMismatchError, match=complaint):
        capture(response_of(choice))


def test_invalid_prompt_ids_are_rejected():
    with pytest.raises(TokenMismatchError, match=r"prompt_token_ids\[1\]='a'"):
        capture(response_of(prompt_token_ids=[1, "a"]))


def test_logprob_rounded_above_zero_is_kept_unchanged():
    assert capture(response_of(choice_of(logprobs=logprobs_of([1e-7, 0, -1]))))[0].logprobs == [1e-7, 0.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"token_ids": None}, ["choices[0].token_ids", "return_token_ids: true (vLLM >= 0.10.2)"]),
        ({"logprobs": None}, ["choices[0].logprobs.content", "logprobs: true"]),
        ({"token_ids": None, "logprobs": None}, ["choices[0].token_ids", "choices[0].logprobs.content"]),
        ({"token_ids": [], "logprobs": None}, ["no sampled token"]),
    ],
)
def test_missing_tokens_are_reported_and_never_invented(changes: dict[str, Any], names: list[str]):
    response = response_of(choice_of(**changes))
    [trace] = capture(response)
    assert trace.error is not None
    assert all(name in trace.error for name in names)
    assert trace.logprobs == ([] if "logprobs" in changes else [-0.5, -0.25, 0.0])
    with pytest.raises(CaptureError, match=r"choices\[0\]"):
        capture(response, require_tokens=True)


@pytest.mark.parametrize("ids", [None, []])
def test_missing_prompt_ids_are_reported(ids: list[int] | None):
    [trace] = capture(response_of(prompt_token_ids=ids))
    assert trace.error is not None
    assert "lacks prompt_token_ids: send return_token_ids" in trace.error


@pytest.mark.parametrize("choices", [[], None])
def test_response_without_choices_is_a_failed_trace(choices: Any):
    [trace] = capture(response_of(choices=choices))
    assert trace.error is not None
    assert f"choices={choices!r}" in trace.error


def test_failed_call_keeps_its_request():
    trace = failed_trace(REQUEST, session_id="s", error="upstream refused: 503", metadata={"task": 3}, weight_version=2)
    assert (trace.error, trace.finish_reason, trace.model) == ("upstream refused: 503", "error", "tiny")
    assert trace.messages == REQUEST["messages"]
    assert trace.sampling == {"temperature": 0.7, "max_tokens": 8}
    assert (trace.metadata, trace.weight_version) == ({"task": 3}, 2)
    assert (trace.prompt_ids, trace.response_ids, trace.response) == ([], [], {})


def test_null_sampling_fields_are_not_stored():
    assert sampling_of({"temperature": 0, "top_p": None, "model": "m"}) == {"temperature": 0}


def test_importing_capture_loads_only_the_standard_library():
    loaded = "import sys, json; before = set(sys.modules); import rllm.capture; print(json.dumps(sorted(set(sys.modules) - before)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", loaded], text=True))
    roots = {name.partition(".")[0] for name in modules}
    assert roots - {"rllm"} <= set(sys.stdlib_module_names)
