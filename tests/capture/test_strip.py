import copy
from typing import Any

from rllm.capture import strip_chunk, strip_token_fields

LOGPROBS = {"content": [{"token": "t", "logprob": -0.5}]}


def response() -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": "4"}, "logprobs": LOGPROBS, "token_ids": [7], "prompt_token_ids": [1]}
    return {"id": "c", "choices": [choice], "prompt_token_ids": [1], "usage": {"prompt_tokens": 1}}


def test_an_agent_that_asked_for_no_tokens_sees_a_standard_response():
    original = response()
    stripped = strip_token_fields(original, asked={"logprobs": False})
    assert stripped == {
        "id": "c",
        "choices": [{"index": 0, "message": {"content": "4"}, "logprobs": None}],
        "usage": {"prompt_tokens": 1},
    }
    assert original == response()


def test_what_the_agent_asked_for_stays():
    assert strip_token_fields(response(), asked={"logprobs": True, "return_token_ids": True}) == response()
    assert strip_token_fields(response(), asked={"logprobs": True})["choices"][0]["logprobs"] == LOGPROBS
    assert strip_token_fields(response(), asked={"return_token_ids": True})["choices"][0]["token_ids"] == [7]
    assert strip_token_fields(response(), asked={"return_token_ids": True})["prompt_token_ids"] == [1]


def test_a_chunk_is_stripped_in_place():
    chunk = {"choices": [{"index": 0, "delta": {"content": "4"}, "token_ids": [7]}], "prompt_token_ids": [1]}
    kept = copy.deepcopy(chunk)
    strip_chunk(kept, asked={"return_token_ids": True})
    assert kept == chunk
    strip_chunk(chunk, asked={})
    assert chunk == {"choices": [{"index": 0, "delta": {"content": "4"}}]}


def test_a_chunk_with_usage_only_passes():
    chunk = {"choices": [], "usage": {"prompt_tokens": 1}}
    strip_chunk(chunk, asked={})
    assert chunk == {"choices": [], "usage": {"prompt_tokens": 1}}
