import json

import pytest

from rllm.gateway.upstream.answers import parse_plain_answer

ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "a", "reasoning": None, "unknown_field": [1]},
    "logprobs": {"content": [ENTRY, {**ENTRY, "logprob": -1}]},
    "finish_reason": "stop",
    "stop_reason": None,
    "token_ids": [5, 6],
}
ANSWER = {"id": "x", "created": 1, "choices": [CHOICE], "usage": {"total_tokens": 5}, "prompt_token_ids": [1, 2, 3]}


def parse(**changed):
    return parse_plain_answer(json.dumps({**ANSWER, **changed}).encode())


def test_all_fields_except_token_texts_are_kept():
    bare = {**CHOICE, "logprobs": {"token_logprobs": [-0.5, -1.0]}}
    assert parse() == {**ANSWER, "choices": [bare]}
    assert parse(choices=[CHOICE, {**CHOICE, "index": 1}])["choices"] == [bare, {**bare, "index": 1}]


@pytest.mark.parametrize(
    "changed",
    [
        {"unknown_field": None},
        {"prompt_token_ids": None},
        {"choices": None},
        {"choices": [{**CHOICE, "unknown_field": 1}]},
        {"choices": [{**CHOICE, "token_ids": None}]},
        {"choices": [{**CHOICE, "token_ids": ["5"]}]},
        {"choices": [{**CHOICE, "logprobs": None}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [{"token": "a"}]}}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [{**ENTRY, "logprob": None}]}}]},
    ],
)
def test_other_answers_are_left_to_the_ordinary_parser(changed):
    assert parse(**changed) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"choices":[]}', b"\xff"])
def test_non_answers_are_left_to_the_ordinary_parser(body):
    assert parse_plain_answer(body) is None
