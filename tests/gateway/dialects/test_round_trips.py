"""An agent that sends back its answers loses nothing of the conversation, in any dialect."""

import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from rllm.gateway.dialects import messages, responses, responses_input

texts = st.text(max_size=8)
arguments = st.one_of(
    st.dictionaries(
        texts, st.one_of(texts, st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.none(), st.lists(texts))
    ).map(json.dumps),
    texts,
)


@st.composite
def turns(draw):
    """Strategy for an assistant's message, and the next one: the results of its calls, or the user's answer."""
    made = draw(st.lists(arguments, max_size=3))
    number = draw(st.integers(0, 10**6))
    calls = [
        {"id": f"call_{number}_{k}", "type": "function", "function": {"name": f"f{k}", "arguments": args}}
        for k, args in enumerate(made)
    ]
    content = draw(texts)
    answer = {"role": "assistant", "content": content or (None if calls else "")}
    if thought := draw(texts):
        answer["reasoning_content"] = thought
    if calls:
        answer["tool_calls"] = calls
    results = [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in calls]
    return [answer, *(results or [{"role": "user", "content": draw(texts)}])]


conversations = st.tuples(texts, texts, st.lists(turns(), max_size=4))


def spoken(expected):
    """Return an assistant's message as an answer of the upstream."""
    return {"id": "msg_1", "choices": [{"index": 0, "message": expected, "finish_reason": "stop"}]}


def chat_of(system, first, made):
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": first}, *(message for turn in made for message in turn)]


def meant(conversation):
    """Return the messages with the arguments of calls parsed, as templates render them."""
    return json.loads(json.dumps(conversation), object_hook=_with_parsed_arguments)


def _with_parsed_arguments(value):
    if isinstance(value.get("arguments"), str):
        with suppress(ValueError):
            value["arguments"] = json.loads(value["arguments"] or "{}")
    return value


@given(conversations)
def test_message_round_trip_is_lossless(conversation):
    system, first, made = conversation
    sent = [{"role": "user", "content": first}]
    for expected, *follow in made:
        sent.append({"role": "assistant", "content": messages.from_chat(spoken(expected), {})["content"]})
        if follow[0]["role"] == "tool":
            blocks = [
                {"type": "tool_result", "tool_use_id": result["tool_call_id"], "content": result["content"]}
                for result in follow
            ]
            sent.append({"role": "user", "content": blocks})
        else:
            sent.append(follow[0])
    chat = messages.to_chat({"model": "m", "system": system, "messages": sent})
    assert meant(chat["messages"]) == meant(chat_of(system, first, made))


@given(conversations)
def test_response_round_trip_keeps_the_spelling_of_arguments(conversation):
    system, first, made = conversation
    items = [{"role": "user", "content": first}]
    for expected, *follow in made:
        items += responses.from_chat(spoken(expected), {})["output"]
        for message in follow:
            output = {
                "type": "function_call_output",
                "call_id": message.get("tool_call_id"),
                "output": message["content"],
            }
            items.append(output if message["role"] == "tool" else message)
    chat = responses_input.to_chat({"model": "m", "instructions": system, "input": items}, {})
    assert chat["messages"] == chat_of(system, first, made)
