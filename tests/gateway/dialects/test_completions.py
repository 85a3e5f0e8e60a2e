"""OpenAI's completions in terms of chat completions, case by case."""

import pytest

from rllm.gateway.dialects.completions import from_chat, to_chat
from rllm.gateway.errors import GatewayError


@pytest.mark.parametrize("prompt", ["Once", ["Once"]])
def test_a_prompt_is_the_message_of_a_user(prompt):
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


def test_every_choice_is_a_text():
    choices = [{"index": k, "message": {"content": text}, "finish_reason": "stop"} for k, text in enumerate("ab")]
    response = from_chat(
        {"id": "cmpl-1", "created": 7, "model": "m", "choices": choices}, {"prompt": "p", "echo": True}
    )
    assert [choice["text"] for choice in response["choices"]] == ["pa", "pb"]
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
        "text_offset": [0, 2],
    }


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "prompt=None"),
        ({"prompt": ["a", "b"]}, "a call of its own"),
        ({"prompt": [1, 2]}, "token ids are not taken here: send one text; a gateway in front"),
        ({"prompt": [[1, 2]]}, "token ids are not taken here"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of=3"),
        ({"prompt": "a", "logprobs": True}, "logprobs=True"),
        ({"prompt": "a", "logprobs": 0, "echo": True}, "echo"),
        ({"prompt": "a", "n": 0}, "n=0"),
    ],
)
def test_what_a_chat_cannot_give_is_refused(asked, named):
    with pytest.raises(GatewayError) as refused:
        to_chat({"model": "m", **asked})
    assert refused.value.status == 400
    assert named in str(refused.value)
