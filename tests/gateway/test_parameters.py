"""Every documented field of every dialect is honoured, refused, or named in the answer's header, by real clients' own types.

python -m tests.gateway.test_parameters    writes the tables of docs/parameters.md
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union

import anthropic.types.beta as anthropic_types
import httpx
import openai.types.chat as chat_types
import openai.types.responses as responses_types
import pytest
from anthropic.types import message_create_params as messages_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as completions_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from rllm.gateway.config import GatewayConfig
from rllm.gateway.dialects.parameters import HONOURED, NAMED, NO_EFFECT, REFUSED, TABLES, rows
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.inference import parameters
from rllm.inference.local import LocalEngine
from rllm.inference.parameters import field_of
from rllm.store.memory import MemoryTraceStore

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"
HEADER = "x-rllm-ignored"
USER = {"role": "user", "content": "the user asks the assistant"}
ROUTES = {
    "chat": "chat/completions",
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "max_tokens": 2},
    "completions": {"prompt": "the user asks", "max_tokens": 2},
    "responses": {"input": "the user asks", "max_output_tokens": 2},
    "messages": {"messages": [USER], "max_tokens": 2},
}


# Which fields there are

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
WITH_MEMBERS = {"stream_options", "reasoning", "text", "output_config", "tool_choice"}


def leaves(hint: Any) -> Iterator[Any]:
    """The literals and classes that a type is made of."""
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
    """The keys of all fields that the clients' types have."""
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


@pytest.mark.parametrize("dialect", TABLES)
def test_every_field_that_a_client_documents_has_a_fate(dialect: str) -> None:
    table = TABLES[dialect]
    keys = set(documented(dialect))
    assert len(keys) >= len(typing.get_type_hints(PARAMS[dialect][0]))
    assert sorted(key for key in keys if table.row_of(key) is None) == []


@pytest.mark.parametrize("dialect", TABLES)
def test_every_row_names_fates_that_there_are(dialect: str) -> None:
    for row in rows(dialect):
        embedded, forwarded = row.fates
        assert embedded in (HONOURED, NO_EFFECT, NAMED, REFUSED), row
        assert re.fullmatch(r"honoured|no effect|named|refused|translated|passed on( as \w+)?", forwarded), row
        assert row.remark or embedded != REFUSED, f"{row.key} is refused without a remedy"


# What becomes of them

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
"""For fields that refer to an earlier answer, which other tests send."""


def said(*parts: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [TURN, {"role": "assistant", "content": "a"}, {"role": role, "content": [*parts], **more}]}


def item(*items: Any) -> dict[str, Any]:
    return {"input": [ITEM, *items]}


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
        "content[text]": said({"type": "text", "text": "x"}),
        "content[refusal]": {
            "messages": [TURN, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, TURN]
        },
        "content[image_url]": said({"type": "image_url", "image_url": {"url": PNG}}),
        "content[input_audio]": said({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        "content[file]": said({"type": "file", "file": {"file_data": "", "filename": "a.pdf"}}),
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
        "modalities": {"modalities": ["text"]},
        "modalities[text]": {"modalities": ["text"]},
        "modalities[audio]": {"modalities": ["text", "audio"]},
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
        "content[text]": said({"type": "text", "text": "x"}),
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
        "content[search_result]": said({"type": "search_result", "title": "t", "source": "s", "content": []}),
        "content[image]": said({"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}),
        "content[document]": said({"type": "document", "source": {"type": "url", "url": "https://a.b/c.pdf"}}),
        "content[*]": said({"type": "container_upload", "file_id": "f"}),
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
        "tool_choice": {"tools": [INPUT_TOOL], "tool_choice": {"type": "auto"}},
        **{
            f"tool_choice[{kind}]": {"tools": [INPUT_TOOL], "tool_choice": {"type": kind, "name": "f"}}
            for kind in ("auto", "none", "any", "tool")
        },
        "tool_choice.disable_parallel_tool_use": {
            "tools": [INPUT_TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        "thinking": {"thinking": {"type": "adaptive"}},
        "thinking[adaptive]": {"thinking": {"type": "adaptive"}},
        "thinking[enabled]": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking[disabled]": {"thinking": {"type": "disabled"}},
        "thinking[between_tools]": {"thinking": {"type": "between_tools"}},
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
}


def sample(dialect: str, key: str) -> Any:
    """A request that has the field; one whose value matters to nobody is a word."""
    return SAMPLES[dialect].get(key) or SHARED.get(key) or ({} if key in SAMPLES[dialect] else {key: "x"})


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    from ..inference.conftest import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    engine = LocalEngine(build_model("Qwen3", len(tokenizer)), tokenizer)
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


def found_fate(answer: httpx.Response, key: str) -> str:
    """What became of a field, as its client sees it."""
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        kind = key.partition("[")[2].rstrip("]*") or field_of(key)
        assert field_of(key) in answer.text or kind in answer.text, f"{key}: {answer.text}"
        return REFUSED
    named = answer.headers.get(HEADER, "").split(", ")
    return NAMED if any(name == key or name.startswith(f"{key.partition('*')[0]}") for name in named) else "taken"


@pytest.mark.parametrize("dialect", TABLES)
def test_every_field_has_the_fate_that_the_table_says(http: httpx.Client, dialect: str) -> None:
    wrong = []
    for row in rows(dialect):
        if (asked := sample(dialect, row.key)) is not NO_KEY:
            answer = http.post(f"/v1/{ROUTES[dialect]}", json={"model": "m", **BODIES[dialect], **asked})
            expected = row.fates[0] if row.fates[0] in (NAMED, REFUSED) else "taken"
            if (found := found_fate(answer, row.key)) != expected:
                wrong.append((row.key, expected, found, answer.text[:120]))
    assert wrong == []


# The page


def page_with_tables(page: str) -> str:
    for dialect in TABLES:
        begin, end = f"<!-- begin of {dialect} -->\n", f"<!-- end of {dialect} -->\n"
        page = re.sub(f"(?<={begin}).*?(?={end})", lambda _, d=dialect: _markdown(d), page, flags=re.DOTALL)  # type: ignore[misc]
    return page


def _markdown(dialect: str) -> str:
    """A table with one line for all fields of the same fates and remark."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows(dialect):
        neutral = parameters.NEUTRAL.get(row.key, ()) if row.fates[0] in (NAMED, REFUSED) else ()
        unless = f" (unless `{neutral[0]!r}`)" if neutral else ""
        merged.setdefault((*row.fates, row.remark), []).append(f"`{row.key}`{unless}")
    lines = ["| field | embedded engine | a server behind | |", "|--|--|--|--|"]
    lines += [f"| {', '.join(keys)} | {' | '.join(cells)} |" for cells, keys in merged.items()]
    return "\n".join(lines) + "\n"


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text()
    assert page_with_tables(page) == page, "run: python -m tests.gateway.test_parameters"
    assert all(f"`{row.key}`" in page for dialect in TABLES for row in rows(dialect))


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
