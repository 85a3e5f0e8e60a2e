"""OpenAI's completions in terms of chat completions, case by case."""

import pytest

from rllm.gateway.dialects.chat import CompletionsDialect
from rllm.gateway.dialects.chat import completion_from_chat as from_chat
from rllm.gateway.dialects.chat import completion_to_chat as to_chat
from rllm.gateway.errors import GatewayError


@pytest.mark.parametrize("prompt", ["Once", ["Once"]])
def test_prompt_becomes_a_user_message(prompt):
    asked = to_chat({"model": "m", "prompt": prompt, "max_tokens": 4, "n": 2, "logprobs": 1, "min_p": 0.1})
    assert asked == {
        "model": "m",
        "max_tokens": 4,
        "n": 2,
        "min_p": 0.1,
        "logprobs": True,
        "top_logprobs": 1,
        "messages": [{"role": "user", "content": "Once"}],
    }


@pytest.mark.parametrize("prompt", [[7, 8], [[7, 8]]])
def test_prompt_of_token_ids_is_passed_unchanged(prompt):
    asked = {"model": "m", "prompt": prompt, "max_tokens": 4}
    assert to_chat(asked) == {"model": "m", "max_tokens": 4, "messages": []}
    assert CompletionsDialect().prompt_ids(asked) == [7, 8]
    assert CompletionsDialect().prompt_ids({"prompt": "Once"}) is None


def test_requested_ids_have_the_field_names_of_vllm():
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "token_ids": [5]}
    response = {"choices": [choice], "prompt_token_ids": [7, 8], "rllm": {"weight_version": 3}}
    shown = from_chat(response, {"prompt": [7, 8], "return_token_ids": True})
    assert (shown["choices"][0]["prompt_token_ids"], shown["choices"][0]["token_ids"]) == ([7, 8], [5])
    assert shown["rllm"] == {"weight_version": 3}
    assert not {"rllm", "prompt_token_ids"} & from_chat(response, {"prompt": [7, 8]}).keys()


def test_every_choice_is_text():
    choices = [{"index": k, "message": {"content": text}, "finish_reason": "stop"} for k, text in enumerate("ab")]
    response = from_chat({"id": "cmpl-1", "created": 7, "model": "m", "choices": choices}, {"prompt": "p"})
    assert [choice["text"] for choice in response["choices"]] == ["a", "b"]
    assert (response["object"], response["created"]) == ("text_completion", 7)


def test_log_probabilities_are_lists():
    entries = [
        {"token": "ab", "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -1.0}]},
        {"token": "c", "logprob": -0.25, "top_logprobs": []},
    ]
    choice = {"index": 0, "message": {"content": "abc"}, "finish_reason": "stop", "logprobs": {"content": entries}}
    [shown] = from_chat({"choices": [choice]}, {"prompt": "p", "logprobs": 1})["choices"]
    assert shown["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"x": -1.0}, {}],
    }


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "prompt=None"),
        ({"prompt": ["a", "b"]}, "a call of its own"),
        ({"prompt": []}, "prompt=[]: send one text, or its token ids, in a call of its own"),
        ({"prompt": [[]]}, "prompt=[]"),
        ({"prompt": [[1], [2]]}, "prompt=[[1], [2]]"),
        ({"prompt": [[[1]]]}, "prompt=[[1]]"),
        ({"prompt": [1, "a"]}, "prompt=[1, 'a']"),
        ({"prompt": [1, True]}, "prompt=[1, True]"),
        ({"prompt": [1, 2.0]}, "prompt=[1, 2.0]"),
        ({"prompt": [1, None]}, "prompt=[1, None]"),
        ({"prompt": [1, -1]}, "prompt=[1, -1]"),
        ({"prompt": [1, 2**32]}, "prompt=[1, 4294967296]"),
        ({"prompt": 5}, "prompt=5"),
        ({"prompt": [1], "echo": True}, "echo"),
        ({"prompt": [1], "n": 0}, "n=0"),
        ({"prompt": [1], "stream": 1}, "stream=1"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of=3"),
        ({"prompt": "a", "logprobs": True}, "logprobs=True"),
        ({"prompt": "a", "n": 0}, "n=0"),
        ({"prompt": "a", "stop": ["x"] * 129}, "stop has 129 strings: use up to 128"),
    ],
)
def test_parameters_without_chat_equivalent_are_rejected(asked, named):
    with pytest.raises(GatewayError) as refused:
        to_chat({"model": "m", **asked})
    assert refused.value.status == 400
    assert named in str(refused.value)
