"""OpenAI's chat completions, which the gateway also speaks inside, and its older completions.

A completion's prompt of token ids is used unchanged; a text becomes the only message of a chat, which an upstream
renders through its chat template as a user's message. Agents that need the bare prompt to be continued, as by a base
model, send its ids; so does another gateway, whose prompts are exact.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import orjson

from rllm._runtime.ids import new_id
from rllm.gateway.dialects.base import (
    COMMENT,
    Dialect,
    answer_json,
    check_chat,
    check_options,
    created_at,
    data_event,
    field,
    invalid,
    named_in,
    objects,
    usage_of,
    wire_format,
)
from rllm.gateway.errors import GatewayError
from rllm.gateway.upstream.base import FACTS_KEY
from rllm.inference.parameters import CHAT, Table
from rllm.types import JSONMapping, JSONObject, Trace, text_of


class ChatDialect(Dialect):
    """OpenAI's `/v1/chat/completions`. Requests are checked only for fields that the gateway itself relies on."""

    wire = wire_format("chat")
    parameters = CHAT
    id_prefix = "chatcmpl-"
    needs = "'model' and 'messages'"

    def left_out(self, asked: JSONMapping) -> list[str]:
        return []  # The upstream reports the fields that it ignores.

    def to_chat(self, asked: JSONObject, earlier: Mapping[str, Trace]) -> JSONObject:
        check_chat(asked)
        return _with_allowed_tools(asked)

    def render(self, response: JSONObject, *, asked: JSONMapping) -> bytes:
        _fill_head(response, "chat.completion")
        strip(response, asked)
        return answer_json(response)

    def encoder(self, *, asked: JSONMapping) -> ChatStreamEncoder:
        return ChatStreamEncoder(asked)


def _with_allowed_tools(asked: JSONObject) -> JSONObject:
    """Return a request with only the tools that its choice allows, because few servers know this choice."""
    choice = asked.get("tool_choice")
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return asked
    allowed = field(choice, "allowed_tools", dict, "tool_choice")
    where = "tool_choice.allowed_tools.tools"
    names = [named_in(tool) for tool in objects(allowed.get("tools"), where)]
    tools = [tool for tool in asked.get("tools") or () if named_in(tool) in names and named_in(tool) is not None]
    if not tools:
        raise invalid(f"{where}: none of them is in 'tools': name some of these", "tool_choice")
    return {**asked, "tools": tools, "tool_choice": allowed.get("mode") or "auto"}


class _ChunkEncoder:
    """Base of encoders that send finish reasons, usage and `[DONE]` at the end."""

    keep_alive = COMMENT

    def __init__(self, asked: JSONMapping) -> None:
        self._asked = asked

    def _ending(self, head: JSONObject, choices: list[JSONObject], usage: object) -> bytes:
        """Return the last events: one for each choice, because some clients expect its finish reason alone."""
        chunks = [{**head, "choices": [choice]} for choice in choices]
        if usage and (self._asked.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": usage})
        return b"".join([*map(data_event, chunks), b"data: [DONE]\n\n"])


class ChatStreamEncoder(_ChunkEncoder):
    """Encoder of chunks as server-sent events, with each tool call in one piece."""

    def feed(self, chunks: list[JSONObject]) -> bytes:
        return b"".join(data_event(chunk) for chunk in chunks if self._is_sent(chunk))

    def finish(self, response: JSONMapping) -> bytes:
        head = {name: value for name, value in response.items() if name not in ("choices", "usage", *_ID_FIELDS)}
        _fill_head(head, "chat.completion.chunk")
        strip(head, self._asked)
        choices = []
        for choice in response["choices"]:
            bare = {name: value for name, value in choice.items() if name not in ("message", *_ID_FIELDS)}
            ending = {**bare, "delta": {}, "logprobs": None}
            if calls := choice["message"].get("tool_calls"):
                numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                choices.append({**ending, "finish_reason": None, "delta": {"tool_calls": numbered}})
            choices.append(ending)
        return self._ending(head, choices, response.get("usage"))

    def fail(self, error: GatewayError) -> bytes:
        return data_event(error.to_dict())

    def _is_sent(self, chunk: JSONObject) -> bool:
        """Remove from a chunk everything that is sent at the end; return whether anything remains."""
        _fill_head(chunk, "chat.completion.chunk")
        strip(chunk, self._asked)
        usage = chunk.pop("usage", None)
        if not chunk.get("choices"):
            return not usage
        for choice in chunk["choices"]:
            if choice.get("finish_reason") is not None:
                choice["finish_reason"] = None
                choice.pop("stop_reason", None)
            if "tool_calls" in (delta := choice.get("delta") or {}):
                choice["delta"] = {name: value for name, value in delta.items() if name != "tool_calls"}
        chunk["choices"] = [
            choice
            for choice in chunk["choices"]
            if any((choice.get("delta") or {}).values()) or choice.get("token_ids") or choice.get("logprobs")
        ]
        return bool(chunk["choices"])


_ID_FIELDS = ("prompt_token_ids", "token_ids", "response_token_ids")
"""Requested with `return_token_ids: true`; the first is in the answer or in each choice, and the last is SGLang's."""


def strip(answer: JSONObject, asked: JSONMapping) -> None:
    """Remove the token fields that a request did not ask for from an answer or a chunk of one, in place."""
    keep_ids, keep_logprobs = asked.get("return_token_ids"), asked.get("logprobs")
    if not keep_ids:
        for name in (*_ID_FIELDS, FACTS_KEY):
            answer.pop(name, None)
    for choice in answer.get("choices") or ():
        if not keep_ids:
            for name in _ID_FIELDS:
                choice.pop(name, None)
        if not keep_logprobs and choice.get("logprobs") is not None:
            # OpenAI answers null if log-probabilities were not requested.
            choice["logprobs"] = None


def _fill_head(answer: JSONObject, object: str) -> None:
    """Fill in fields that some servers omit and strict clients require."""
    if "created" not in answer:
        answer["created"] = int(time.time())
    if answer.get("object") != object:
        answer["object"] = object


# --- completions ------------------------------------------------------------------------------------------------------


COMPLETIONS = Table("""
prompt | honoured | translated | one text, which becomes a user message, or token ids
model | =model | =model |
max_tokens, n, seed, stop, stream, temperature, top_p | honoured | = |
logprobs | =top_logprobs | passed on as top_logprobs | up to 20
frequency_penalty | =frequency_penalty | = |
presence_penalty | =presence_penalty | = |
logit_bias | =logit_bias | = |
stream_options, stream_options.include_usage | honoured | = |
stream_options.include_obfuscation | no effect | no effect |
user | no effect | = |
echo | refused | refused | put the prompt before the answer yourself
best_of | refused | refused | ask for `n` answers and choose among them
suffix | refused | refused | put both texts into the prompt
""")


class CompletionsDialect(Dialect):
    """OpenAI's `/v1/completions`."""

    wire = wire_format("completions")
    parameters = COMPLETIONS
    id_prefix = "cmpl-"
    needs = "'model' and 'prompt'"
    prompt_name = "prompt"

    def to_chat(self, asked: JSONObject, earlier: Mapping[str, Trace]) -> JSONObject:
        return completion_to_chat(asked)

    def prompt_ids(self, asked: JSONMapping) -> list[int] | None:
        prompt = _prompt(asked)
        return prompt if isinstance(prompt, list) else None

    def render(self, response: JSONObject, *, asked: JSONMapping) -> bytes:
        return answer_json(completion_from_chat(response, asked))

    def encoder(self, *, asked: JSONMapping) -> CompletionsStreamEncoder:
        return CompletionsStreamEncoder(asked)


def completion_to_chat(asked: JSONMapping) -> JSONObject:
    """Return the chat request of a completion request, without messages if the prompt is token ids.

    Members that are not of this dialect are passed on.

    Raises:
        GatewayError: 400, if it is malformed, or asks for something that a chat completion cannot give.
    """
    chat = {name: value for name, value in asked.items() if name not in COMPLETIONS.own_fields and value is not None}
    if asked.get("echo"):
        raise invalid("echo is not supported: put the prompt before the answer yourself", "echo")
    if asked.get("suffix"):
        raise invalid("suffix is not supported: put both texts into the prompt", "suffix")
    if asked.get("best_of") not in (None, asked.get("n") or 1):
        raise invalid(f"best_of={asked['best_of']!r}: ask for n answers and choose among them", "best_of")
    if asked.get("logprobs") is not None:
        if type(asked["logprobs"]) is not int or asked["logprobs"] < 0:
            raise invalid(f"logprobs={asked['logprobs']!r}: send the number of alternatives, 0 or more", "logprobs")
        chat |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
    prompt = _prompt(asked)
    if isinstance(prompt, str):
        chat["messages"] = [{"role": "user", "content": prompt}]
        check_chat(chat)
        return chat
    chat["messages"] = []
    check_options(chat)
    return chat


def _prompt(asked: JSONMapping) -> str | list[int]:
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, list) and set(map(type, prompt)) == {int} and 0 <= min(prompt) <= max(prompt) < 2**32:
        return prompt
    if not isinstance(prompt, str):
        raise invalid(f"prompt={repr(prompt)[:80]}: send one text, or its token ids, in a call of its own", "prompt")
    return prompt


def completion_from_chat(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return a chat completion as a completion, choice by choice."""
    ids = _prompt_ids(response, asked)
    choices = [
        {**_choice(choice, position, text_of(choice.get("message") or {}), asked), **ids}
        for position, choice in enumerate(response.get("choices") or ())
    ]
    return {**_head(response), "choices": choices, "usage": response.get("usage"), **_facts(response, asked)}


def _prompt_ids(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return the prompt's ids as a field of a choice, where vLLM puts them."""
    return {"prompt_token_ids": response.get("prompt_token_ids")} if asked.get("return_token_ids") else {}


def _facts(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    return {FACTS_KEY: response[FACTS_KEY]} if asked.get("return_token_ids") and FACTS_KEY in response else {}


def _head(response: JSONMapping) -> JSONObject:
    head = {"id": response.get("id"), "object": "text_completion", "created": created_at(response)}
    return {**head, "model": response.get("model") or ""}


def _choice(choice: JSONMapping, position: int, text: str, asked: JSONMapping) -> JSONObject:
    reason = choice.get("finish_reason")
    ids = {"token_ids": choice.get("token_ids")} if asked.get("return_token_ids") else {}
    return {
        "index": choice.get("index", position),
        "text": text,
        "logprobs": _logprobs(choice) if asked.get("logprobs") is not None else None,
        "finish_reason": "stop" if reason == "tool_calls" else reason,
        "stop_reason": choice.get("stop_reason"),
        **ids,
    }


def _logprobs(choice: JSONMapping) -> JSONObject | None:
    entries = (choice.get("logprobs") or {}).get("content")
    if entries is None:
        return None
    others = [entry.get("top_logprobs") or () for entry in entries]
    return {
        "tokens": [entry.get("token") or "" for entry in entries],
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [{str(other.get("token")): other.get("logprob") for other in listed} for listed in others],
    }


class CompletionsStreamEncoder(_ChunkEncoder):
    """Encoder of chunks as server-sent events of completions."""

    def feed(self, chunks: list[JSONObject]) -> bytes:
        events = []
        for chunk in chunks:
            for choice in chunk.get("choices") or ():
                piece = _choice(choice, 0, text_of(choice.get("delta") or {}), self._asked)
                piece |= {"finish_reason": None, "stop_reason": None, **_prompt_ids(chunk, self._asked)}
                if any(piece.get(name) for name in ("text", "logprobs", "token_ids", "prompt_token_ids")):
                    events.append(data_event({**_head(chunk), "choices": [piece]}))
        return b"".join(events)

    def finish(self, response: JSONMapping) -> bytes:
        choices = [_choice(choice, position, "", {}) for position, choice in enumerate(response["choices"])]
        return self._ending({**_head(response), **_facts(response, self._asked)}, choices, response.get("usage"))

    def fail(self, error: GatewayError) -> bytes:
        return data_event(error.to_dict(prompt="prompt"))


# --- answers of servers -----------------------------------------------------------------------------------------------


# Some servers omit fields that strict clients require: they are filled in before an answer is captured and returned.


def fill_missing_fields(response: JSONObject, model: str) -> None:
    """Fill model and usage of a chat completion, and index, role, finish reason and call ids of each choice."""
    if not response.get("model"):
        response["model"] = model
    if not response.get("usage"):
        usage = usage_of(response)
        read, written = usage["prompt"], usage["completion"]
        response["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    choices = response.get("choices") or ()
    if len({choice.get("index") for choice in choices} - {None}) < len(choices):
        for position, choice in enumerate(choices):
            choice["index"] = position
    for choice in choices:
        _fill_choice(choice)


def _fill_choice(choice: JSONObject) -> None:
    message = choice.get("message")
    if message is None:
        message = choice["message"] = {"content": ""}
    if not message.get("role"):
        message["role"] = "assistant"
    ids: set[str] = set()
    for call in message.get("tool_calls") or ():
        _fill_call(call, ids)
    if not choice.get("finish_reason"):
        choice["finish_reason"] = "tool_calls" if message.get("tool_calls") else "stop"


class ChunkNormalizer:
    """Filler of missing fields in the chunks of one stream; tool calls are filled in the whole answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._begun: set[int] = set()
        """Choices begun so far."""

    def fill_missing_fields(self, chunk: JSONObject) -> None:
        """Fill model, index and role of the next chunk."""
        if not chunk.get("model"):
            chunk["model"] = self._model
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason") == "":  # Some servers send this until there is one.
                choice["finish_reason"] = None
            if choice.get("index") is None:
                choice["index"] = 0
            if choice["index"] not in self._begun:
                self._begun.add(choice["index"])
                choice["delta"] = {"role": "assistant", **(choice.get("delta") or {})}


def _fill_call(call: JSONObject, ids: set[str]) -> None:
    """Fill a tool call. Its id must differ from `ids`, the ids of earlier calls, because results refer to it."""
    if not call.get("id") or call["id"] in ids:
        call["id"] = f"call_{new_id()}"
    ids.add(call["id"])
    if not call.get("type"):
        call["type"] = "function"
    function = call.get("function") or {}
    if isinstance(function.get("arguments"), dict):
        function["arguments"] = orjson.dumps(function["arguments"]).decode()
    elif function.get("name") and function.get("arguments") is None:
        function["arguments"] = ""
