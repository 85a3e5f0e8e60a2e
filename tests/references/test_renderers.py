"""Calls rendered by chat templates are parsed alike by our formats and by the parsers of `renderers`, which read tokens."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from rllm.parser.answer import AnswerReader
from rllm.parser.decoding import TextDecoder
from rllm.parser.tool_parser import chosen_format, tool_parser

from ..models.calls import TOOLS, PrintedCalls, printed_calls, template_with_calls
from ..models.conftest import tokenizer_for

pytestmark = pytest.mark.references

RENDERERS = {
    "trl/qwen2_5": "qwen3",
    "trl/qwen3": "qwen3",
    "trl/qwen3_instruct_2507": "qwen3",
    "trl/qwen3_5_think": "qwen3.5",
    "trl/qwen3_6": "qwen3.6",
    "trl/qwen3_8": "qwen3.8",
    "trl/nemotron_3_nano": "nemotron-3",
    "trl/nemotron_3_5_lightning": "nemotron-3.5",
    "trl/gemma4": "gemma4",
    "llama.cpp/google-gemma-4-31B-it": "gemma4",
    "llama.cpp/GLM-4.6": "glm-4.5",
    "llama.cpp/GLM-4.7-Flash": "glm-5",
    "llama.cpp/MiniMax-M2": "minimax-m2",
    "trl/deepseekv3": "deepseek-v3",
    "trl/deepseek_r1_distill": "deepseek-r1",
    "llama.cpp/deepseek-ai-DeepSeek-V4": "deepseek-v4",
    "llama.cpp/tencent-Hy3": "hy3",
    "llama.cpp/moonshotai-Kimi-K2": "kimi-k2",
    "trl/llama3_1": "llama-3",
    "trl/llama3_2": "llama-3",
    "trl/gptoss": "gpt-oss",
    "llama.cpp/openai-gpt-oss-120b": "gpt-oss",
}
"""Renderers by the template whose calls they read."""
DIFFER = {
    "trl/qwen3_5_think": "takes True, False and None, which the template prints, as text and so the call as malformed",
    "trl/gemma4": "takes None, which the template prints for null, as text",
    "llama.cpp/google-gemma-4-31B-it": "as for Gemma 4 above",
    "trl/nemotron_3_nano": "as for Qwen3.5",
    "trl/nemotron_3_5_lightning": "as for Qwen3.5",
}
"""Templates of which `renderers` parses some calls differently from the rendered ones."""
TOKENS = (
    *("<bos>", "<eos>", "<|endoftext|>", "<think>", "</think>", "<|image>", "<|image|>", "<image|>", "<|im_start|>"),
    *("<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("]~!b[", "<minimax:tool_call>", "</minimax:tool_call>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"),
    *(
        "<|vision_end|>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<|eom_id|>",
    ),
    *("<｜latest_reminder｜>", "<｜action｜>", "<｜authority｜>", "<｜domain｜>", "<｜query｜>", "<｜read_url｜>"),
    *("<｜title｜>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|return|>", "<|call|>", "<|constrain|>"),
    *("<｜hy_begin_of_sentence:opensource｜>", "<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>"),
    *("<｜reasoning_mode:opensource｜>", "<tool_responses:opensource>", "</tool_responses:opensource>"),
    *("<tool_response:opensource>", "</tool_response:opensource>", "<|end|>", "｜DSML｜"),
)
"""Tokens that a renderer asks for, whether or not a template prints them."""


def renderer_for(name: str) -> Any:
    """Return the parse method of the template's renderer."""
    tokenizer = tokenizer_for(name, *TOKENS)
    if RENDERERS[name] == "gpt-oss":  # the renderer itself downloads a vocabulary; its parser does not
        names = ("return", "call", "start", "end", "channel", "message", "constrain")
        ids = {f"{mark}_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for mark in names}
        before = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
        parse = importlib.import_module("renderers.parsing").parse_gpt_oss
        return lambda answer, **_: parse(tokenizer, [*before, *answer], **ids)
    config = importlib.import_module("renderers").config_from_name(RENDERERS[name])
    return importlib.import_module("renderers").create_renderer(tokenizer, config).parse_response


def read_by_renderer(name: str, printed: PrintedCalls) -> list[tuple[str, Any]]:
    """Return the well-formed calls that the template's renderer reads."""
    known, tokenizer = tokenizer_for(name), tokenizer_for(name, *TOKENS)
    ids, prompt_ids = (
        tokenizer.encode(known.decode(part), add_special_tokens=False) for part in (printed.ids, printed.prompt_ids)
    )
    calls = renderer_for(name)(ids, tools=TOOLS, prompt_ids=prompt_ids).tool_calls
    good = [call for call in calls if call.status == "ok"]
    return [
        (call.name, json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments) for call in good
    ]


def read(name: str, printed: PrintedCalls) -> list[tuple[str, Any]]:
    """Return the calls that we read."""
    template = template_with_calls(name)
    format_ = tool_parser(chosen_format(None, template.text))
    decoder = TextDecoder(template.tokenizer, markup=format_.markup)
    reader = AnswerReader(decoder, prompt_ids=printed.prompt_ids, stop=(), tool_parser=format_.for_tools(TOOLS))
    calls = [call["function"] for call in reader.read(printed.ids).tool_calls]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("name", RENDERERS)
def test_calls_are_parsed_alike(name: str) -> None:
    template_with_calls(name)
    answers = list(printed_calls(name, 8))
    assert [read(name, printed) for printed in answers] == [printed.calls for printed in answers]
    others = [read_by_renderer(name, printed) for printed in answers]
    assert (others != [printed.calls for printed in answers]) == (name in DIFFER)
