"""Published chat templates by family, and their properties: a table as data.

`survey()` computes its rows by rendering and parsing; none is written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllm.parser.chat_template import ChatTemplate
from rllm.parser.template_shape import TOOLS
from rllm.parser.tool_parser import chosen_format, tool_format_of_template, tool_parser, unread_calls
from rllm.trainer.checkup import judged_turns

from .conftest import tokenizer_for

FAMILIES = {
    "Command A": ("axolotl/command_a_tool_use", "llama.cpp/Cohere2MoE"),
    "Command R, Aya": ("llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use", "trl/cohere", "trl/cohere2"),
    "DeepSeek R1": ("llama.cpp/llama-cpp-deepseek-r1", "trl/deepseek_r1_distill", "trl/deepseekv3"),
    "DeepSeek V3.1": ("llama.cpp/deepseek-ai-DeepSeek-V3.1",),
    "DeepSeek V3.2, V4": ("llama.cpp/deepseek-ai-DeepSeek-V3.2", "llama.cpp/deepseek-ai-DeepSeek-V4"),
    "Falcon-H1": ("axolotl/falcon_h1",),
    "Gemma 1, 2": ("trl/gemma", "llama.cpp/google-gemma-2-2b-it"),
    "Gemma 3": ("trl/gemma3", "axolotl/gemma3n"),
    "Gemma 4": (
        *("trl/gemma4", "trl/gemma4_v2", "trl/gemma4_v3", "trl/gemma4_v4", "trl/gemma4_v5"),
        *("llama.cpp/google-gemma-4-31B-it", "trl/diffusion_gemma"),
    ),
    "GLM 4.5 to 4.7": ("trl/glm4moe", "llama.cpp/GLM-4.6", "llama.cpp/GLM-4.7-Flash"),
    "gpt-oss": ("trl/gptoss", "llama.cpp/openai-gpt-oss-120b"),
    "Granite 3.3": ("llama.cpp/ibm-granite-granite-3.3-2B-Instruct",),
    "Granite 4": ("llama.cpp/ibm-granite-granite-4.0", "llama.cpp/ibm-granite-granite-4.1"),
    "Hunyuan": ("llama.cpp/tencent-Hy3",),
    "Kimi K2": ("llama.cpp/moonshotai-Kimi-K2", "llama.cpp/Kimi-K2-Thinking"),
    "LFM2, LFM2.5": (
        *("trl/lfm2", "trl/lfm2_v2", "trl/lfm2_2_5", "trl/lfm2_2_5_v2", "trl/lfm2_2_5_vl"),
        "llama.cpp/LFM2.5-8B-A1B",
    ),
    "Llama 3.0": ("trl/llama3",),
    "Llama 3.1 to 3.3": ("trl/llama3_1", "trl/llama3_2", "llama.cpp/meta-llama-Llama-3.3-70B-Instruct"),
    "Llama 4": ("axolotl/llama4",),
    "LLaVA-NeXT": ("trl/llava_next",),
    "MiniMax M2": ("llama.cpp/MiniMax-M2",),
    "Mistral, first tools": ("axolotl/mistral_v3_tekken", "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407"),
    "Mistral, 2025": (
        "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506",
        "llama.cpp/unsloth-mistral-Devstral-Small-2507",
        "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512",
    ),
    "Muse Glimmer": ("trl/muse_glimmer",),
    "Nemotron 3": (
        *("trl/nemotron_3_nano", "trl/nemotron_3_super", "trl/nemotron_3_ultra", "trl/nemotron_3_5_lightning"),
    ),
    "Phi 3, 3.5": ("trl/phi3", "trl/phi3_5"),
    "Phi 4": ("axolotl/phi_4",),
    "Qwen2.5": ("trl/qwen2_5", "trl/qwen2_5_vl"),
    "Qwen3": ("trl/qwen3", "trl/qwen3_instruct_2507", "trl/qwen3_vl"),
    "Qwen3-Coder": ("llama.cpp/Qwen3-Coder",),
    "Qwen3.5 to 3.8": ("trl/qwen3_5_think", "trl/qwen3_5_nothink", "trl/qwen3_6", "trl/qwen3_8"),
    "Seed-OSS": ("llama.cpp/ByteDance-Seed-OSS",),
    "SmolLM3": ("llama.cpp/HuggingFaceTB-SmolLM3-3B",),
    "SmolVLM, Idefics 3": ("trl/smolvlm", "trl/idefics3"),
}
"""Templates of each family, as `SOURCE/NAME` of the unpacked packages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One template of a family."""

    family: str
    template: str
    tool_format: str | None
    """Format in which the template prints tool calls; `None` if it prints none that are known."""
    reads_calls: bool
    """Calls with arguments of every kind are read as the template prints them."""
    exact_turns: bool
    """Later prompts begin with the earlier ones and the sampled tokens, in conversations of every kind."""
    reason: str
    """Reasons why calls or turns are not exact, and how the template by itself changes earlier turns."""


def row(family: str, name: str) -> Row:
    """Return the row of one template."""
    tokenizer = tokenizer_for(name)
    template = ChatTemplate(tokenizer)
    unread = unread_calls(template, tool_parser(chosen_format(None, template.text)))
    no_tools = ["the chat template prints no tools"] if TOOLS in template.shape.lost else []
    turns = {
        kind: judged for kind, judged in judged_turns(template, tokenizer).items() if kind not in template.shape.lost
    }
    changes = dict.fromkeys(judged.why for judged in turns.values() if judged.why)
    return Row(
        family=family,
        template=name,
        tool_format=tool_format_of_template(template.text),
        reads_calls=not unread,
        exact_turns=all(judged.continued for judged in turns.values()),
        reason="; ".join([*no_tools, *filter(None, [unread]), *changes]),
    )


def survey() -> list[Row]:
    """Return the rows of all templates."""
    return [row(family, name) for family, names in FAMILIES.items() for name in names]
