"""Chat templates like those of six families, reduced to their difficult parts, on one small tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rllm.parser import ChatTemplateParser
from rllm.testing.tiny_policy import train_tokenizer

from ..inference.conftest import build_tokenizer

ONE_CALL = """{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments if c.function.arguments is string \
else c.function.arguments | tojson }}}"""

TEMPLATES = {
    # Strips the reasoning of answers before the last user message; merges consecutive tool results into one turn.
    "qwen": """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{ "<|im_start|>system\n" + tools | tojson + "<|im_end|>\n" }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{ "<|im_start|>user" }}{%- endif -%}
{{ "\n<tool_response>\n" + m.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{ "<|im_end|>\n" }}{%- endif -%}
{%- elif m.role == "assistant" -%}
{%- set content = m.content -%}{%- set thought = m.reasoning_content or "" -%}
{%- if "</think>" in content -%}
{%- set thought = content.split("</think>")[0].split("<think>")[-1].strip("\n") -%}
{%- set content = content.split("</think>")[-1].lstrip("\n") -%}
{%- endif -%}
{{ "<|im_start|>assistant\n" }}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}{{ "<think>\n" + thought + "\n</think>\n\n" }}{%- endif -%}
{{ content }}
{%- for c in m.tool_calls or [] -%}
{%- if content or not loop.first -%}{{ "\n" }}{%- endif -%}
{{ "<tool_call>\n" }}%CALL%{{ "\n</tool_call>" }}
{%- endfor -%}
{{ "<|im_end|>\n" }}
{%- else -%}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "<|im_start|>assistant\n" }}{%- if enable_thinking is false -%}{{ "<think>\n\n</think>\n\n" }}{%- endif -%}
{%- endif -%}""".replace("%CALL%", ONE_CALL.replace("KEY", "arguments")),
    # Prints each argument of a call as bare text between its own tags.
    "qwen3_coder": """\
{%- if tools -%}{{ "<|im_start|>system\n" + tools | tojson + "<|im_end|>\n" }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{ "<|im_start|>user\n" }}{%- endif -%}
{{ "<tool_response>\n" + m.content + "\n</tool_response>\n" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{ "<|im_end|>\n" }}{%- endif -%}
{%- elif m.role == "assistant" and m.tool_calls -%}
{{ "<|im_start|>assistant\n" }}{%- if m.content | trim -%}{{ m.content | trim + "\n\n" }}{%- endif -%}
{%- for c in m.tool_calls -%}
{{ ("" if loop.first else "\n") + "<tool_call>\n<function=" + c.function.name + ">\n" }}
{%- for key, value in c.function.arguments | items -%}
{{ "<parameter=" + key + ">\n" }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string -}}
{{ "\n</parameter>\n" }}
{%- endfor -%}
{{ "</function>\n</tool_call>" }}
{%- endfor -%}
{{ "<|im_end|>\n" }}
{%- else -%}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}""",
    # Has no reasoning; prints calls instead of the content; begins with its own token.
    "llama3": """\
{{- "<|begin_of_text|>" -}}
{%- for m in messages -%}
{%- set role = "ipython" if m.role == "tool" else m.role -%}
{{ "<|start_header_id|>" + role + "<|end_header_id|>\n\n" }}
{%- for c in m.tool_calls or [] -%}{{ "; " if not loop.first }}%CALL%{%- else -%}{{ m.content | trim }}{%- endfor -%}
{{ "<|eot_id|>" }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{%- endif -%}\
{#- <|python_tag|> -#}""".replace("%CALL%", ONE_CALL.replace("KEY", "parameters")),
    # Puts the system prompt into the last user's turn; has no header for answers; requires alternating turns.
    "mistral": """\
{{- "<s>" -}}
{%- set system = messages[0].content if messages[0].role == "system" else "" -%}
{%- set chat = messages[1:] if messages[0].role == "system" else messages -%}
{%- set ns = namespace(last=-1, asked=false) -%}
{%- for m in chat -%}
{%- if m.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- if m.role in ("user", "assistant") and not m.tool_calls -%}
{%- if (m.role == "user") == ns.asked -%}{{ raise_exception("roles must alternate") }}{%- endif -%}
{%- set ns.asked = m.role == "user" -%}
{%- elif m.role == "system" -%}{{ raise_exception("one system prompt, and first") }}
{%- endif -%}
{%- endfor -%}
{%- for m in chat -%}
{%- if m.role == "user" -%}
{{ "[INST]" + (system + "\n\n" if system and loop.index0 == ns.last else "") + m.content + "[/INST]" }}
{%- elif m.role == "tool" -%}{{ "[TOOL_RESULTS]" + m.content + "[/TOOL_RESULTS]" }}
{%- elif m.tool_calls -%}
{{ "[TOOL_CALLS][" }}{%- for c in m.tool_calls -%}{{ ", " if not loop.first }}%CALL%{%- endfor -%}{{ "]</s>" }}
{%- else -%}{{ " " + m.content + "</s>" }}
{%- endif -%}
{%- endfor -%}""".replace("%CALL%", ONE_CALL.replace("KEY", "arguments")),
    # Opens an answer with <think> and prints none of it; collects system prompts; closes tools' answers late.
    "deepseek": """\
{{- "<bos>" -}}
{%- for m in messages -%}{%- if m.role == "system" -%}{{ m.content }}{%- endif -%}{%- endfor -%}
{%- set ns = namespace(tool=false) -%}
{%- for m in messages -%}
{%- if m.role == "tool" -%}
{{ ("" if ns.tool else "<｜tool▁outputs▁begin｜>") + m.content + "\n" }}{%- set ns.tool = true -%}
{%- else -%}
{%- if ns.tool -%}{{ "<｜tool▁outputs▁end｜>" }}{%- endif -%}
{%- if m.role == "user" -%}{{ "<｜User｜>" + m.content }}
{%- elif m.role == "assistant" -%}
{{ ("" if ns.tool else "<｜Assistant｜>") + m.content.split("</think>")[-1].lstrip("\n") }}
{%- if m.tool_calls -%}
{{ "<｜tool▁calls▁begin｜>" }}
{%- for c in m.tool_calls -%}
{{ "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + c.function.name + "\n```json\n" }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson -}}
{{ "\n```<｜tool▁call▁end｜>" }}
{%- endfor -%}
{{ "<｜tool▁calls▁end｜>" }}
{%- endif -%}
{{ "<eos>" }}
{%- endif -%}
{%- set ns.tool = false -%}
{%- endif -%}
{%- endfor -%}
{%- if ns.tool -%}{{ "<｜tool▁outputs▁end｜>" }}{%- endif -%}
{%- if add_generation_prompt and not ns.tool -%}{{ "<｜Assistant｜><think>\n" }}{%- endif -%}""",
    # Closes a conversation with its own token, unless it asks for an answer.
    "phi": """\
{%- for m in messages -%}
{{ "<|" + m.role + "|>\n" + m.content }}
{%- for c in m.tool_calls or [] -%}{{ "<tool_call>\n" }}%CALL%{{ "\n</tool_call>" }}{%- endfor -%}
{{ "<|end|>\n" }}
{%- endfor -%}
{{ "<|assistant|>\n" if add_generation_prompt else "<eos>" }}""".replace(
        "%CALL%", ONE_CALL.replace("KEY", "arguments")
    ),
    # Ends the last turn with a different token; has a channel for the reasoning of the last answer.
    "harmony": """\
{{- "<|start|>system<|message|>You think first.<|end|>" -}}
{%- set ns = namespace(final=-1, called="") -%}
{%- for m in messages -%}
{%- if m.role == "assistant" and not m.tool_calls -%}{%- set ns.final = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == "assistant" -%}
{%- if m.thinking and (loop.index0 > ns.final if m.tool_calls else loop.last and not add_generation_prompt) -%}
{{ "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}
{%- endif -%}
{%- if m.tool_calls -%}
{%- if m.content -%}{{ "<|start|>assistant<|channel|>commentary<|message|>" + m.content + "<|end|>" }}{%- endif -%}
{%- for c in m.tool_calls -%}
{%- set ns.called = c.function.name -%}
{{ "<|start|>assistant<|channel|>commentary to=functions." + c.function.name + " <|constrain|>json<|message|>" }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson -}}
{{ "<|call|>" }}
{%- endfor -%}
{%- else -%}
{{ "<|start|>assistant<|channel|>final<|message|>" + m.content + ("<|return|>" if loop.last and not add_generation_prompt else "<|end|>") }}
{%- endif -%}
{%- elif m.role == "tool" -%}
{{ "<|start|>functions." + ns.called + " to=assistant<|channel|>commentary<|message|>" + m.content + "<|end|>" }}
{%- else -%}{{ "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|start|>assistant" }}{%- endif -%}""",
}

SPECIAL_TOKENS = """
<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <s> </s> [INST] [/INST] [TOOL_CALLS] <bos> <eos>
<｜User｜> <｜Assistant｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <|start|> <|channel|> <|message|> <|constrain|> <|end|> <|call|>
<|return|> <|system|> <|user|> <|assistant|> <|tool|>
""".split()


@cache
def _trained() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(["the user asks the assistant, and the assistant answers\n"] * 4, vocab_size=320)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


@cache
def _parser(template: str, disable_thinking: bool) -> ChatTemplateParser:
    tokenizer = deepcopy(_trained())
    tokenizer.chat_template = template
    return ChatTemplateParser.get_parser(tokenizer, disable_thinking=disable_thinking)


@pytest.fixture(scope="session")
def parser_of() -> Callable[..., ChatTemplateParser]:
    """The parser for a family's template, or for a template's text."""

    def make(template: str, *, disable_thinking: bool = False) -> ChatTemplateParser:
        return _parser(TEMPLATES.get(template, template), disable_thinking)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a ChatML template."""
    return build_tokenizer()
