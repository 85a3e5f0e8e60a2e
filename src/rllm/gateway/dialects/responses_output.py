"""OpenAI's responses, the way back: chat answers to output items."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rllm.gateway.dialects.base import created_at, first_choice, reasoning_of, token_fields, usage_of
from rllm.gateway.dialects.responses_logprobs import logprobs_of
from rllm.gateway.dialects.responses_tools import Tools, custom_input
from rllm.types import Message, text_of

ENCRYPTED = "rllm:"
"""How reasoning begins that a client carries without looking into it (it is not secret here)."""

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "max_output_tokens"}
"""Why an answer is not complete, by finish reason."""


def from_chat(
    response: Mapping[str, Any], asked: Mapping[str, Any], *, logprobs: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The response of a chat completion's first choice; it repeats what was asked for, as clients expect.

    `logprobs` are those of its text, where they are known already.
    """
    choice = first_choice(response)
    reason = _INCOMPLETE.get(choice.get("finish_reason") or "stop")
    items = output_items(choice.get("message") or {}, str(response.get("id")), asked)
    if reason:
        items = _cut_off(items)
    if wants_logprobs(asked):
        _add_logprobs(items, logprobs_of(choice) if logprobs is None else logprobs)
    return {
        **head_of(response, asked),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "completed_at": None if reason else int(time.time()),
        "output": items,
        "usage": _usage(response),
        **token_fields(response, asked),
    }


def broken_off(response: Mapping[str, Any], *, cancelled: bool, reason: str) -> dict[str, Any]:
    """The response of `from_chat` whose answer broke off, because its client left (`cancelled`) or for another reason."""
    output = [*response["output"][:-1], *({**item, "status": "incomplete"} for item in response["output"][-1:])]
    return {
        **response,
        "status": "cancelled" if cancelled else "failed",
        "error": None if cancelled else {"code": "server_error", "message": reason},
        "incomplete_details": None,
        "completed_at": None,
        "output": output,
    }


def output_items(message: Message, response_id: str, asked: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """What an assistant's message holds, as items: reasoning, the message, its tool calls. Their ids name the response."""
    tools = Tools(asked or {})
    own = response_id.removeprefix("resp_")
    items: list[dict[str, Any]] = []
    if thought := reasoning_of(message):
        items.append(reasoning_item(own, thought))
    calls = message.get("tool_calls") or ()
    parts = _parts(message)
    if parts or not calls:
        items.append(message_item(own, parts or [text_part("")]))
    items += [call_item(own, position, call, tools) for position, call in enumerate(calls)]
    return items


def _cut_off(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an answer that is not complete: one that was still thinking has no message, for clients parse what a message says."""
    *before, last = items
    if before and last.get("content") == [text_part("")]:
        return _cut_off(before)
    return [*before, {**last, "status": "incomplete"}]


def wants_logprobs(asked: Mapping[str, Any]) -> bool:
    """Return whether a request wants the log probabilities of the text, which are left out otherwise."""
    included = asked.get("include")
    return bool(asked.get("top_logprobs")) or (
        isinstance(included, list) and "message.output_text.logprobs" in included
    )


def head_of(response: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """All but what the answer itself says."""
    text = asked.get("text") or {}
    reasoning = asked.get("reasoning") or {}
    return {
        "id": response.get("id"),
        "object": "response",
        "created_at": created_at(response),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"),
        "max_tool_calls": asked.get("max_tool_calls"),
        "metadata": asked.get("metadata") or {},
        "model": response.get("model") or asked.get("model") or "",
        "output": [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "previous_response_id": asked.get("previous_response_id"),
        "prompt_cache_key": asked.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": asked.get("safety_identifier"),
        "service_tier": "default",
        "store": asked.get("store", True),
        "temperature": asked.get("temperature", 1.0),
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_logprobs": asked.get("top_logprobs") or 0,
        "top_p": asked.get("top_p", 1.0),
        "truncation": asked.get("truncation") or "disabled",
        "usage": None,
        "user": asked.get("user"),
    }


def reasoning_item(own: str, thought: str) -> dict[str, Any]:
    """Told twice, because some clients carry on nothing but what they cannot read."""
    return {
        "id": f"rs_{own}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thought}],
        "encrypted_content": f"{ENCRYPTED}{thought}",
    }


def message_item(own: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What is said to the user; `own` is the response's id without its prefix, here and below."""
    return {"id": f"msg_{own}", "type": "message", "role": "assistant", "status": "completed", "content": parts}


def _parts(message: Message) -> list[dict[str, Any]]:
    text = text_of(message)
    parts = [text_part(text)] if text else []
    return [*parts, {"type": "refusal", "refusal": message["refusal"]}] if message.get("refusal") else parts


def text_part(text: str) -> dict[str, Any]:
    """A part of a message, its log probabilities not filled in."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(own: str, position: int, call: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
    """A chat's tool call, the one at this position, of one of these tools."""
    function = call.get("function") or {}
    tool, arguments = tools.called(function.get("name") or ""), function.get("arguments") or ""
    item = {"id": f"fc_{own}_{position}", "call_id": call.get("id"), "name": tool.name, "status": "completed"}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.is_custom:
        return {**item, "type": "custom_tool_call", "input": custom_input(arguments)}
    return {**item, "type": "function_call", "arguments": arguments}


def _add_logprobs(items: Iterable[Mapping[str, Any]], logprobs: list[dict[str, Any]]) -> None:
    for item in items:
        if item["type"] == "message" and item["content"][0]["type"] == "output_text":
            item["content"][0]["logprobs"] = logprobs


def _usage(response: Mapping[str, Any]) -> dict[str, Any]:
    usage = usage_of(response)
    return {
        "input_tokens": usage["prompt"],
        "input_tokens_details": {"cached_tokens": usage["cached"], "cache_write_tokens": 0},
        "output_tokens": usage["completion"],
        "output_tokens_details": {"reasoning_tokens": usage["reasoning"]},
        "total_tokens": usage["prompt"] + usage["completion"],
    }
