import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError, InferenceError, PromptTooLongError
from rllm.inference.engine import ModelOutput, OutputDelta, offers
from rllm.testing.scripted import TURN_END, TURN_START, ScriptedEngine, decode, encode, encode_prompt

HI = [{"role": "user", "content": "hi"}]


def ask(engine, messages=HI, **params):
    return asyncio.run(engine.get_model_response(messages, **params))


async def collect(engine, messages=HI, **params):
    return [piece async for piece in engine.stream_model_response(messages, **params)]


def test_ids_are_the_bytes_of_the_text_and_the_markers():
    output = ask(ScriptedEngine(["ok"]))
    assert output.prompt_ids == [TURN_START, *b"user\nhi", TURN_END, *b"\n", TURN_START, *b"assistant\n"]
    assert output.completion_ids == [*b"ok", TURN_END]
    assert len(output.logprobs) == 3
    assert all(value < 0 for value in output.logprobs)


def test_answers_are_returned_in_order_and_start_over():
    engine = ScriptedEngine(["a", "b"])
    assert [ask(engine).content for _ in range(3)] == ["a", "b", "a"]
    assert [output.content for output in engine.outputs] == ["a", "b", "a"]


def test_answers_may_be_a_function_of_the_messages():
    engine = ScriptedEngine(lambda messages: messages[-1]["content"].upper())
    assert ask(engine).content == "HI"


def test_tool_call_has_a_short_form():
    engine = ScriptedEngine([{"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}])
    output = ask(engine)
    assert output.tool_calls == [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert output.finish_reason == "tool_calls"
    assert output.to_message()["content"] is None


def test_errors_in_the_script_are_raised_as_inference_errors():
    engine = ScriptedEngine([InferenceError("overloaded", status_code=503), ValueError("boom")])
    with pytest.raises(InferenceError, match="overloaded") as refused:
        ask(engine)
    assert refused.value.status_code == 503
    with pytest.raises(InferenceError, match="ValueError: boom"):
        ask(engine)


@pytest.mark.parametrize("script", [[], "one text", ""])
def test_script_without_answers_is_rejected(script):
    with pytest.raises(ConfigError, match="at least one answer"):
        ScriptedEngine(script)


def test_prompt_that_leaves_no_room_is_rejected():
    with pytest.raises(PromptTooLongError, match="context length is 8"):
        ask(ScriptedEngine(["a"], context_length=8))


def test_max_tokens_truncates_the_answer():
    output = ask(ScriptedEngine(["abcdef"]), max_tokens=3)
    assert (output.content, output.completion_ids, output.finish_reason) == ("abc", [*b"abc"], "length")


def test_stop_string_is_sampled_but_not_in_the_text():
    output = ask(ScriptedEngine(["hello STOP there"]), stop=["STOP"])
    assert (output.content, decode(output.completion_ids), output.finish_reason) == ("hello ", "hello STOP", "stop")


answers = st.one_of(
    st.text(max_size=12),
    st.fixed_dictionaries(
        {"content": st.text(max_size=6), "reasoning": st.text(max_size=6)},
        optional={
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"name": st.just("f"), "arguments": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)}
                ),
                max_size=2,
            )
        },
    ),
)


@given(st.lists(answers, min_size=2, max_size=4))
def test_continued_conversation_extends_earlier_tokens(script):
    engine = ScriptedEngine(script)
    messages = list(HI)
    earlier = []
    for number in range(len(script)):
        output = ask(engine, messages)
        assert output.prompt_ids[: len(earlier)] == earlier
        earlier = output.prompt_ids + output.completion_ids
        messages += [output.to_message(), {"role": "user", "content": str(number)}]


def test_reformatted_arguments_still_extend_earlier_tokens():
    engine = ScriptedEngine([{"tool_calls": [{"name": "f", "arguments": '{"b":  2,"a":1}'}]}])
    output = ask(engine)
    message = output.to_message()
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    message["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
    prompt_ids = encode_prompt([*HI, message])
    assert prompt_ids[: len(output.prompt_ids + output.completion_ids)] == output.prompt_ids + output.completion_ids


@given(answers)
def test_streamed_answer_equals_the_whole_answer(answer):
    whole = ask(ScriptedEngine([answer]))
    *deltas, last = asyncio.run(collect(ScriptedEngine([answer])))
    assert isinstance(last, ModelOutput)
    assert last == whole
    assert all(isinstance(delta, OutputDelta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == whole.content
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
    streamed_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert whole.completion_ids[: len(streamed_ids)] == streamed_ids


async def test_latency_reorders_the_answers_of_concurrent_calls():
    engine = ScriptedEngine(
        lambda messages: messages[-1]["content"],
        latency_s=lambda messages: 0.05 if messages[-1]["content"] == "slow" else 0.0,
    )
    ask_for = [engine.get_model_response([{"role": "user", "content": word}]) for word in ("slow", "fast")]
    slow, fast = await asyncio.gather(*ask_for)
    assert (slow.content, fast.content) == ("slow", "fast")
    assert [output.content for output in engine.outputs] == ["fast", "slow"]


def test_engine_supports_streaming():
    assert offers(ScriptedEngine(["a"]), "stream_model_response")


@given(st.text())
def test_text_survives_encoding(text):
    assert decode(encode(text)) == text
