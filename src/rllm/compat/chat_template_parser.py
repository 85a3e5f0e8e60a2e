"""Conversations to text, ids and masks that only ever grow, and a model's ids back to its answer.

For data that exists as messages only (supervised examples, a prompt built by hand). Steps that were sampled are trained
on the ids of their traces and never come here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from rllm.errors import ConfigError
from rllm.parser.append_only import (
    PROBE,
    AppendOnlyRenderer,
    ReasoningHabits,
    bare_message,
    closing_of,
    is_assistant,
    stand_in_past,
)
from rllm.parser.chat_template import ChatTemplate, check_role
from rllm.parser.decoding import OPEN, TextDecoder, special_tokens, split_reasoning
from rllm.parser.tool_formats import ParsedText
from rllm.parser.tool_parser import tool_format_of_template, tool_parser
from rllm.types import JSONMapping, JSONObject, Message

logger = logging.getLogger(__name__)

_LAST_PROMPT_TOKENS = 8

Tools = Sequence[JSONMapping]


class ChatTemplateParser:
    """Texts, ids and masks of conversations for the chat template of any tokenizer.

    Properties of a model family are found by rendering probes. The text of some messages is always a prefix of the text
    of more messages. Templates that rewrite the past (strip earlier reasoning, end the last turn differently) then
    print another text; `verify_equivalence` checks for it.
    """

    def __init__(self, tokenizer: Any, *, disable_thinking: bool = False) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self._has_warned = False
        self._thinking = not disable_thinking
        self._template_kwargs = {"enable_thinking": False, "thinking": False} if disable_thinking else {}
        self._special_tokens = special_tokens(tokenizer)
        format_name = tool_format_of_template(self.template.text)
        self._tool_parser = tool_parser(format_name) if format_name else None
        markup = self._tool_parser.markup if self._tool_parser else ()
        self._decoder = TextDecoder(tokenizer, markup=markup)

    @classmethod
    def get_parser(
        cls, tokenizer: object, processor: object = None, disable_thinking: bool = False
    ) -> ChatTemplateParser:
        """Return the parser for this tokenizer's template; `disable_thinking` requests answers without reasoning.

        Raises:
            ConfigError: if there is no template, or a processor: images are not supported.
        """
        if processor is not None:
            raise ConfigError(f"processor={type(processor).__name__}: only text is read; leave it out")
        return cls(tokenizer, disable_thinking=disable_thinking)

    def parse(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        is_first_msg: bool = False,
        tools: Tools | None = None,
        accumulate_reasoning: bool = False,
    ) -> str:
        """Return the messages as text.

        Args:
            messages: one or more.
            add_generation_prompt: end with the generation prompt. Without it a turn that the template could still
                extend, by another tool's answer for example, is left open.
            is_first_msg: start a conversation, with everything that a template prints first. Otherwise the text
                continues an earlier one; messages that begin with a system prompt always start a conversation.
            tools: the tools, in the OpenAI format.
            accumulate_reasoning: print every answer with its reasoning, as it was when it was the newest message.
                Otherwise print each without, as the template prints earlier answers.

        Raises:
            ConfigError: if the template refuses the messages, or cannot be rendered append-only.
        """
        _check(messages)
        begins = is_first_msg or messages[0]["role"] in ("system", "developer")
        past = [] if begins else stand_in_past(messages[0])
        renderer = self._renderer(tools, keep_reasoning=accumulate_reasoning)
        return self.template.control_tokens.shown(renderer.text(past, messages, ask=add_generation_prompt))

    def parse_completion(
        self, completion_ids: Sequence[int], prompt_ids: Sequence[int] | None = None, tools: Tools | None = None
    ) -> JSONObject:
        """Return `content`, `reasoning` and `tool_calls` of a model's answer, the calls in the OpenAI format.

        The end of the prompt decides whether the answer begins inside `<think>`; the default is the prompt of a first
        answer. `tools` are the request's tools, for formats that need their schemas.
        """
        prompt = self._first_request if prompt_ids is None else self._decoder.text(prompt_ids[-_LAST_PROMPT_TOKENS:])
        text = self._decoder.text(completion_ids)
        split = split_reasoning(text, starts_open=prompt.rstrip().endswith(OPEN))
        parser = self._tool_parser.for_tools(tools or ()) if self._tool_parser else None
        parsed = parser.parse(split.answer) if parser else ParsedText(content=split.answer)
        return {
            "content": parsed.content,
            "reasoning": split.reasoning or parsed.reasoning,
            "tool_calls": parsed.tool_calls,
        }

    def tokenize_and_mask(
        self, messages: Sequence[Message], tools: Tools | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of the prompt and of the last message, an answer, with a mask over the latter.

        The prompt is the one that an engine would send, so it contains the reasoning of earlier answers only if the
        template keeps it. The mask is 1 for tokens that the model writes, its end of turn included.

        Raises:
            ConfigError: if the last message is not an assistant's, or see `parse`.
        """
        _check(messages)
        if not is_assistant(messages[-1]):
            raise ConfigError(f"messages[-1] has role {messages[-1]['role']!r}: end with the assistant's answer")
        past = [bare_message(message) for message in messages[:-1]]
        renderer = self._renderer(tools, keep_reasoning=True)
        turn = renderer.answer(past, messages[-1])
        end = "" if renderer.has_end(turn) else renderer.next_turn_token(past, messages[-1])
        self._note_end(turn.generated + end)
        prompt_ids = self.template.render(messages[:-1], tools, template_kwargs=self._template_kwargs)
        return prompt_ids, *self._masked([(turn.generated + end, 1), (turn.after, 0)], turn.prompt)

    def tokenize_and_mask_cumulative(
        self, messages: Sequence[Message], tools: Tools | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the ids up to the first answer, the ids of everything after it, and a mask over the latter.

        Every answer keeps its reasoning. Texts of the model, other messages, and generation prompts are encoded
        separately, as they were when the answers were sampled. The mask is 1 for tokens that the model writes, its ends
        of turn included.

        Raises:
            ConfigError: if there is no answer among the messages, or see `parse`.
        """
        _check(messages)
        if not any(map(is_assistant, messages)):
            raise ConfigError("messages hold no assistant's answer: there is nothing to learn")
        turns = self._renderer(tools, keep_reasoning=True).learned_turns(messages)
        self._note_end(next(turn.generated for turn in reversed(turns) if turn.generated))
        parts = [part for turn in turns for part in ((turn.prompt, 0), (turn.generated, 1), (turn.after, 0))]
        first = next(place for place, (text, mask) in enumerate(parts) if mask and text)
        prompt = "".join(text for text, _ in parts[:first])
        return self._encode(prompt), *self._masked(parts[first:], prompt)

    def verify_equivalence(
        self, messages: Sequence[Message], tools: Tools | None = None, accumulate_reasoning: bool = True
    ) -> bool:
        """Return whether the append-only text equals the template's own text.

        If not, a model trained on whole conversations sees another past than an engine would send it.
        """
        _check(messages)
        ask = not is_assistant(messages[-1])
        text = self._renderer(tools, keep_reasoning=accumulate_reasoning).text([], messages, ask=ask)
        return text == self._print(tools, messages, ask)

    def _note_end(self, learned: str) -> None:
        """Log once if an answer is learned without a token that ends it."""
        if not self._has_warned and not any(learned.endswith(token) for token in self._special_tokens):
            self._has_warned = True
            logger.warning(
                "the chat template prints no token at the end of an answer (%r), so the model does not learn to stop: "
                "use a template that ends each turn with a special token",
                learned[-40:],
            )

    def _print(self, tools: Tools | None, messages: Sequence[Message], ask: bool) -> str:
        text = self._print_all(tools, messages, ask)
        return text if ask else text.removesuffix(self._closing)

    def _print_all(self, tools: Tools | None, messages: Sequence[Message], ask: bool) -> str:
        return self.template.render_marked(messages, tools, ask, self._template_kwargs)

    @cached_property
    def _closing(self) -> str:
        return closing_of(partial(self._print_all, None), self._special_tokens)

    def _renderer(self, tools: Tools | None, *, keep_reasoning: bool) -> AppendOnlyRenderer:
        return AppendOnlyRenderer(
            partial(self._print, tools),
            self._special_tokens,
            self._habits,
            keep_reasoning=keep_reasoning,
            thinking=self._thinking,
        )

    @cached_property
    def _habits(self) -> ReasoningHabits:
        return ReasoningHabits.of(partial(self._print, None))

    @cached_property
    def _first_request(self) -> str:
        return self._print(None, [{"role": "user", "content": PROBE}], True)

    def _masked(self, parts: Sequence[tuple[str, int]], before: str = "") -> tuple[list[int], list[int]]:
        """Return the ids of texts with masks; neighbours of the same mask are encoded as one text."""
        all_ids: list[int] = []
        masks: list[int] = []
        for mask, group in groupby((part for part in parts if part[0]), key=lambda part: part[1]):
            text = "".join(text for text, _ in group)
            # Tokenizers may treat the very start of a text differently.
            head, whole = self._encode(before), self._encode(before + text)
            ids = whole[len(head) :] if whole[: len(head)] == head else self._encode(text)
            all_ids += ids
            masks += [mask] * len(ids)
            before = text
        return all_ids, masks

    def _encode(self, text: str) -> list[int]:
        return self.template.control_tokens.encode(text)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise ConfigError("messages=[]: send at least one message")
    for index, message in enumerate(messages):
        check_role(index, message)
