from typing import Any

import pytest

from rllm.gateway.dialects.chat import strip

LOGPROBS = {"content": [{"token": "t", "logprob": -0.5}]}


def response() -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": "4"}, "logprobs": LOGPROBS, "token_ids": [7], "prompt_token_ids": [1]}
    return {"id": "c", "choices": [choice], "prompt_token_ids": [1], "usage": {"prompt_tokens": 1}}


def stripped(**asked: Any) -> dict[str, Any]:
    answer = response()
    strip(answer, asked)
    return answer


def test_agent_without_token_fields_gets_a_standard_response():
    assert stripped(logprobs=False) == {
        "id": "c",
        "choices": [{"index": 0, "message": {"content": "4"}, "logprobs": None}],
        "usage": {"prompt_tokens": 1},
    }


def test_ids_under_the_names_of_sglang_are_removed():
    answer = {"choices": [{"index": 0, "message": {"content": "4"}, "response_token_ids": [7]}]}
    strip(answer, {})
    assert answer == {"choices": [{"index": 0, "message": {"content": "4"}}]}


def test_requested_fields_are_kept():
    assert stripped(logprobs=True, return_token_ids=True) == response()
    assert stripped(logprobs=True)["choices"][0]["logprobs"] == LOGPROBS
    assert stripped(return_token_ids=True)["choices"][0]["token_ids"] == [7]
    assert stripped(return_token_ids=True)["prompt_token_ids"] == [1]


def test_chunk_without_logprobs_gets_none():
    chunk = {"choices": [{"index": 0, "delta": {"content": "4"}, "token_ids": [7]}], "prompt_token_ids": [1]}
    strip(chunk, {})
    assert chunk == {"choices": [{"index": 0, "delta": {"content": "4"}}]}


@pytest.mark.parametrize("choices", [{}, {"choices": None}, {"choices": []}])
def test_usage_chunk_passes_unchanged(choices: dict[str, Any]):
    chunk = {**choices, "usage": {"prompt_tokens": 1}}
    strip(chunk, {})
    assert chunk == {**choices, "usage": {"prompt_tokens": 1}}
