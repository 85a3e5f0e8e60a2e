"""Chat messages to token ids, through the tokenizer's own chat template."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import dropwhile, takewhile
from typing import TypeAlias

import orjson

from rllm.errors import ConfigError
from rllm.parser.append_only import common_length
from rllm.parser.control_tokens import ControlTokens
from rllm.parser.decoding import Tokenizer, special_tokens
from rllm.parser.template_shape import (
    CALLS,
    FURTHER_CALLS,
    RESULTS,
    SYSTEM,
    TOOLS,
    USER,
    TemplateShape,
    arguments_of,
    probed,
)
from rllm.types import TEXT_PARTS, JSONMapping, Message

logger = logging.getLogger(__name__)

_Tools: TypeAlias = Sequence[JSONMapping] | None
_MEMO_SIZE = 256
_LONG = 100_000
"""Characters whose tokenization takes a tenth of a second."""
_SHAPES: dict[tuple[str, str], TemplateShape] = {}
_NAME_OF_CHOICE = "name another template with model.chat_template=PATH"
_REMEDIES = {
    **dict.fromkeys(
        (TOOLS, CALLS, FURTHER_CALLS, RESULTS),
        f"set model.tool_prompt=hermes, which puts them into other messages, or {_NAME_OF_CHOICE}",
    ),
    SYSTEM: f"put the text of system messages into the first user message, or {_NAME_OF_CHOICE}",
}
_KINDS = {"system": SYSTEM, "tool": RESULTS}
"""Kinds of content whose messages have a role of their own."""


class ChatTemplate:
    """Renders what real clients send: text parts, null contents, the `developer` role, arguments as JSON strings.

    Messages are put into the form that the template reads (`TemplateShape`). Tool call arguments stay the exact string
    that the model wrote where the template prints strings as they are, so that a re-rendered turn equals the sampled
    one; other templates get the parsed object. Malformed arguments always stay a string.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        try:
            self.text: str = tokenizer.get_chat_template()
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"tokenizer={_name(tokenizer)!r} has no chat template: use an instruction-tuned model, or set "
                "model.chat_template=PATH, or put a chat_template.jinja into its folder"
            ) from error
        self.hash = hashlib.sha256(self.text.encode()).hexdigest()
        """SHA-256 of the template's text, in hex."""
        self.control_tokens = ControlTokens(tokenizer, self.text)
        self._memo: OrderedDict[bytes, list[int]] = OrderedDict()
        self._reported: set[str] = set()

    @cached_property
    def shape(self) -> TemplateShape:
        """Form of messages that the template reads, found by some ten renderings on first use.

        Raises:
            ConfigError: if no text of a user's message is printed in any form.
        """
        key = (repr(self.tokenizer.chat_template), repr(getattr(self.tokenizer, "special_tokens_map", "")))
        shape = _SHAPES.get(key)
        if shape is None:
            shape = _SHAPES[key] = probed(partial(self._apply, add_generation_prompt=False))
        if shape.lost.get(USER) == "":
            raise ConfigError(
                f"tokenizer={_name(self.tokenizer)!r}: its chat template prints no text of user messages, neither as "
                f"a string nor as a list of parts: {_NAME_OF_CHOICE}"
            )
        return shape

    @cached_property
    def end_id(self) -> int | None:
        """Id of the control token that ends the last answer; `None` if there is none, or the template refuses.

        Of several without space between, such as Cohere's ends of a text and of a turn, it is the last.
        """
        answer = "Seven."
        chat = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": answer}]
        try:
            _, printed, after = self.render_text(chat, add_generation_prompt=False).rpartition(answer)
            asked = self.control_tokens.encode(self.render_text(chat[:1]))
        except ConfigError:
            return None
        known = set(self.tokenizer.convert_tokens_to_ids(sorted(special_tokens(self.tokenizer))))
        ids = self.control_tokens.encode(after) if printed else []
        num_asked = common_length(ids[::-1], asked[::-1])  # some templates do so after every message
        for part in (ids[: len(ids) - num_asked], ids):
            if ends := list(takewhile(known.__contains__, dropwhile(lambda id_: id_ not in known, part))):
                return ends[-1]
        return None

    def ends_answers(self, end_ids: Collection[int]) -> bool:
        """Return whether the template prints one of these ids after an answer; true if it refuses the messages.

        It may begin the next turn, as GLM's models end their answers.
        """
        if self.end_id in end_ids:
            return True
        asked, answered = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven."}
        try:
            text = self.render_text([asked, answered, asked], add_generation_prompt=False)
        except ConfigError:
            return True
        after = text.rpartition(answered["content"])[2].partition(asked["content"])[0]
        return not set(end_ids).isdisjoint(self.control_tokens.encode(after))

    def lost(self, messages: Sequence[Message], tools: _Tools = None) -> tuple[str, ...]:
        """Return the kinds of content of a request that the template leaves out of its prompt, such as `tools`.

        The first request of each kind is logged as a warning.
        """
        lost = self.shape.lost_of(messages, tools)
        for kind in lost:
            if kind not in self._reported:
                self._reported.add(kind)
                logger.warning("%s", lost_warning(kind))
        return lost

    def render(
        self,
        messages: Sequence[Message],
        tools: _Tools = None,
        add_generation_prompt: bool = True,
        template_kwargs: JSONMapping | None = None,
    ) -> list[int]:
        """Return the prompt's token ids. `template_kwargs` are the template's own switches, such as `enable_thinking`.

        Raises:
            ConfigError: if a message is malformed, or if the template refuses it.
        """
        try:  # siblings of a group send the same prompt
            key = orjson.dumps((messages, tools, add_generation_prompt, template_kwargs))
        except TypeError:
            key = None
        ids = self._memo.get(key) if key else None
        if ids is None:
            text = self.render_marked(messages, tools, add_generation_prompt, template_kwargs)
            ids = self.control_tokens.encode(text)
        if key:
            self._memo[key] = ids
            self._memo.move_to_end(key)
            if len(self._memo) > _MEMO_SIZE:
                self._memo.popitem(last=False)
        return list(ids)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: _Tools = None,
        add_generation_prompt: bool = True,
        template_kwargs: JSONMapping | None = None,
    ) -> str:
        """Return the prompt as text, special tokens included."""
        marked = self.render_marked(messages, tools, add_generation_prompt, template_kwargs)
        return self.control_tokens.shown(marked)

    def printed_answer(self, asked: Message, answer: Message, tools: _Tools) -> tuple[list[int], list[int]]:
        """Return the ids of an answer as the template prints it, and the ids of the prompt before it.

        Tokens of the prompt that the template prints differently before an answer are left out of the prompt.
        """
        prompt = self.render([asked], tools)
        whole = self.render([asked, answer], tools, add_generation_prompt=False)
        start = common_length(prompt, whole)
        return whole[start:], prompt[:start]

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: _Tools = None,
        add_generation_prompt: bool = True,
        template_kwargs: JSONMapping | None = None,
    ) -> str:
        """Return the text for `control_tokens.encode`, in which control tokens quoted in messages are placeholders."""
        if not messages:
            raise ConfigError("messages=[]: send at least one message")
        _check_kwargs(template_kwargs)
        shape, control = self.shape, self.control_tokens
        normal = [_normal(index, message) for index, message in enumerate(messages)]
        dropped = (place for place, each in enumerate(normal) if shape.lost.get(_KINDS.get(each["role"], "")) == "")
        if (place := next(dropped, None)) is not None:
            raise _refusal(_name(self.tokenizer), messages[: place + 1], None)
        shaped = [control.hidden(message) for message in shape.messages(normal)]
        try:
            tools_in_form = shape.tools(tools)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"tools={tools!r:.80}: use a list of objects in the OpenAI format ({error})") from error
        shaped_tools = control.hidden_value(tools_in_form)
        options = {"add_generation_prompt": add_generation_prompt, **control.hidden_value(template_kwargs or {})}
        try:
            return self._apply(shaped, shaped_tools, **options)
        except ConfigError:  # the template exceeds its limits
            raise
        except Exception as error:  # a template is a program of its author: it may raise anything
            if shaped_tools and self._error_of(shaped, None, options) is None:
                raise ConfigError(
                    f"tools={tools!r:.80}: the chat template of {_name(self.tokenizer)!r} refuses them "
                    f"({type(error).__name__}: {error}): use a list of objects in the OpenAI format"
                ) from error
            ends = range(1, len(shaped))
            errors = (self._error_of(shaped[:end], shaped_tools, options) for end in ends)
            refused = next((place for place, found in enumerate(errors) if found == str(error)), len(ends))
            raise _refusal(_name(self.tokenizer), messages[: refused + 1], error) from error

    def _apply(self, messages: Sequence[Message], tools: _Tools, **options: object) -> str:
        from rllm.parser.bounded_template import render_bounded  # needs jinja2, which a gateway may lack

        return render_bounded(self.tokenizer, messages, tools, options)

    def _error_of(self, messages: Sequence[Message], tools: _Tools, options: JSONMapping) -> str | None:
        """Return the error with which the template refuses messages, or None."""
        try:
            self._apply(messages, tools, **options)
        except Exception as error:
            return str(error)
        return None


def lost_warning(kind: str) -> str:
    """Return a warning about content that a template leaves out, with the remedy."""
    return f"the chat template leaves out {kind}, so the model does not see them: {remedy_for(kind)}"


def remedy_for(kind: str) -> str:
    """Return the remedy for content of a kind that a template leaves out or refuses."""
    return _REMEDIES.get(kind, _NAME_OF_CHOICE)


def _name(tokenizer: Tokenizer) -> str:
    """Return the folder or hub id of a tokenizer, for errors."""
    return str(getattr(tokenizer, "name_or_path", "") or "<in memory>")


def _refusal(name: str, messages: Sequence[Message], error: Exception | None) -> ConfigError:
    """Return the error for the last of these messages, which the chat template of the model `name` refuses.

    `error` is the template's own; None if it leaves out messages of this role.
    """
    place, message = len(messages) - 1, messages[-1]
    for number, arguments in enumerate(arguments_of(message)):
        if not isinstance(arguments, Mapping):
            return ConfigError(
                f"messages[{place}].tool_calls[{number}].function.arguments={arguments!r:.80}: the chat template of "
                f"{name!r} takes a JSON object only ({type(error).__name__}: {error}): send one, or {_NAME_OF_CHOICE}"
            )
    role = "system" if message["role"] == "developer" else message["role"]
    kind = _KINDS.get(role, CALLS if message.get("tool_calls") else "")
    remedy = f"send messages as it takes them, or {_NAME_OF_CHOICE}"
    if place and messages[-2]["role"] == role:
        remedy = f"join it with the message before it, which has the same role, or {_NAME_OF_CHOICE}"
    verb, why = (
        ("leaves out", f"it prints no {kind}") if error is None else ("refuses", f"{type(error).__name__}: {error}")
    )
    return ConfigError(
        f"the chat template {verb} messages[{place}] (role {message['role']!r}): {why} (the template of {name!r}): "
        f"{_REMEDIES.get(kind, remedy)}"
    )


def _normal(index: int, message: Message) -> Message:
    """Return a message with text as content, and with reasoning under each of the names that templates have for it."""
    check_role(index, message)
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = "system" if message["role"] == "developer" else message["role"]
    normal["content"] = _text_content(index, message.get("content"))
    if not isinstance(message.get("tool_calls"), Sequence | None):
        raise ConfigError(f"messages[{index}].tool_calls={message['tool_calls']!r:.80}: use a list of calls")
    if "reasoning" in normal:
        normal.setdefault("reasoning_content", normal["reasoning"])
    if "reasoning_content" in normal:  # gpt-oss's template has a name of its own
        normal.setdefault("thinking", normal["reasoning_content"])
    return normal


def is_long(messages: Sequence[object]) -> bool:
    """Return whether rendering these messages would block an event loop for too long."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return sum(len(content if isinstance(content, str) else repr(content)) for content in contents) > _LONG


def _check_kwargs(kwargs: object) -> None:
    """Refuse a template in a request, a program that may run forever and does not match the template's hash."""
    if not isinstance(kwargs, Mapping | None):
        raise ConfigError(f"chat_template_kwargs={kwargs!r:.80}: use an object, such as {{'enable_thinking': false}}")
    if kwargs and "chat_template" in kwargs:
        raise ConfigError(
            "chat_template_kwargs.chat_template: a request cannot replace the model's template; leave it out"
        )


def check_role(index: int, message: object) -> None:
    """Raise ConfigError for a value that is not a message."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"messages[{index}]={message!r}: use an object with a string 'role'")


def _text_content(index: int, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ConfigError(f"messages[{index}].content={content!r}: use a string or a list of text parts")
    texts: list[str] = []
    for part in content:
        kind = str(part.get("type") or "text") if isinstance(part, Mapping) else type(part).__name__
        if isinstance(part, str):
            texts.append(part)
        elif kind in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        else:
            raise ConfigError(
                f"messages[{index}].content has a part of type {kind!r}: this model reads text parts only"
            )
    return "".join(texts)
