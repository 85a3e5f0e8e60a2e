"""Conversations through a gateway, with a model that writes in the format of each family's template.

The choice of tokens is scripted; the chat template, the reader of answers, the sampler's stops and the capture are real.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch

from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.inference.local import LocalEngine
from rllm.parser.chat_template import ChatTemplate
from rllm.store.memory import MemoryTraceStore
from rllm.types import Message

from ..inference.conftest import build_model
from .calls import QUESTION, TOOLS
from .conftest import template_folder, tokenizer_for
from .test_conversations import sampled

pytestmark = pytest.mark.models

NAMES = [
    "trl/qwen3",
    "trl/qwen3_5_think",
    "trl/gptoss",
    "trl/gemma4",
    "trl/glm4moe",
    "trl/llama3_1",
    "llama.cpp/deepseek-ai-DeepSeek-V3.2",
    "llama.cpp/moonshotai-Kimi-K2",
    "llama.cpp/tencent-Hy3",
    "llama.cpp/unsloth-mistral-Devstral-Small-2507",
]
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": '{"text": "a"}'}}
    ],
}
SCRIPT: list[Message] = [
    QUESTION,
    CALL,
    {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "4"},
    {"role": "assistant", "content": "It is 4 🎉,\nso yes."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


class ScriptedTokens(LocalEngine):
    """Embedded engine whose test sets the tokens of the next answer."""

    def __init__(self, name: str) -> None:
        tokenizer = tokenizer_for(name)
        model = build_model("Qwen3", len(tokenizer), num_hidden_layers=1, max_position_embeddings=32_768)
        ends = [sampled(ChatTemplate(tokenizer), answer, TOOLS)[-1] for answer in (CALL, SCRIPT[-1])]
        model.generation_config.eos_token_id = ends  # as published models name both
        super().__init__(model, tokenizer)
        self.answer: list[int] = []
        self._scheduler._sampled = self._given  # type: ignore[method-assign]

    def _given(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        [request] = self._scheduler._live
        return [self.answer[len(request.completion_ids)]], [-1.0]


@pytest.mark.parametrize("name", NAMES)
def test_later_prompts_begin_with_the_captured_tokens(name: str) -> None:
    if template_folder() is None:
        pytest.skip("run `make test-models`")
    template = ChatTemplate(tokenizer_for(name))
    engine, store = ScriptedTokens(name), MemoryTraceStore()
    known: list[int] = []
    messages: list[Message] = []
    with GatewayServer(store, EngineUpstream(engine, "policy"), GatewayConfig()) as server:
        url = f"{server.session_url('s')}/chat/completions"
        for message in SCRIPT:
            if message["role"] != "assistant":
                messages.append(message)
                continue
            engine.answer = sampled(template, message, TOOLS)
            body: dict[str, Any] = {"model": "m", "messages": messages, "tools": TOOLS}
            answer = httpx.post(url, json={**body, "max_tokens": len(engine.answer)}, verify=False, timeout=60)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in message else "stop")
            messages.append(choice["message"])
            trace = store.by_session("s")[-1]
            assert trace.prompt_ids[: len(known)] == known
            assert trace.response_ids == engine.answer
            known = [*trace.prompt_ids, *trace.response_ids]
    engine.close()
