"""Every field that clients document is applied, rejected, or named in the header of the answer.

python -m tests.gateway.test_parameters    writes the tables of docs/parameters.md
"""

from __future__ import annotations

import inspect
import logging
import re
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Union

import anthropic as anthropic_errors
import anthropic.types.beta as anthropic_types
import httpx
import openai.types.chat as chat_types
import openai.types.responses as responses_types
import pytest
from anthropic import Anthropic
from anthropic.types import message_create_params as messages_params
from anthropic.types.beta import message_create_params as beta_params
from openai import BadRequestError, DefaultHttpxClient, OpenAI
from openai.types import completion_create_params as completions_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel

from rllm.gateway.config import GatewayConfig
from rllm.gateway.dialects import DIALECTS
from rllm.gateway.dialects.chat import ChatDialect
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream, HTTPUpstream
from rllm.inference import parameters
from rllm.inference.local import LocalEngine, scheduler
from rllm.inference.parameters import HONOURED, NAMED, NO_EFFECT, REFUSED, field_of
from rllm.store.memory import MemoryTraceStore

from ..inference.conftest import build_model, build_tokenizer

TABLES = {dialect.wire.name: dialect.parameters for dialect in DIALECTS}
PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"
HEADER = "x-rllm-ignored"
USER = {"role": "user", "content": "the user asks the assistant"}
ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "google": "/v1beta/models/m:generateContent",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "max_tokens": 2},
    "completions": {"prompt": "the user asks", "max_tokens": 2},
    "responses": {"input": "the user asks", "max_output_tokens": 2},
    "messages": {"messages": [USER], "max_tokens": 2},
    "google": {
        "contents": [{"role": "user", "parts": [{"text": "the user asks"}]}],
        "generationConfig": {"maxOutputTokens": 2},
    },
}


def rows(dialect: str) -> Iterator[parameters.Row]:
    """Return the rows of a dialect, each with its treatments by the embedded engine and by a server."""
    for row in TABLES[dialect].rows.values():
        if dialect == "chat":
            forwarded = "translated" if row.key == "tool_choice[allowed_tools]" else parameters.PASSED_ON
            yield parameters.Row(key=row.key, fates=(*row.fates, forwarded), remark=row.remark)
            continue
        embedded, forwarded = row.fates
        source = parameters.CHAT.rows[embedded[1:]] if embedded.startswith("=") else None
        forwarded = parameters.PASSED_ON if forwarded.startswith("=") else forwarded
        remark = row.remark or (source.remark if source else "")
        yield parameters.Row(key=row.key, fates=(source.fates[0] if source else embedded, forwarded), remark=remark)


# All fields

PARAMS: dict[str, list[Any]] = {
    "chat": [chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming],
    "completions": [completions_params.CompletionCreateParamsNonStreaming],
    "responses": [responses_params.ResponseCreateParamsNonStreaming],
    "messages": [messages_params.MessageCreateParamsNonStreaming, beta_params.MessageCreateParamsNonStreaming],
}
CONTENTS: dict[str, Any] = {
    "chat": chat_types.ChatCompletionContentPartParam,
    "responses": responses_types.ResponseInputContentParam,
    "messages": anthropic_types.BetaContentBlockParam,
}
WITH_KINDS = {"tools", "tool_choice", "response_format", "include", "truncation", "modalities", "thinking", "input"}
WITH_MEMBERS = {"stream_options", "reasoning", "text", "output_config", "tool_choice", "thinking"}
TOOLS: dict[str, list[Any]] = {
    "chat": [FunctionDefinition],
    "responses": [responses_types.FunctionToolParam, responses_types.CustomToolParam],
    "messages": [anthropic_types.BetaToolParam],
}
OF_EVERY_TOOL = {"type", "name", "description", "parameters", "input_schema"}


def leaves(hint: Any) -> Iterator[Any]:
    """Yield the literals and classes of a type."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        yield from typing.get_args(hint)
    elif origin in (Union, types.UnionType) or (origin is not None and origin is not dict):
        for inner in typing.get_args(hint):
            yield from leaves(inner)
    else:
        yield hint


def kinds(hint: Any) -> Iterator[str]:
    for leaf in leaves(hint):
        if isinstance(leaf, str):
            yield leaf
        elif typing.is_typeddict(leaf):
            members = typing.get_type_hints(leaf)
            yield from (kind for kind in leaves(members.get("type", str)) if isinstance(kind, str))


def documented(dialect: str) -> Iterator[str]:
    """Return the keys of all fields of the clients' types."""
    if dialect == "google":
        yield from documented_by_google()
        return
    for params in PARAMS[dialect]:
        for name, hint in typing.get_type_hints(params).items():
            yield name
            if name in WITH_KINDS:
                yield from (f"{name}[{parameters._DATE.sub('', kind)}]" for kind in kinds(hint))
            if name in WITH_MEMBERS:
                described = [leaf for leaf in leaves(hint) if typing.is_typeddict(leaf)]
                members = {member: typ for each in described for member, typ in typing.get_type_hints(each).items()}
                for member, inner in members.items():
                    if name != "tool_choice":
                        yield f"{name}.{member}"
                    if member == "format" and dialect == "responses":
                        yield from (f"{name}.{member}[{kind}]" for kind in kinds(inner))
    yield from (f"content[{kind}]" for kind in kinds(CONTENTS.get(dialect, str)))
    for tool in TOOLS.get(dialect, ()):
        yield from (f"tools[].{member}" for member in sorted(typing.get_type_hints(tool).keys() - OF_EVERY_TOOL))


def documented_by_google() -> Iterator[str]:
    types = pytest.importorskip("google.genai.types")
    converters = pytest.importorskip("google.genai.models")

    def fields_of(kind: Any, converter: str) -> Iterator[str]:
        """Yield the fields that the client sends to this API, and not only to Google's cloud."""
        source = inspect.getsource(getattr(converters, converter))
        for name in kind.model_fields:
            camel = name.split("_")[0] + "".join(part.title() for part in name.split("_")[1:])
            if re.search(rf"setv\(\s*\w+,\s*\['{camel}'\]", source):
                yield camel

    beside = {
        "systemInstruction",
        "tools",
        "toolConfig",
        "safetySettings",
        "cachedContent",
        "labels",
        "serviceTier",
        "store",
    }
    yield from ("contents", "model")
    for name in fields_of(types.GenerateContentConfig, "_GenerateContentConfig_to_mldev"):
        yield name if name in beside else f"generationConfig.{name}"
    yield from (f"tools[].{name}" for name in fields_of(types.Tool, "_Tool_to_mldev"))
    yield from (f"toolConfig.{name}" for name in fields_of(types.ToolConfig, "_ToolConfig_to_mldev"))
    yield from (f"content[{name}]" for name in fields_of(types.Part, "_Part_to_mldev"))


@pytest.mark.parametrize("dialect", TABLES)
def test_every_field_documented_by_a_client_has_a_treatment(dialect: str) -> None:
    table = TABLES[dialect]
    keys = set(documented(dialect))
    assert len(keys) >= (len(typing.get_type_hints(PARAMS[dialect][0])) if dialect in PARAMS else 30)
    assert sorted(key for key in keys if table.row_of(key) is None) == []


@pytest.mark.parametrize("dialect", TABLES)
def test_every_row_names_existing_treatments(dialect: str) -> None:
    for row in rows(dialect):
        embedded, forwarded = row.fates
        assert embedded in (HONOURED, NO_EFFECT, NAMED, REFUSED), row
        assert re.fullmatch(r"honoured|no effect|named|refused|translated|passed on( as \w+)?", forwarded), row
        assert row.remark or embedded != REFUSED, f"{row.key} is refused without a remedy"


# Treatment of fields

CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "run"}
INPUT_TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}
PNG = "data:image/png;base64,iVBORw0KGgo="
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TURN = {"role": "user", "content": "hi"}
ITEM = {"type": "message", "role": "user", "content": "hi"}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM_ITEM = {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_KEY = object()
"""Examples for fields that refer to an earlier answer, which other tests send."""


def message_of(*parts: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [TURN, {"role": "assistant", "content": "a"}, {"role": role, "content": [*parts], **more}]}


def item(*items: Any) -> dict[str, Any]:
    return {"input": [ITEM, *items]}


DECLARATIONS = {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}


def google_turn(*parts: Any, answer: Any = {"text": "hi"}) -> dict[str, Any]:  # noqa: B006
    turns = [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [*parts]}]
    return {"contents": [*turns, {"role": "user", "parts": [answer]}]}


SHARED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "stream": {"stream": False},
    "model": {"model": "any"},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "n": {"n": 2},
    "seed": {"seed": 1},
    "stop": {"stop": ["\n"]},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": 1}},
    "stream_options": {"stream_options": {}},
    "stream_options.include_usage": {"stream_options": {"include_usage": True}},
    "stream_options.include_obfuscation": {"stream_options": {"include_obfuscation": False}},
    "user": {"user": "u"},
    "metadata": {"metadata": {"user_id": "u"}},
    "max_tokens": {"max_tokens": 3},
    "store": {"store": True},
    "service_tier": {"service_tier": "auto"},
}
SAMPLES: dict[str, dict[str, Any]] = {
    "chat": {
        "logprobs": {"logprobs": True},
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 2},
        **{
            f"messages[{role}]": {"messages": [{"role": role, "content": "x"}, TURN]}
            for role in ("system", "developer")
        },
        "messages": {},
        "messages[user]": {},
        "messages[assistant]": {"messages": [TURN, {"role": "assistant", "content": "a"}, TURN]},
        "messages[tool]": {
            "messages": [
                TURN,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ]
        },
        "messages[function]": {"messages": [TURN, {"role": "function", "name": "f", "content": "r"}]},
        "content[text]": message_of({"type": "text", "text": "x"}),
        "content[refusal]": {
            "messages": [TURN, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, TURN]
        },
        "content[image_url]": message_of({"type": "image_url", "image_url": {"url": PNG}}),
        "content[input_audio]": message_of({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        "content[file]": message_of({"type": "file", "file": {"file_data": "", "filename": "a.pdf"}}),
        "tools": {"tools": [CHAT_TOOL]},
        "tools[function]": {"tools": [CHAT_TOOL]},
        "tools[custom]": {"tools": [{"type": "custom", "custom": {"name": "run"}}]},
        "tools[*]": {"tools": [{"type": "web_search"}]},
        "tools[].strict": {"tools": [{"type": "function", "function": {**CHAT_TOOL["function"], "strict": True}}]},
        "tool_choice": {"tools": [CHAT_TOOL], "tool_choice": "auto"},
        **{
            f"tool_choice[{kind}]": {"tools": [CHAT_TOOL], "tool_choice": kind} for kind in ("auto", "none", "required")
        },
        "tool_choice[function]": {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice[custom]": {
            "tools": [{"type": "custom", "custom": {"name": "run"}}],
            "tool_choice": {"type": "custom", "custom": {"name": "run"}},
        },
        "tool_choice[allowed_tools]": {
            "tools": [CHAT_TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        },
        "functions": {"functions": [CHAT_TOOL["function"]]},
        "function_call": {"function_call": {"name": "f"}},
        "response_format": {"response_format": {"type": "text"}},
        "response_format[text]": {"response_format": {"type": "text"}},
        "response_format[json_object]": {"response_format": {"type": "json_object"}},
        "response_format[json_schema]": {"response_format": FORMAT},
        "response_format[*]": {"response_format": {"type": "structural_tag"}},
        "modalities": {"modalities": ["text"]},
        "modalities[text]": {"modalities": ["text"]},
        "modalities[audio]": {"modalities": ["text", "audio"]},
        "modalities[*]": {"modalities": ["text", "image"]},
        "audio": {"audio": {"voice": "alloy", "format": "wav"}},
        "web_search_options": {"web_search_options": {}},
        "reasoning_effort": {"reasoning_effort": "low"},
        "verbosity": {"verbosity": "low"},
        "moderation": {"moderation": {"model": "m"}},
        "prediction": {"prediction": {"type": "content", "content": "x"}},
        "stop_token_ids": {"stop_token_ids": [5]},
        "ignore_eos": {"ignore_eos": True},
        "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "return_token_ids": {"return_token_ids": True},
        "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True},
        "min_p": {"min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "length_penalty": {"length_penalty": 2},
        "min_tokens": {"min_tokens": 1},
        "bad_words": {"bad_words": ["a"]},
        "allowed_token_ids": {"allowed_token_ids": [5]},
    },
    "completions": {
        "prompt": {},
        "logprobs": {"logprobs": 2},
        "echo": {"echo": True},
        "best_of": {"best_of": 3},
        "suffix": {"suffix": "x"},
    },
    "responses": {
        "input": {},
        "instructions": {"instructions": "be brief"},
        "previous_response_id": NO_KEY,
        "input[message]": item(),
        "input[reasoning]": item({"type": "reasoning", "id": "rs_1", "summary": []}, ITEM),
        "input[function_call]": item(CALL_ITEM, {"type": "function_call_output", "call_id": "c", "output": "r"}),
        "input[function_call_output]": item(CALL_ITEM, {"type": "function_call_output", "call_id": "c", "output": "r"}),
        "input[custom_tool_call]": item(
            CUSTOM_ITEM, {"type": "custom_tool_call_output", "call_id": "c", "output": "r"}
        ),
        "input[custom_tool_call_output]": item(
            CUSTOM_ITEM, {"type": "custom_tool_call_output", "call_id": "c", "output": "r"}
        ),
        "input[item_reference]": NO_KEY,
        "input[additional_tools]": item({"type": "additional_tools", "role": "developer", "tools": [TOOL]}),
        "input[configuration_update]": item({"type": "configuration_update"}),
        "input[mcp_list_tools]": item({"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}),
        "input[compaction_trigger]": item({"type": "compaction_trigger"}),
        "input[*]": item({"type": "web_search_call", "id": "w", "status": "completed"}),
        "content[input_text]": {"input": [{**ITEM, "content": [{"type": "input_text", "text": "x"}]}]},
        "content[output_text]": item(
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}, ITEM
        ),
        "content[refusal]": item(
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}, ITEM
        ),
        "content[summary_text]": {"input": [{**ITEM, "content": [{"type": "summary_text", "text": "x"}]}]},
        "content[input_image]": {"input": [{**ITEM, "content": [{"type": "input_image", "image_url": PNG}]}]},
        "content[input_file]": {"input": [{**ITEM, "content": [{"type": "input_file", "file_id": "f"}]}]},
        "max_output_tokens": {"max_output_tokens": 3},
        "top_logprobs": {"top_logprobs": 2},
        "include": {"include": ["reasoning.encrypted_content"]},
        "include[message.output_text.logprobs]": {"include": ["message.output_text.logprobs"]},
        "include[reasoning.encrypted_content]": {"include": ["reasoning.encrypted_content"]},
        "include[*]": {"include": ["web_search_call.results"]},
        "tools": {"tools": [TOOL]},
        "tools[function]": {"tools": [TOOL]},
        "tools[custom]": {"tools": [CUSTOM]},
        "tools[namespace]": {"tools": [{"type": "namespace", "name": "s", "description": "", "tools": [TOOL]}]},
        **{
            f"tools[{kind}]": {"tools": [{"type": kind}]}
            for kind in ("local_shell", "computer", "computer_use_preview", "apply_patch", "shell")
        },
        "tools[*]": {"tools": [TOOL, {"type": "web_search_2025_08_26"}]},
        "tools[].strict": {"tools": [{**TOOL, "strict": True}]},
        "tools[].format": {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "a"}}]},
        "tools[].allowed_callers": {"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]},
        "tools[].defer_loading": {"tools": [{**TOOL, "defer_loading": True}]},
        "tools[].async": {"tools": [{**TOOL, "async": True}]},
        "tools[].output_schema": {"tools": [{**TOOL, "output_schema": SCHEMA}]},
        "tool_choice": {"tools": [TOOL], "tool_choice": "auto"},
        **{f"tool_choice[{kind}]": {"tools": [TOOL], "tool_choice": kind} for kind in ("auto", "none", "required")},
        "tool_choice[allowed_tools]": {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        },
        "tool_choice[function]": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice[custom]": {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "run"}},
        "tool_choice[*]": {"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}},
        "max_tool_calls": {"max_tool_calls": 1},
        "text": {"text": {}},
        "text.format[text]": {"text": {"format": {"type": "text"}}},
        "text.format": {"text": {"format": {"type": "json_object"}}},
        "text.format[json_object]": {"text": {"format": {"type": "json_object"}}},
        "text.format[json_schema]": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        "text.verbosity": {"text": {"verbosity": "low"}},
        "reasoning": {"reasoning": {}},
        "reasoning.effort": {"reasoning": {"effort": "low"}},
        "reasoning.summary": {"reasoning": {"summary": "auto"}},
        "reasoning.generate_summary": {"reasoning": {"generate_summary": "auto"}},
        "reasoning.context": {"reasoning": {"context": "x"}},
        "reasoning.mode": {"reasoning": {"mode": "x"}},
        "truncation": {"truncation": "disabled"},
        "truncation[disabled]": {"truncation": "disabled"},
        "truncation[auto]": {"truncation": "auto"},
        "context_management": {"context_management": [{"type": "compaction", "compact_threshold": 5}]},
        "image": {"image": {"context_compression": "auto"}},
        "moderation": {"moderation": {"model": "m"}},
        "access_programs": {"access_programs": {"cyber": "standard"}},
        "background": {"background": True},
        "conversation": {"conversation": "conv_1"},
        "prompt": {"prompt": {"id": "p"}},
        "multi_agent": {"multi_agent": {"enabled": False}},
        "prompt_cache_options": {"prompt_cache_options": {"mode": "implicit"}},
        "client_metadata": {"client_metadata": {"a": "b"}},
    },
    "messages": {
        "messages": {},
        "system": {"system": "be brief"},
        "stop_sequences": {"stop_sequences": ["\n"]},
        "content[text]": message_of({"type": "text", "text": "x"}),
        "content[thinking]": {
            "messages": [TURN, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}]}, TURN]
        },
        "content[redacted_thinking]": {
            "messages": [TURN, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "t"}]}, TURN]
        },
        "content[tool_use]": {
            "messages": [
                TURN,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
            ]
        },
        "content[tool_result]": {
            "messages": [
                TURN,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
            ]
        },
        "content[search_result]": message_of({"type": "search_result", "title": "t", "source": "s", "content": []}),
        "content[image]": message_of({"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}),
        "content[document]": message_of({"type": "document", "source": {"type": "url", "url": "https://a.b/c.pdf"}}),
        "content[*]": message_of({"type": "container_upload", "file_id": "f"}),
        "tools": {"tools": [INPUT_TOOL]},
        "tools[custom]": {"tools": [{**INPUT_TOOL, "type": "custom"}]},
        **{
            f"tools[{kind}]": {"tools": [{"type": f"{kind}_20250124", "name": kind}]}
            for kind in ("bash", "browser_toolset", "computer", "computer_toolset", "memory", "text_editor")
        },
        "tools[*]": {"tools": [INPUT_TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
        "tools[].strict": {"tools": [{**INPUT_TOOL, "strict": True}]},
        "tools[].input_examples": {"tools": [{**INPUT_TOOL, "input_examples": [{}]}]},
        "tools[].allowed_callers": {"tools": [{**INPUT_TOOL, "allowed_callers": ["direct"]}]},
        "tools[].defer_loading": {"tools": [{**INPUT_TOOL, "defer_loading": True}]},
        "tools[].eager_input_streaming": {"tools": [{**INPUT_TOOL, "eager_input_streaming": True}]},
        "tools[].cache_control": {"tools": [{**INPUT_TOOL, "cache_control": {"type": "ephemeral"}}]},
        "tool_choice": {"tools": [INPUT_TOOL], "tool_choice": {"type": "auto"}},
        **{
            f"tool_choice[{kind}]": {"tools": [INPUT_TOOL], "tool_choice": {"type": kind, "name": "f"}}
            for kind in ("auto", "none", "any", "tool")
        },
        "tool_choice.name": {"tools": [INPUT_TOOL], "tool_choice": {"type": "auto", "name": "f"}},
        "tool_choice.disable_parallel_tool_use": {
            "tools": [INPUT_TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        "thinking": {"thinking": {"type": "adaptive"}},
        "thinking[adaptive]": {"thinking": {"type": "adaptive"}},
        "thinking[enabled]": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking[disabled]": {"thinking": {"type": "disabled"}},
        "thinking[between_tools]": {"thinking": {"type": "between_tools"}},
        "thinking.budget_tokens": {"thinking": {"type": "adaptive", "budget_tokens": 1024}},
        "thinking.display": {"thinking": {"type": "adaptive", "display": "omitted"}},
        "output_config": {"output_config": {}},
        "output_config.effort": {"output_config": {"effort": "low"}},
        "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.task_budget": {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
        "output_format": {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"context_management": {"edits": []}},
        "mcp_servers": {"mcp_servers": [{"type": "url", "url": "https://a.b", "name": "n"}]},
        "compaction": {"compaction": {"type": "summarize"}},
        "thread": {"thread": {"id": "t"}},
    },
    "google": {
        **{key: {} for key in ("contents", "model", "stream", "content[text]")},
        "systemInstruction": {"systemInstruction": {"parts": [{"text": "be brief"}]}},
        "content[thought]": google_turn({"text": "t", "thought": True}),
        "content[functionCall]": google_turn({"functionCall": {"name": "f", "args": {}}}),
        "content[functionResponse]": google_turn(
            {"functionCall": {"name": "f", "args": {}}}, answer={"functionResponse": {"name": "f", "response": {}}}
        ),
        "content[inlineData]": google_turn(answer={"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}}),
        "content[fileData]": google_turn(
            answer={"fileData": {"mimeType": "image/png", "fileUri": "https://a.b/c.png"}}
        ),
        "content[*]": google_turn({"executableCode": {"code": "1", "language": "PYTHON"}}),
        "tools": {"tools": [DECLARATIONS]},
        "tools[].functionDeclarations": {"tools": [DECLARATIONS]},
        **{
            f"tools[].{name}": {"tools": [DECLARATIONS, {name: {}}]}
            for name in (
                "computerUse googleSearch googleSearchRetrieval googleMaps codeExecution urlContext fileSearch".split()
            )
        },
        "tools[].mcpServers": {"tools": [DECLARATIONS, {"mcpServers": [{"name": "n"}]}]},
        "toolConfig": {"toolConfig": {}},
        "toolConfig.functionCallingConfig": {"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}},
        "toolConfig.functionCallingConfig.mode[ANY]": {
            "tools": [DECLARATIONS],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        },
        "toolConfig.functionCallingConfig.allowedFunctionNames": {
            "tools": [DECLARATIONS],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        },
        "toolConfig.retrievalConfig": {"toolConfig": {"retrievalConfig": {"languageCode": "en"}}},
        "toolConfig.includeServerSideToolInvocations": {"toolConfig": {"includeServerSideToolInvocations": True}},
        "generationConfig": {"generationConfig": {}},
        **{
            f"generationConfig.{name}": {"generationConfig": {"maxOutputTokens": 2, name: value}}
            for name, value in {
                "temperature": 0.5,
                "topP": 0.9,
                "topK": 5.0,
                "maxOutputTokens": 3,
                "stopSequences": ["x"],
                "seed": 1,
                "candidateCount": 2,
                "responseLogprobs": True,
                "presencePenalty": 0.5,
                "frequencyPenalty": 0.5,
                "responseMimeType": "application/json",
                "responseModalities": ["AUDIO"],
                "thinkingConfig": {"thinkingBudget": 5},
                "mediaResolution": "MEDIA_RESOLUTION_LOW",
                "speechConfig": {"languageCode": "en"},
                "imageConfig": {"aspectRatio": "1:1"},
                "audioTranscriptionConfig": {"languageCode": "en"},
                "enableEnhancedCivicAnswers": True,
                "continuationToken": "t",
            }.items()
        },
        "generationConfig.logprobs": {"generationConfig": {"responseLogprobs": True, "logprobs": 2}},
        **{
            f"generationConfig.{name}": {"generationConfig": {"responseMimeType": "application/json", name: SCHEMA}}
            for name in ("responseSchema", "responseJsonSchema")
        },
        "cachedContent": {"cachedContent": "cachedContents/c"},
        "safetySettings": {"safetySettings": [{"category": "c", "threshold": "BLOCK_NONE"}]},
        "labels": {"labels": {"a": "b"}},
        "serviceTier": {"serviceTier": "flex"},
    },
}


def sample(dialect: str, key: str) -> Any:
    """Return a request that has the field; a word if its value does not matter."""
    return SAMPLES[dialect].get(key) or SHARED.get(key) or ({} if key in SAMPLES[dialect] else {key: "x"})


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    tokenizer = build_tokenizer()
    engine = LocalEngine(build_model("Qwen3", len(tokenizer), num_hidden_layers=1), tokenizer)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def gateway(engine: LocalEngine) -> Iterator[GatewayServer]:
    config = GatewayConfig(shutdown_timeout_s=1.0)
    with GatewayServer(MemoryTraceStore(), EngineUpstream(engine, "policy"), config) as server:
        yield server


@pytest.fixture(scope="module")
def http(gateway: GatewayServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=60, verify=False) as client:
        yield client


OTHER_NAMES = {"output_format": "output_config.format", "tool_choice[custom]": "tool_choice[function]"}
"""Names in the header or error for a field that is another's older name, or is translated to the same."""


def found_fate(answer: httpx.Response, key: str) -> str:
    """Return the treatment of a field, as its client sees it."""
    key = OTHER_NAMES.get(key, key)
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        kind = key.partition("[")[2].rstrip("]*") or field_of(key)
        assert field_of(key) in answer.text or kind in answer.text, f"{key}: {answer.text}"
        return REFUSED
    named = answer.headers.get(HEADER, "").split(", ")
    return NAMED if any(name == key or name.startswith(f"{key.partition('*')[0]}") for name in named) else "taken"


@pytest.mark.parametrize("dialect", TABLES)
def test_every_field_is_treated_as_the_table_states(http: httpx.Client, dialect: str) -> None:
    wrong = []
    for row in rows(dialect):
        if (asked := sample(dialect, row.key)) is not NO_KEY:
            body = {"model": "m", **BODIES[dialect], **asked}
            if dialect == "google" and isinstance(body.get("generationConfig", {}), dict):
                body["generationConfig"] = {"maxOutputTokens": 2, **body.get("generationConfig", {})}
            answer = http.post(ROUTES[dialect], json=body)
            expected = row.fates[0] if row.fates[0] in (NAMED, REFUSED) else "taken"
            if (found := found_fate(answer, row.key)) != expected:
                wrong.append((row.key, expected, found, answer.text[:120]))
    assert wrong == []


# Seen by clients


@pytest.fixture(scope="module")
def clients(gateway: GatewayServer) -> Iterator[tuple[OpenAI, Anthropic]]:
    with ExitStack() as stack:
        web = [stack.enter_context(DefaultHttpxClient(verify=False)) for _ in range(2)]
        openai = OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, http_client=web[0])
        yield openai, Anthropic(base_url=gateway.url, api_key="unused", max_retries=0, http_client=web[1])


@pytest.mark.parametrize("stream", [False, True])
def test_real_clients_read_the_header_of_all_answers(clients: Any, stream: bool) -> None:
    openai, anthropic = clients
    model: Any = {"model": "m", "stream": stream}
    calls = {
        "reasoning_effort, made_up": openai.chat.completions.with_raw_response.create(
            messages=[USER], max_tokens=2, reasoning_effort="low", extra_body={"made_up": 1, "min_p": 0}, **model
        ),
        "logit_bias": openai.completions.with_raw_response.create(
            prompt="the", max_tokens=2, logit_bias={"5": 1}, **model
        ),
        "truncation[auto], reasoning.effort": openai.responses.with_raw_response.create(
            input="the", max_output_tokens=2, truncation="auto", reasoning={"effort": "low"}, **model
        ),
        "thinking[enabled], tool_choice[any], tool_choice.disable_parallel_tool_use": (
            anthropic.messages.with_raw_response.create(
                messages=[USER],
                max_tokens=2000,
                stop_sequences=[*"aeiou "],
                thinking={"type": "enabled", "budget_tokens": 1024},
                tools=[INPUT_TOOL],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                extra_body={"ignore_eos": False},
                **model,
            )
        ),
    }
    for expected, answer in calls.items():
        assert answer.headers[HEADER] == expected
        if stream:
            assert list(answer.parse())


def test_header_is_absent_if_every_field_was_applied(clients: Any, http: httpx.Client) -> None:
    openai, _ = clients
    answer = openai.chat.completions.with_raw_response.create(
        model="m", messages=[USER], max_tokens=2, tools=[CHAT_TOOL], tool_choice="auto", user="u", stop=["x"], n=2
    )
    assert HEADER not in answer.headers
    counted = http.post("/v1/messages/count_tokens", json={"model": "m", **BODIES["messages"], "thinking": None})
    assert (counted.status_code, HEADER in counted.headers) == (200, False)


def test_names_are_logged_once_and_sanitized(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "_logged", set())
    caplog.set_level(logging.WARNING, "rllm.inference.parameters")
    body = {"model": "m", **BODIES["messages"], "thinking": {"type": "enabled"}, "a\r\nset-cookie: ü": 1}
    body["tools"] = [{"type": "web_search\n_20250305", "name": "w"}, INPUT_TOOL]
    for _ in range(3):
        answer = http.post("/v1/messages", json=body)
        assert answer.headers[HEADER] == "thinking[enabled], tools[web_search?], a??set-cookie???"
    assert [record.getMessage().split(" has")[0] for record in caplog.records] == answer.headers[HEADER].split(", ")


@pytest.mark.parametrize("call", ["parse", "responses", "messages"])
def test_embedded_engine_rejects_structured_output(clients: Any, call: str) -> None:
    class Answer(BaseModel):
        total: int

    openai, anthropic = clients
    asked = {
        "parse": lambda: openai.chat.completions.parse(model="m", messages=[USER], response_format=Answer),
        "responses": lambda: openai.responses.parse(model="m", input="hi", text_format=Answer),
        "messages": lambda: anthropic.messages.parse(model="m", max_tokens=9, messages=[USER], output_format=Answer),
    }[call]
    with pytest.raises((BadRequestError, anthropic_errors.BadRequestError)) as refused:
        asked()
    named = {"parse": "response_format", "responses": "text.format", "messages": "output_config.format"}[call]
    assert named in str(refused.value)
    assert "vLLM" in str(refused.value)


def test_structured_title_of_a_program_is_not_rejected(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    body = {**BODIES["messages"], "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    answer = http.post("/v1/messages", json={"model": "m", **body})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "output_config.format")


@pytest.mark.parametrize(
    ("dialect", "asked"),
    [
        ("chat", {"tool_choice": 5}),
        ("chat", {"tool_choice": ""}),
        ("chat", {"tools": [CHAT_TOOL], "tool_choice": {}}),
        ("chat", {"tools": [CHAT_TOOL], "tool_choice": {"type": 5}}),
        ("chat", {"response_format": {}}),
        ("chat", {"tools": [CHAT_TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}),
        ("chat", {"top_logprobs": 3}),
        ("chat", {"logprobs": True, "top_logprobs": 21}),
        ("completions", {"logprobs": 21}),
        ("completions", {"logprobs": -1}),
        ("responses", {"max_output_tokens": 0}),
    ],
)
def test_unsupported_fields_are_rejected_by_name(http: httpx.Client, dialect: str, asked: dict[str, Any]) -> None:
    answer = http.post(ROUTES[dialect], json={"model": "m", **BODIES[dialect], **asked})
    assert answer.status_code == 400, answer.text
    assert list(asked)[-1] in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("dialect", "asked", "named"),
    [
        ("chat", {"field": 1}, "field"),
        ("chat", {"stream_options": {"member": 1}}, "stream_options.member"),
        ("responses", {"field": 1}, "field"),
        ("responses", {"text": {"member": 1}, "reasoning": {"member": 1}}, "text.member, reasoning.member"),
        ("responses", {"truncation": "kind"}, "truncation[kind]"),
        ("messages", {"thinking": {"type": "kind"}}, "thinking[kind]"),
        ("messages", {"output_config": {"member": 1}}, "output_config.member"),
        # A choice without any tools is the upstream's to judge, so it is passed on.
        ("responses", {"tool_choice": "required"}, "tool_choice[required]"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice[any]"),
        (
            "google",
            {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
            "toolConfig.functionCallingConfig.mode[ANY]",
        ),
    ],
)
def test_fields_without_effect_are_named(http: httpx.Client, dialect: str, asked: dict[str, Any], named: str) -> None:
    answer = http.post(ROUTES[dialect], json={"model": "m", **BODIES[dialect], **asked})
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, named), answer.text


def test_only_allowed_tools_are_shown(engine: LocalEngine) -> None:
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    choice = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    asked = {"messages": [USER], "tools": [CHAT_TOOL, other]}
    chat = ChatDialect().to_chat({**asked, "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}, {})
    assert (chat["tools"], chat["tool_choice"]) == ([other], "required")


def test_header_of_a_server_is_passed_on(gateway: GatewayServer) -> None:
    body = {**BODIES["messages"], "thinking": {"type": "enabled"}, "output_config": {"effort": "low"}}
    upstream = HTTPUpstream(f"{gateway.url}/v1")
    with (
        GatewayServer(MemoryTraceStore(), upstream, GatewayConfig(shutdown_timeout_s=1.0)) as outer,
        httpx.Client(base_url=outer.url, timeout=60, verify=False) as client,
    ):
        for stream in (False, True):
            answer = client.post("/v1/messages", json={"model": "m", "stream": stream, **body})
            assert answer.headers[HEADER] == "thinking[enabled], output_config.effort"


def test_ineffective_parameters_are_not_sampling_parameters_of_the_trace(gateway: GatewayServer) -> None:
    url = gateway.open_session("ignored", sampling={"presence_penalty": 1.0})
    body = {"model": "m", **BODIES["chat"], "tools": [CHAT_TOOL], "tool_choice": "required"}
    httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    [trace] = gateway.store.by_session("ignored")
    assert not {"tool_choice", "presence_penalty"} & trace.sampling.keys()
    assert trace.requested_sampling["tool_choice"] == "required"


# Log-probabilities


def logprobs_of_chat(openai: OpenAI, stream: bool, **options: Any) -> tuple[str, list[Any]]:
    answer = openai.chat.completions.create(
        model="m", messages=[USER], max_tokens=24, logprobs=True, stream=stream, **options
    )
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else [answer.choices[0]]
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    return text, [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]


def shown(tokens: Iterable[list[int]]) -> str:
    """Return the text of tokens, without those that have no text."""
    spelled = b"".join(map(bytes, tokens)).decode(errors="replace")
    return re.sub(r"<\|\w+\|>", "", spelled)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 0.0}],
    ids=["plain", "cut", "greedy"],
)
def test_token_has_its_text_bytes_and_alternatives(
    gateway: GatewayServer, engine: LocalEngine, stream: bool, sampling: dict[str, Any]
) -> None:
    name = f"tokens-{stream}-{sampling}".replace(" ", "").replace("{", "").replace("}", "").replace("'", "")
    with OpenAI(
        base_url=gateway.open_session(name), api_key="unused", http_client=DefaultHttpxClient(verify=False)
    ) as openai:
        text, entries = logprobs_of_chat(openai, stream, seed=5, top_logprobs=4, **sampling)
    [trace] = gateway.store.by_session(name)
    assert [entry.logprob for entry in entries] == trace.logprobs
    spelled = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelled == b"".join(engine.token_bytes(token_id) for token_id in trace.response_ids)
    assert text.strip() in shown(entry.bytes for entry in entries)
    assert any(entry.token.startswith("\\x") for entry in entries), "many tokens of this model are parts of characters"
    for entry in entries:
        top = entry.top_logprobs
        assert len({tuple(other.bytes) for other in top}) == len(top) <= 4
        assert sorted((other.logprob for other in top), reverse=True) == [other.logprob for other in top]
        own = {tuple(other.bytes): other.logprob for other in top}.get(tuple(entry.bytes))
        assert own == entry.logprob if own is not None else entry.logprob <= top[-1].logprob
    assert any(entry.top_logprobs[1:] for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_texts_and_alternatives(clients: Any, engine: LocalEngine, stream: bool) -> None:
    openai, _ = clients
    ids = engine.tokenizer.encode("the user asks", add_special_tokens=False)
    answer = openai.completions.create(model="m", prompt=ids, max_tokens=24, logprobs=3, seed=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    given = [choice.logprobs for choice in choices if choice.logprobs]
    assert not [token for each in given for token in each.tokens if token.startswith("token_id:")]
    assert {len(top) for each in given for top in each.top_logprobs} == {3}


def test_requested_ids_replace_texts(clients: Any) -> None:
    openai, _ = clients
    _, entries = logprobs_of_chat(openai, False, extra_body={"return_tokens_as_token_ids": True})
    assert all(entry.token.startswith("token_id:") for entry in entries)


def test_alternatives_are_computed_only_on_request(clients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    found = scheduler.likeliest
    monkeypatch.setattr(scheduler, "likeliest", lambda p, number: numbers.append((len(p), number)) or found(p, number))
    openai, _ = clients
    openai.chat.completions.create(model="m", messages=[USER], max_tokens=3, logprobs=True)
    assert numbers == []
    openai.chat.completions.create(model="m", messages=[USER], max_tokens=3, logprobs=True, top_logprobs=2)
    assert set(numbers) == {(1, 2)}


# The page


def page_with_tables(page: str) -> str:
    for dialect in TABLES:
        begin, end = f"<!-- begin of {dialect} -->\n", f"<!-- end of {dialect} -->\n"
        head, _, rest = page.partition(begin)
        page = head + begin + _markdown(dialect) + end + rest.partition(end)[2]
    return page


def _markdown(dialect: str) -> str:
    """Return a table with one line for all fields with the same treatment and remark."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows(dialect):
        neutral = parameters.NEUTRAL.get(row.key, ()) if row.fates[0] in (NAMED, REFUSED) else ()
        unless = f" (unless `{neutral[0]!r}`)" if neutral else ""
        merged.setdefault((*row.fates, row.remark), []).append(f"`{row.key}`{unless}")
    lines = ["| field | embedded engine | a server behind | |", "|--|--|--|--|"]
    lines += [f"| {', '.join(keys)} | {' | '.join(cells)} |" for cells, keys in merged.items()]
    return "\n".join(lines) + "\n"


def test_page_has_the_tables() -> None:
    page = PAGE.read_text()
    assert page_with_tables(page) == page, "run: python -m tests.gateway.test_parameters"
    assert all(f"`{row.key}`" in page for dialect in TABLES for row in rows(dialect))


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
