"""The tokens that follow an answer which is kept as it was sampled: what its template prints after it, and nothing before.

A template is asked what it adds behind the answer (`append_only`), whatever it would make of the answer itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.parser.append_only import AppendOnlyRenderer, ReasoningHabits, bare_message
from rllm.parser.chat_template import ChatTemplate
from rllm.types import Message

_NO_REASONING = ReasoningHabits(prints_field=False, prints_tags=False)
"""Answers lie in the past here, and are rendered without any."""


class Continuation:
    """Goes on from sampled answers with one tokenizer's template."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = [*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)]
        self._special_tokens = frozenset(filter(None, special))
        self._special_ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(self._special_tokens)))

    def prompt_ids(
        self,
        known_ids: Sequence[int],
        messages: Sequence[Message],
        num_known: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt that asks for the next answer.

        Args:
            known_ids: the tokens of the first messages as they were sampled; the last of them is an answer.
            messages: the whole conversation.
            num_known: how many messages `known_ids` are of.
            tools: as for `ChatTemplate.render`.
            template_kwargs: likewise.

        Raises:
            ConfigError: if the template refuses the messages, or cannot be rendered append-only here.
        """

        def printed(these: Sequence[Message], ask: bool) -> str:
            return self._template.render_text(these, tools, ask, template_kwargs)

        renderer = AppendOnlyRenderer(printed, self._special_tokens, _NO_REASONING, keep_reasoning=True)
        past = [bare_message(message) for message in messages[:num_known]]
        answer = renderer.answer(past[:-1], past[-1])
        rest = answer.after + renderer.text(past, messages[num_known:], ask=True)
        if known_ids[-1] not in self._special_ids:  # it was cut off, or ended by a stop string
            rest = self._end_of(answer.generated) + rest
        ids: list[int] = self._tokenizer.encode(rest, add_special_tokens=False)
        return [*known_ids, *ids]

    def _end_of(self, generated: str) -> str:
        """The special token that ends an answer."""
        ends = (token for token in self._special_tokens if generated.endswith(token))
        return max(ends, key=len, default="")
