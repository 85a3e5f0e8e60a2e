"""Chat messages to token ids, through the tokenizer's own chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rllm.errors import ConfigError
from rllm.types import TEXT_PARTS, Message

_MEMO_SIZE = 256
_LONG = 100_000
"""Characters; to make tokens of them takes a tenth of a second."""


class ChatTemplate:
    """Renders what real clients send: text parts, null contents, the `developer` role, arguments as JSON strings.

    Tool call arguments stay the exact string that the model wrote where the template prints strings as they are, so
    that a re-rendered turn equals the sampled one; other templates get the parsed object, because they would quote a
    string a second time. Malformed arguments always stay a string.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text: str = _template_text(tokenizer)
        self.hash = hashlib.sha256(self.text.encode()).hexdigest()
        """SHA-256 of the template's text, in hex."""
        self._prints_argument_strings = re.search(r"arguments\s+is\s+string", self.text) is not None
        self._memo: OrderedDict[bytes, list[int]] = OrderedDict()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's token ids. `template_kwargs` are the template's own switches, such as `enable_thinking`.

        Raises:
            ConfigError: if a message is malformed, or if the template refuses it.
        """
        key = _memo_key(messages, tools, add_generation_prompt, template_kwargs)
        ids = self._memo.get(key) if key else None
        if ids is None:
            text = self.render_text(messages, tools, add_generation_prompt, template_kwargs)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        if key:
            self._memo[key] = ids
            self._memo.move_to_end(key)
            if len(self._memo) > _MEMO_SIZE:
                self._memo.popitem(last=False)
        return list(ids)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, special tokens included."""
        if not messages:
            raise ConfigError("messages=[]: send at least one message")
        _check_kwargs(template_kwargs)
        normal = [self._normal(index, message) for index, message in enumerate(messages)]
        try:
            text: str = self._tokenizer.apply_chat_template(
                normal,
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template is a program of its author: it may raise anything
            raise ConfigError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
        return text

    def _normal(self, index: int, message: Message) -> Message:
        check_role(index, message)
        normal = {key: value for key, value in message.items() if value is not None}
        normal["role"] = "system" if message["role"] == "developer" else message["role"]
        normal["content"] = _text_content(index, message.get("content"))
        if "reasoning" in normal:
            normal.setdefault("reasoning_content", normal["reasoning"])
        if "reasoning_content" in normal:  # gpt-oss's template has a name of its own
            normal.setdefault("thinking", normal["reasoning_content"])
        if normal.get("tool_calls"):
            normal["tool_calls"] = [self._normal_call(call) for call in normal["tool_calls"]]
        return normal

    def _normal_call(self, call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._prints_argument_strings:
            function["arguments"] = _parsed_object(arguments)
        return {**call, "function": function}


def is_long(messages: Sequence[Any]) -> bool:
    """Whether to render these messages takes longer than all other calls of an event loop should wait."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return sum(len(content if isinstance(content, str) else repr(content)) for content in contents) > _LONG


def _check_kwargs(kwargs: Any) -> None:
    """A template is a program, which may run for ever, and what it prints would not be what the template's hash stands for."""
    if not isinstance(kwargs, Mapping | None):
        raise ConfigError(f"chat_template_kwargs={kwargs!r:.80}: use an object of the template's own switches")
    if kwargs and "chat_template" in kwargs:
        raise ConfigError(
            "chat_template_kwargs.chat_template: a request cannot bring another template than the model's"
        )


def check_role(index: int, message: Any) -> None:
    """Raises ConfigError for what is not a message at all."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"messages[{index}]={message!r}: use an object with a string 'role'")


def _template_text(tokenizer: Any) -> str:
    try:
        text: str = tokenizer.get_chat_template()
    except (ValueError, AttributeError) as error:
        path = getattr(tokenizer, "name_or_path", "") or "<in memory>"
        raise ConfigError(
            f"tokenizer={path!r} has no chat template: use an instruction-tuned model, or put a chat_template.jinja "
            "into its folder"
        ) from error
    return text


def _memo_key(*values: Any) -> bytes | None:
    """Siblings of a group send the same prompt; values that are not JSON are simply not remembered."""
    try:
        return orjson.dumps(values)
    except TypeError:
        return None


def _text_content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ConfigError(f"messages[{index}].content={content!r}: use a string or a list of text parts")
    return "".join(_part_text(index, part) for part in content)


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type") or "text") if isinstance(part, Mapping) else type(part).__name__
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal", ""))
    raise ConfigError(f"messages[{index}].content has a part of type {kind!r}: this model reads text parts only")


def _parsed_object(arguments: str) -> Any:
    """The arguments as a dict; the string itself where it is not a JSON object, or nested too deep to be read."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
