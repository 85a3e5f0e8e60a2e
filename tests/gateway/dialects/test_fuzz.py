"""Any JSON that a client sends is translated, or rejected with a 400."""

from contextlib import suppress

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rllm.gateway.dialects import DIALECTS
from rllm.gateway.errors import GatewayError

WORDS = (
    "messages input prompt system instructions role content type text source data media_type url tools name parameters "
    "input_schema tool_choice mode output_config format schema thinking reasoning effort summary include tool_use_id id "
    "call_id arguments output image_url file previous_response_id stop_sequences stop n stream logprobs echo best_of thread "
    "contents parts systemInstruction functionDeclarations functionCall functionResponse args response inlineData mimeType "
    "toolConfig functionCallingConfig allowedFunctionNames generationConfig responseSchema responseMimeType thought"
).split()
VALUES = (
    "user assistant system developer tool text image document tool_use tool_result thinking message reasoning function_call "
    "function_call_output custom_tool_call item_reference input_text input_image input_file function custom namespace "
    "allowed_tools json_schema base64 url auto any none required "
).split()
scalars = st.one_of(st.sampled_from(VALUES), st.text(max_size=2), st.none(), st.booleans(), st.integers(-2, 3))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, min_size=1, max_size=4)
    ),
    max_leaves=12,
)
HI = {
    "messages": [{"role": "user", "content": "hi"}],
    "input": "hi",
    "prompt": "hi",
    "contents": [{"parts": [{"text": "hi"}]}],
}
requests = st.dictionaries(st.sampled_from(WORDS), values, max_size=5)
ANSWER = {
    "id": "resp_1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.wire.name)
@example({**HI, "toolConfig": {"functionCallingConfig": {"mode": ["ANY"]}}})
@given(st.one_of(requests, requests.map(lambda request: {**HI, **request})))
def test_any_json_is_translated_or_rejected(dialect, request):
    with suppress(GatewayError):
        path = {"template": dialect.wire.calls[0], "query": "", "model": "m"}
        asked = dialect.parse(orjson.dumps(request), path)
        dialect.refers_to(asked)
        chat = dialect.to_chat(asked, {})
        assert all(isinstance(message["role"], str) for message in chat["messages"])
        dialect.trace_metadata(asked)
        dialect.render(orjson.loads(orjson.dumps(ANSWER)), asked=asked)
        encoder = dialect.encoder(asked=asked)
        encoder.feed([{"id": "resp_1", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}])
        encoder.finish(ANSWER)
