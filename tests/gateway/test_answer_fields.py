import pytest

from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.answers import check_answer, check_models


@pytest.mark.parametrize(
    ("choices", "place"),
    [
        ("x", "$.choices"),
        ([1], "$.choices[0]"),
        ([{"message": "x"}], "$.choices[0].message"),
        ([{"delta": "x"}], "$.choices[0].delta"),
        ([{}, {"message": {"tool_calls": [1]}}], "$.choices[1].message.tool_calls[0]"),
        ([{"delta": {"tool_calls": [{"function": 3}]}}], "$.choices[0].delta.tool_calls[0].function"),
        ([{"logprobs": {"content": 3}}], "$.choices[0].logprobs.content"),
        ([{"token_ids": [1, "2"]}], "$.choices[0].token_ids[1]"),
    ],
)
def test_field_of_another_type_is_an_upstream_failure(choices, place):
    with pytest.raises(UpstreamError) as failed:
        check_answer({"choices": choices})
    assert str(failed.value).endswith(f"at `{place}`")
    assert failed.value.status_code == 502


def test_missing_null_and_unknown_fields_are_accepted():
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    message = {"content": [thought, {"type": "text", "text": "hi"}], "audio": 3, "tool_calls": None}
    calls = [{"type": "custom", "custom": {"name": "f"}}, {"function": {"arguments": {"a": 1}}}]
    choices = [{"message": message}, {"index": None, "message": {"tool_calls": calls}, "stop_reason": 7}]
    check_answer({"choices": choices, "usage": {"prompt_tokens": 2.0, "cost": "1"}, "x": []})
    check_answer({})


def test_models_have_ids():
    check_models({"data": [{"id": "m", "created": None}]})
    with pytest.raises(UpstreamError, match=r"`id`.*data\[0\]"):
        check_models({"data": [{}]})
