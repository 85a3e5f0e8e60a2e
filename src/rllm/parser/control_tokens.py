"""Control tokens quoted in messages, kept apart from those that the chat template prints.

A tokenizer reads `<|im_end|>` as the end of a turn wherever the text has it, so the output of a tool could forge turns,
and an answer that quotes the token would be learned as two answers. Each quoted token is replaced by a placeholder
before the template runs, and the placeholder is encoded as plain text afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from rllm.parser.decoding import MARKUP, Tokenizer, special_tokens
from rllm.parser.tool_parser import tool_format_of_template, tool_parser
from rllm.types import Message

_TAGS = frozenset((*MARKUP, "<tool_response>", "</tool_response>"))
"""Tags that prompts quote to teach a format: the model must read the very tokens that it is to write."""
_CONTEXT = "\n"
"""Text in front of a piece while it is encoded: some tokenizers add a space to the very first word."""


class ControlTokens:
    """Control tokens of one tokenizer with one chat template.

    These are its special tokens, and others that the template prints around turns, such as DeepSeek's `<｜User｜>`.
    Tags such as `<think>` and `<tool_call>` stay what they are in any message.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._placeholder = f"{secrets.randbelow(9 * 10**19) + 10**19}"
        """Digits, which no template escapes, trims or writes in capitals; random, so that no text has them."""
        self._plain: dict[str, list[int]] = {}
        """Ids of the tokens' strings, written out."""
        self._find_placeholder = re.compile(self._placeholder + r"(\d{5})")

    @cached_property
    def strings(self) -> list[str]:
        """The tokens' strings, in a fixed order; tags that any message may have are left out."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        around_turns = {
            token.content for token in added if re.search("[|｜]", token.content) and token.content in self._template
        }
        return sorted((special_tokens(self._tokenizer) | around_turns) - _TAGS)

    def quoted_in(self, messages: Iterable[Message]) -> list[str]:
        """Return the control tokens in the text of messages."""
        found: set[str] = set()

        def look(text: str, pattern: re.Pattern[str]) -> str:
            found.update(pattern.findall(text))
            return text

        for message in messages:
            _map_strings(message, partial(look, pattern=self._pattern_of(message)))
        return sorted(found)

    def hidden(self, message: Message) -> Message:
        """Return the message with a placeholder for each control token in its text."""
        pattern = self._pattern_of(message)
        replaced: Message = _map_strings(message, lambda text: pattern.sub(self._placeholder_of, text))
        return replaced

    def hidden_value(self, value: Any) -> Any:
        """Return tools, or arguments of the template, with a placeholder for each control token in them."""
        return _map_strings(value, lambda text: self._pattern.sub(self._placeholder_of, text))

    def shown(self, text: str) -> str:
        """Return a rendered text with the control tokens that the placeholders stand for."""
        return self._find_placeholder.sub(lambda match: self.strings[int(match[1])], text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text; placeholders are encoded as plain text."""
        if self._placeholder not in text:
            return self._encode(text)
        ids: list[int] = []
        for place, piece in enumerate(self._find_placeholder.split(text)):
            if place % 2:
                token = self.strings[int(piece)]
                if token not in self._plain:
                    self._plain[token] = self._plain_ids(token)
                ids += self._plain[token]
            elif piece:
                ids += self._after_context(piece) if place else self._encode(piece)
        return ids

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _pattern_of_any(self.strings)

    @cached_property
    def _pattern_in_answers(self) -> re.Pattern[str]:
        return _pattern_of_any([token for token in self.strings if token not in self._written_by_models])

    def _pattern_of(self, message: Message) -> re.Pattern[str]:
        return self._pattern_in_answers if message.get("role") == "assistant" else self._pattern

    @cached_property
    def _written_by_models(self) -> frozenset[str]:
        """Tokens in an answer's content that the model wrote as control tokens.

        These are the markup of calls that an agent parses by itself, and of reasoning, at which the template cuts the
        content.
        """
        name = tool_format_of_template(self._template)
        parser = tool_parser(name) if name else None
        calls = parser.markup if parser and not parser.reads_every_answer else ()
        cut = (token for token in self.strings if re.search(rf"split\(\s*['\"]{re.escape(token)}['\"]", self._template))
        return frozenset((*calls, *cut))

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {token: number for number, token in enumerate(self.strings)}

    def _placeholder_of(self, match: re.Match[str]) -> str:
        return f"{self._placeholder}{self._numbers[match[0]]:05}"

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _after_context(self, text: str) -> list[int]:
        return _ids_after(self._context_ids, self._encode(_CONTEXT + text)) or self._encode(text)

    @cached_property
    def _context_ids(self) -> list[int]:
        return self._encode(_CONTEXT)

    def _plain_ids(self, token: str) -> list[int]:
        """Return the ids of a control token's string as ordinary text."""
        plain = self._without_added_tokens
        if plain is None:
            return [*self._after_context(token[:1]), *self._after_context(token[1:])]
        head, whole = (plain.encode(text, add_special_tokens=False).ids for text in (_CONTEXT, _CONTEXT + token))
        ids: list[int] = _ids_after(head, whole) or plain.encode(token, add_special_tokens=False).ids
        return ids

    @cached_property
    def _without_added_tokens(self) -> Any:
        """The tokenizer without added tokens; the model's vocabulary is shared, not copied. None for a slow tokenizer.

        `split_special_tokens` would do it too, but sets a switch of the tokenizer that other threads are using.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        plain = type(backend)(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(plain, part, getattr(backend, part))
        return plain


def _ids_after(head: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Return the ids after the head's ids; empty if the following text changed the head's."""
    return list(whole[len(head) :]) if list(whole[: len(head)]) == list(head) else []


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with each string in it changed, keys included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
        case list() | tuple():
            return [_map_strings(item, change) for item in value]
        case _:
            return value


def _pattern_of_any(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of the longest of the tokens that begins at a place; some tokenizers have thousands of them."""
    return re.compile(_alternatives(sorted(tokens)) if tokens else r"(?!)")


def _alternatives(words: Sequence[str]) -> str:
    branches = [
        re.escape(first) + _alternatives([word[1:] for word in group])
        for first, group in groupby(words, key=lambda word: word[:1])
        if first
    ]
    any_of = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return "" if not branches else f"(?:{any_of})?" if "" in words else any_of
