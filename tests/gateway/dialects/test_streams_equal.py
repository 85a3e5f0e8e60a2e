"""A streamed answer gives the client exactly the content of an unstreamed one, in pieces of any size."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from rllm.capture import ChatStream, SSEDecoder
from rllm.gateway.dialects import chat, messages, responses
from rllm.gateway.dialects.chat import CompletionsStreamEncoder
from rllm.gateway.dialects.messages import MessagesStreamEncoder
from rllm.gateway.dialects.responses import ResponsesStreamEncoder

HEAD = {"object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
texts = st.text(alphabet=st.sampled_from('aé "\\{}\n\u2028'), max_size=6)
arguments = st.one_of(st.sampled_from(["{}", "", "[1]", '{"a": 1, "b": {"c": [1.0]}}', '{"a": ']), texts)
calls = st.lists(st.tuples(st.sampled_from(["add", "patch"]), arguments), max_size=3)


@st.composite
def pieces_of(draw, text):
    """Strategy for the text cut anywhere; some pieces may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def streams(draw):
    """Strategy for the chunks of one answer, in batches as the network may deliver them."""
    deltas = [{"role": "assistant", "content": ""}]
    text = draw(st.sampled_from(["content", "refusal"]))
    for name in ("reasoning_content", text):
        if draw(st.booleans()):
            deltas += [{name: piece} for piece in draw(pieces_of(draw(texts)))]
    made = draw(calls) if text == "content" else []
    for index, (name, args) in enumerate(made):
        first, *rest = draw(pieces_of(args))
        call = {"index": index, "id": f"call_{index}", "type": "function"}
        deltas.append({"tool_calls": [{**call, "function": {"name": name, "arguments": first}}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in rest]
    chunks = [choice_chunk(delta) for delta in deltas]
    reason = draw(st.sampled_from(["stop", "length", "content_filter", "tool_calls" if made else "stop"]))
    if draw(st.booleans()):
        chunks[-1]["choices"][0]["finish_reason"] = reason
    else:
        chunks.append(choice_chunk({}, reason))
    chunks.append({**HEAD, "choices": [], "usage": USAGE})
    size = draw(st.integers(1, len(chunks)))
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]


def choice_chunk(delta, reason=None):
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs_of(delta), "finish_reason": reason}]}


def logprobs_of(delta):
    """Return one token for each character, and one without text before a call or the end."""
    shown = [delta[name] for name in ("reasoning_content", "content", "refusal") if delta.get(name)]
    tokens = shown if delta.keys() & {"reasoning_content", "content", "refusal"} else ["<|special|>"]
    return {"content": [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in tokens]}


def streamed(encoder, batches, call_id):
    """Return the events that a client gets, and the whole answer that the gateway captured."""
    captured = ChatStream()
    sent = b""
    for batch in batches:
        for chunk in batch:
            chunk["id"] = call_id
            captured.feed(chunk)
        sent += encoder.feed(batch)
    sent += encoder.finish(captured.response())
    payloads = SSEDecoder().feed(sent)
    return [orjson.loads(payload) for payload in payloads if payload != b"[DONE]"], captured.response()


def message_of(events):
    """Return the message that Anthropic's clients assemble."""
    message, open_block, partial = None, None, ""
    for event in events:
        match event["type"]:
            case "message_start":
                assert message is None
                message = event["message"]
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block, partial = event["content_block"], ""
                message["content"].append(open_block)
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    open_block[name] += delta[name]
            case "content_block_stop":
                if open_block["type"] == "tool_use":
                    open_block["input"] = orjson.loads(partial)
                open_block = None
            case "message_delta":
                assert open_block is None
                message = {**message, **event["delta"], "usage": event["usage"]}
    assert events[-1]["type"] == "message_stop"
    return message


@given(streams())
def test_streamed_message_equals_the_whole_message(batches):
    events, response = streamed(MessagesStreamEncoder({}), batches, "msg_1")
    whole = messages.from_chat(response, {})
    built = message_of(events)
    assert built == whole


def response_of(events):
    """Return the response that OpenAI's clients assemble, which is compared with the last event."""
    items, ended = {}, {}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[2:-1]:
        at = event["output_index"]
        assert at not in ended, "an item that has ended was changed"
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert at == len(items)
                items[at] = orjson.loads(orjson.dumps(event["item"]))
            case "content_part.added":
                assert event["content_index"] == len(items[at]["content"])
                items[at]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                items[at]["content"][event["content_index"]]["text"] += event["delta"]
            case "refusal.delta":
                items[at]["content"][event["content_index"]]["refusal"] += event["delta"]
            case "function_call_arguments.delta":
                items[at]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[at]["input"] += event["delta"]
            case "output_item.done":
                final_fields = {name: event["item"].get(name) for name in ("status", "encrypted_content")}
                assert {**items[at], **final_fields} == {**final_fields, **event["item"]}
                ended[at] = event["item"]
    return [ended[at] for at in range(len(items))]


@given(streams())
def test_streamed_response_equals_the_whole_response(batches):
    asked = {"tools": [{"type": "custom", "name": "patch"}, {"type": "function", "name": "add"}]}
    events, response = streamed(ResponsesStreamEncoder(asked), batches, "resp_1")
    whole = responses.from_chat(response, asked)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert {**last, "completed_at": 0} == {**whole, "completed_at": 0, "created_at": last["created_at"]}
    assert [without_status(item) for item in response_of(events)] == [without_status(item) for item in whole["output"]]


def without_status(item):
    return {name: value for name, value in item.items() if name != "status"}


@given(streams())
def test_streamed_completion_equals_the_whole_completion(batches):
    asked = {"prompt": "p", "stream_options": {"include_usage": True}}
    events, response = streamed(CompletionsStreamEncoder(asked), batches, "cmpl-1")
    [choice] = chat.completion_from_chat(response, asked)["choices"]
    found = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(piece["text"] for piece in found) == choice["text"]
    assert [piece["finish_reason"] for piece in found][-1] == choice["finish_reason"]
    assert events[-1]["usage"] == USAGE
