"""Tokens that follow a sampled answer: the text that its template prints after it, and nothing before.

Only the text after the answer comes from the template (`append_only`), however it would print the answer itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import islice

from rllm.errors import ConfigError
from rllm.parser.append_only import (
    PROBE,
    AppendOnlyRenderer,
    ReasoningHabits,
    bare_message,
    closing_of,
    is_assistant,
    stand_in_past,
    tool_answer,
)
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.decoding import Tokenizer, special_tokens
from rllm.types import JSONMapping, Message, text_of

_NO_REASONING = ReasoningHabits(prints_field=False, prints_tags=False)
"""Answers are earlier turns here, which are rendered without reasoning."""
_MOST_STOP_TOKENS = 64
"""Maximum number of tokens of a stop string that ended an answer, and of the text sampled with it."""
_TURNS = ("tool", "answer", "tool", "tool", "answer", "answer", "tool", "answer")
"""Turns of the conversation that shows whether a template's text depends on distant messages."""


class Continuation:
    """Prompts that continue from sampled answers, with one tokenizer's template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = special_tokens(tokenizer)
        self._special_ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(self._special_tokens)))

    def prompt_ids(
        self,
        known_ids: Sequence[int],
        messages: Sequence[Message],
        num_known: int,
        tools: Sequence[JSONMapping] | None = None,
        template_kwargs: JSONMapping | None = None,
        *,
        appended_text: str = "",
    ) -> Sequence[int]:
        """Return the prompt for the next answer.

        Args:
            known_ids: the tokens of the first messages as they were sampled; the last of them is an answer. For an
                array, the prompt is an array, too, since lists of a hundred thousand tokens take milliseconds to copy.
            messages: the whole conversation.
            num_known: number of messages that `known_ids` cover.
            tools: as for `ChatTemplate.render`.
            template_kwargs: as for `ChatTemplate.render`.
            appended_text: text at the end of the last known answer that the model did not sample; it may begin with the
                stop string that ended the answer, which `known_ids` contain.

        Raises:
            ConfigError: if the template refuses the messages, or cannot be rendered append-only here; or if the model
                ended the answer itself, so that nothing can be appended to it.
        """
        control = self._template.control_tokens

        def printed(these: Sequence[Message], ask: bool) -> str:
            text = self._template.render_marked(these, tools, ask, template_kwargs)
            return text if ask else text.removesuffix(self._closing)

        renderer = AppendOnlyRenderer(printed, self._special_tokens, _NO_REASONING, keep_reasoning=True)
        past = list(messages[:num_known])
        try:
            end, rest = self._following(renderer, past, messages[num_known:])
        except ConfigError:
            if not (past[-1].get("tool_calls") and past[-1].get("content")):
                raise
            # Gemma 4 prints an answer's text after the results of its calls, although it is written before the calls.
            past[-1] = {**past[-1], "content": ""}
            end, rest = self._following(renderer, past, messages[num_known:])
        if known_ids[-1] not in self._special_ids:  # it was cut off, or ended by a stop string
            rest = end + rest
        elif not end:  # GLM 4 ends an answer with the token that begins the next turn
            rest = rest.removeprefix(self._tokenizer.convert_ids_to_tokens(known_ids[-1]) or "")
        if appended_text:
            content = text_of(messages[num_known - 1]).removesuffix(appended_text)
            more = {**bare_message(past[-1]), "content": self._not_sampled_of(appended_text, content, known_ids)}
            rest = control.hidden(more)["content"] + rest
        following = control.encode(rest)
        return known_ids + array("I", following) if isinstance(known_ids, array) else [*known_ids, *following]

    def _following(
        self, renderer: AppendOnlyRenderer, past: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[str, str]:
        """See the function `_following`. For a long conversation, only the messages near its ends are rendered.

        Each turn would otherwise take longer than the one before. A template whose text depends on the other messages
        as well is detected by an example, or by a comparison of both ways whenever a conversation has doubled.
        """
        near = near_ends(past)
        if len(near) == len(past) or self._needs_all:
            return _following(renderer, past, messages)
        try:
            found = _following(renderer, near, messages)
        except ConfigError:
            return _following(renderer, past, messages)
        if (len(past) // 2).bit_count() > 1:
            return found
        whole = _following(renderer, past, messages)
        self._needs_all = found != whole
        return whole

    @cached_property
    def _needs_all(self) -> bool:
        """True if what the template prints after an answer depends on more than the messages near it."""
        return any(self._depends_on_all(turns) for turns in (_TURNS, ("answer",) * len(_TURNS)))

    def _depends_on_all(self, turns: Sequence[str]) -> bool:
        tools = [{"type": "function", "function": {"name": "tool", "parameters": {"type": "object"}}}]

        def printed(these: Sequence[Message], ask: bool) -> str:
            return self._template.render_marked(these, tools if "tool" in turns else None, ask)

        renderer = AppendOnlyRenderer(printed, self._special_tokens, _NO_REASONING, keep_reasoning=True)
        past: list[Message] = [{"role": "user", "content": PROBE}]
        try:
            for turn in turns:
                answer: Message = {"role": "assistant", "content": PROBE}
                following: Message = {"role": "user", "content": PROBE}
                if turn == "tool":
                    answer = {**stand_in_past({"role": "tool"})[-1], "content": ""}
                    following = tool_answer(answer)
                past.append(answer)
                if _following(renderer, past, [following]) != _following(renderer, near_ends(past), [following]):
                    return True
                past.append(following)
        except ConfigError:  # the template takes no such turn, so no conversation has one
            pass
        return False

    @cached_property
    def _closing(self) -> str:
        return closing_of(lambda these, ask: self._template.render_marked(these, None, ask), self._special_tokens)

    def _not_sampled_of(self, appended_text: str, content: str, known_ids: Sequence[int]) -> str:
        """Return the part of `appended_text` that was not sampled, which usually follows a stop string."""
        tail = known_ids[-len(content.encode()) - _MOST_STOP_TOKENS :]
        text: str = self._tokenizer.decode(list(tail), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        _, found, sampled = text.rpartition(content)
        if known_ids[-1] in self._special_ids or not found or not appended_text.startswith(sampled):
            raise ConfigError(
                f"the agent appended {appended_text[:80]!r} to an answer, but only one that ended at a stop string can "
                "be extended"
            )
        return appended_text.removeprefix(sampled)


def near_ends(past: Sequence[Message]) -> Sequence[Message]:
    """Return a conversation without what lies between its first user message and its last two answers."""
    begin = next((place for place, message in enumerate(past) if message.get("role") == "user"), 0) + 1
    answers = list(islice((place for place in reversed(range(len(past))) if is_assistant(past[place])), 3))
    return past if len(answers) < 3 or answers[1] <= begin else [*past[:begin], *past[answers[1] :]]


def _following(renderer: AppendOnlyRenderer, past: Sequence[Message], messages: Sequence[Message]) -> tuple[str, str]:
    """Return the special token that ends the last past answer, and what follows it up to the next answer."""
    past = [bare_message(message) for message in past]
    end, after = renderer.end_of_past_answer(past[:-1], past[-1])
    return end, after + renderer.text(past, messages, ask=True)
