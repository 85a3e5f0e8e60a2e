"""Rendering of messages as text that only grows, with a chat template that may rewrite what it printed before.

To find what a message *adds*, the template prints the conversation with the message and without it. If the template
rewrites the past (strips reasoning, moves the system prompt, ends the last turn differently), the two texts differ
early; they are then compared from the last earlier message on, which is found by a mark in place of its content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from rllm.errors import ConfigError
from rllm.parser.decoding import CLOSE, OPEN, split_reasoning
from rllm.types import Message

PrintChat: TypeAlias = Callable[[Sequence[Message], bool], str]
"""The template: messages, and whether to add the generation prompt."""

MARK, PROBE, LATER = "rllm-mark-6c1f", "an-answer-0b7e", "a-later-one-93d2"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Text added by an assistant's message, or by the messages between two of them."""

    prompt: str
    """Text that the model reads; for an assistant's message, the generation prompt."""
    generated: str = ""
    """Text that the model writes, its end of turn included."""
    after: str = ""
    """White space that the template prints after an end of turn."""

    @property
    def text(self) -> str:
        return self.prompt + self.generated + self.after


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningHabits:
    """Treatment of an answer's reasoning by a template."""

    prints_field: bool
    """It prints reasoning from a message's field, at least while the message is the last one."""
    prints_tags: bool
    """It prints reasoning in `<think>` tags that is part of the content."""
    opening: str = f"{OPEN}\n"
    """Text before reasoning that the template leaves out of an answer."""
    closing: str = f"\n{CLOSE}\n\n"
    """Text after it."""

    @classmethod
    def of(cls, print_chat: PrintChat) -> ReasoningHabits:
        thought = {"role": "assistant", "content": PROBE, "reasoning_content": MARK}
        tagged = {"role": "assistant", "content": f"{OPEN}\n{MARK}\n{CLOSE}\n\n{PROBE}"}
        prints_field, prints_tags = (_prints_mark(print_chat, answer) for answer in (thought, tagged))
        if prints_field or (around := _around_mark(print_chat)) is None:
            return cls(prints_field=prints_field, prints_tags=prints_tags)
        return cls(prints_field=prints_field, prints_tags=prints_tags, opening=around[0], closing=around[1])


class AppendOnlyRenderer:
    """Renders one conversation after another with the same template and tools.

    With `keep_reasoning` every answer is printed as it was when it was the newest message. Without it every answer is
    printed without reasoning, as the template prints an earlier one.
    """

    def __init__(
        self,
        print_chat: PrintChat,
        special_tokens: Collection[str],
        habits: ReasoningHabits,
        *,
        keep_reasoning: bool,
        thinking: bool = True,
    ) -> None:
        """`thinking=False`: the model is asked not to think, so no answer has reasoning."""
        self._print = print_chat
        self._special = sorted(special_tokens, key=len, reverse=True)
        self._habits = habits
        self._keep_reasoning = keep_reasoning
        self._thinking = thinking

    def text(self, past: Sequence[Message], messages: Sequence[Message], *, ask: bool = False) -> str:
        """Return the text that the messages add to a conversation; `ask` adds the generation prompt.

        Without it, a turn that the template could still extend (for example by another tool's answer) is left open.
        """
        text = "".join(turn.text for turn in self.turns(past, messages, open_end=not ask))
        return text + self._request([*past, *map(bare_message, messages)]) if ask else text

    def turns(self, past: Sequence[Message], messages: Sequence[Message], *, open_end: bool = False) -> list[Turn]:
        """Return the messages' parts of the text, in order.

        Raises:
            ConfigError: if the template refuses the messages, or if it cannot be rendered append-only.
        """
        past = [bare_message(message) for message in past]
        turns: list[Turn] = []
        num_left = len(messages)
        for is_answer, group in groupby(messages, key=is_assistant):
            block = list(group)
            num_left -= len(block)
            if is_answer:
                for message in block:
                    turns.append(self.answer(past, message))
                    past.append(bare_message(message))
            else:
                turns.append(Turn(prompt=self._block(past, block, open_end=open_end and not num_left)))
                past += block
        return turns

    def answer(self, past: Sequence[Message], message: Message) -> Turn:
        """Return the turn of an assistant's message."""
        if not past:
            raise ConfigError("messages[0].role='assistant': begin the conversation with a system or user message")
        if not self._keep_reasoning:
            return Turn(prompt=self._in_the_past(past, bare_message(message)))
        request = self._request(past)
        written = self._written(past, message, request)
        ended = written.rstrip()
        if not any(ended.endswith(token) for token in self._special):
            ended = written
        return Turn(prompt=request, generated=ended, after=written[len(ended) :])

    def learned_turns(self, messages: Sequence[Message]) -> list[Turn]:
        """Return the turns of a whole conversation, each answer with the token that ends it.

        GLM's templates print nothing after an answer: the model ends it with the token that begins the next turn.
        """
        turns = self.turns([], messages)
        for place, turn in enumerate(turns):
            if not turn.generated or self.has_end(turn):
                continue
            if place + 1 == len(turns):
                end = self.next_turn_token(messages[:-1], messages[-1])
            elif turns[place + 1].generated:  # an answer right after this one
                continue
            else:
                following = turns[place + 1].prompt
                end = self._first_token(following)
                turns[place + 1] = Turn(prompt=following.removeprefix(end))
            turns[place] = replace(turn, generated=turn.generated + end)
        return turns

    def end_of_past_answer(self, past: Sequence[Message], message: Message) -> tuple[str, str]:
        """Return the special token that ends an answer, and the white space that the template prints after it.

        The answer's beginning does not matter here: some templates print it differently from their generation prompt.
        """
        written = self._added([bare_message(item) for item in past], [bare_message(message)])
        ended = written.rstrip()
        end = next((token for token in self._special if ended.endswith(token)), "")
        return end, written[len(ended) :] if end else ""

    def has_end(self, turn: Turn) -> bool:
        """Return whether the template prints a special token at the end of an answer."""
        return any(turn.generated.endswith(token) for token in self._special)

    def next_turn_token(self, past: Sequence[Message], message: Message) -> str:
        """Return the special token that begins the turn after an answer; empty if the turn begins with other text."""
        past, answer = [bare_message(item) for item in past], bare_message(message)
        follower = tool_answer(answer) if answer.get("tool_calls") else {"role": "user", "content": PROBE}
        try:
            return self._first_token(self._added([*past, answer], [follower]))
        except ConfigError:
            return ""

    def _first_token(self, text: str) -> str:
        return next((token for token in self._special if text.startswith(token)), "")

    def _written(self, past: Sequence[Message], message: Message, request: str) -> str:
        """Return the answer as the model wrote it after the request, and the text that the template prints after it.

        Reasoning that the template leaves out is put first, where the model wrote it.
        """
        opens = request.rstrip().endswith(OPEN)
        reasoning, answer = split_message(message, starts_open=opens)
        reasoning = reasoning if self._thinking else ""
        by_field = bool(reasoning) and self._habits.prints_field
        as_it_is = bool(reasoning) and self._habits.prints_tags and OPEN in str(message.get("content"))
        if by_field or as_it_is:
            full = self._added(past, [{**answer, "reasoning_content": reasoning} if by_field else message])
            if full.startswith(request):
                return full.removeprefix(request)
        full = self._added(past, [answer])
        if full.startswith(request):
            habits = self._habits
            thought = f"{habits.opening}{reasoning}{habits.closing}" if reasoning and not opens else reasoning
            return thought + full.removeprefix(request)
        before = request.rpartition(OPEN)[0] if opens else request
        if opens and (rest := full.removeprefix(before + OPEN).lstrip()).startswith(CLOSE):
            return f"{reasoning}\n{rest}" if reasoning else rest  # Nemotron prints empty tags
        if not full.startswith(before) or full.startswith(before + OPEN):
            raise ConfigError(
                f"the chat template's generation prompt is {request!r}, but it prints an answer as {full[:80]!r}, so "
                "turns cannot be rendered append-only: train on the traces of a gateway, which need no rendering"
            )
        return f"{reasoning}\n{CLOSE}\n\n{full.removeprefix(before)}"

    def _in_the_past(self, past: Sequence[Message], answer: Message) -> str:
        """Return the text of an answer that another message follows, or of the last one if none may follow."""
        follower = tool_answer(answer) if answer.get("tool_calls") else {"role": "user", "content": PROBE}
        try:
            following = self._added([*past, answer], [follower])
            both = self._added(past, [answer, follower])
        except ConfigError:
            return self._added(past, [answer])
        return both.removesuffix(following) if both.endswith(following) else self._added(past, [answer])

    def _block(self, past: Sequence[Message], block: Sequence[Message], *, open_end: bool) -> str:
        """Return the text of the messages between two answers, after checking that each only appends."""
        text = ""
        for end in range(1, len(block) + 1):
            shorter = text
            closed = end == len(block) and not open_end
            text = self._added(past, block) if closed else self._open(past, block[:end])
            if not text.startswith(shorter):
                raise _rewritten(block[end - 1])
        return text

    def _open(self, past: Sequence[Message], block: Sequence[Message]) -> str:
        """Return the block without closing text that the template would remove if one more message followed.

        A system prompt that the template prints only together with a user's message is empty until then.
        """
        try:
            text = self._added(past, block)
        except ConfigError:
            if all(message["role"] in ("system", "developer") for message in block):
                return ""
            raise
        for message in (block[-1], {"role": "user"}):
            try:
                longer = self._added(past, [*block, {**message, "content": PROBE}])
            except ConfigError:  # then no such message can follow
                continue
            text = text[: common_length(text, longer)]
        return text

    def _request(self, past: Sequence[Message]) -> str:
        """Return the generation prompt."""
        return self._added(past, [], ask=True)

    def _added(self, past: Sequence[Message], more: Sequence[Message], *, ask: bool = False) -> str:
        """Return the text that more messages add to a conversation."""
        if not past:
            return self._print(more, ask)
        before, after = self._print(past, False), self._print([*past, *more], ask)
        if after.startswith(before):
            return after[len(before) :]
        marked = [*past[:-1], {**past[-1], "content": MARK}]
        _, in_before, before = self._print(marked, False).rpartition(MARK)
        _, in_after, after = self._print([*marked, *more], ask).rpartition(MARK)
        if in_before and in_after and not self._goes_before(marked, more):
            for end in self._ends(before):
                if after.startswith(end):
                    return after[len(end) :]
        raise _rewritten(more[0] if more else past[-1])

    def _goes_before(self, marked: Sequence[Message], more: Sequence[Message]) -> bool:
        """Return whether the first new message is printed before the marked one."""
        if not more:
            return False
        first, mark, _ = self._print([*marked, {**more[0], "content": LATER}, *more[1:]], False).partition(MARK)
        return bool(mark) and LATER in first

    def _ends(self, text: str) -> Iterator[str]:
        """Yield the end of turn of the last message, and its possible forms once the conversation continues.

        Some templates end the last turn with another special token than earlier ones (Harmony).
        """
        yield text
        place, token = max(((text.rfind(token), token) for token in self._special), default=(-1, ""))
        if place >= 0:
            for other in self._special:
                yield text[:place] + other + text[place + len(token) :]


def closing_of(print_chat: PrintChat, special_tokens: Collection[str]) -> str:
    """Return the special token that a template prints after every conversation without a generation prompt.

    It is mostly empty; Phi 3 and 4 have one. No message adds it, so it is not part of a conversation that only grows.
    """
    question: Message = {"role": "user", "content": PROBE}
    try:
        closed, asked = (print_chat([question], ask) for ask in (False, True))
    except ConfigError:
        return ""
    if asked.startswith(closed):
        return ""
    ends = (token for token in special_tokens if closed.endswith(token))
    return max((token for token in ends if asked.startswith(closed.removesuffix(token))), key=len, default="")


def is_assistant(message: Message) -> bool:
    """Return whether a model wrote the message."""
    return message.get("role") == "assistant"


def split_message(message: Message, *, starts_open: bool = False) -> tuple[str, Message]:
    """Return an answer's reasoning, from its field or from `<think>` tags, and the answer without it."""
    answer = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
    reasoning = next((str(message[key]) for key in _REASONING_KEYS if message.get(key)), "")
    content = message.get("content")
    if not reasoning and isinstance(content, str):
        split = split_reasoning(content, starts_open=starts_open and CLOSE in content)
        if split.reasoning or split.answer != content:
            reasoning, answer["content"] = split.reasoning, split.answer
    return reasoning, answer


def bare_message(message: Message) -> Message:
    """Return the message without its reasoning."""
    return split_message(message, starts_open=True)[1] if is_assistant(message) else message


def stand_in_past(message: Message) -> list[Message]:
    """Return a short conversation that this message may follow."""
    past: list[Message] = [{"role": "user", "content": PROBE}]
    if is_assistant(message):
        return past
    answer: Message = {"role": "assistant", "content": PROBE}
    if message.get("role") == "tool":
        function = {"name": message.get("name") or "tool", "arguments": "{}"}
        call_id = message.get("tool_call_id") or "call00000"
        answer["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return [*past, answer]


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the beginning that both sequences have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def tool_answer(answer: Message) -> Message:
    """Return a result of an answer's first tool call."""
    call = answer["tool_calls"][0]
    name = call.get("function", {}).get("name", "tool")
    return {"role": "tool", "tool_call_id": call.get("id", "call00000"), "name": name, "content": PROBE}


def _prints_mark(print_chat: PrintChat, answer: Message) -> bool:
    try:
        return MARK in print_chat([{"role": "user", "content": PROBE}, answer], False)
    except ConfigError:
        return False


def _around_mark(print_chat: PrintChat) -> tuple[str, str] | None:
    """Return the text around the reasoning of a call in templates that print no other (Gemma 4), else `None`."""
    call = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    question: Message = {"role": "user", "content": PROBE}
    try:
        request = print_chat([question], True)
        texts = [print_chat([question, {**answer, **more}], False) for more in ({}, {"reasoning_content": MARK})]
    except ConfigError:
        return None
    without, marked = (text.removeprefix(request) for text in texts)
    opening, found, closing = marked.removesuffix(without).partition(MARK)
    return (opening, closing) if found and marked.endswith(without) else None


def _rewritten(message: Message) -> ConfigError:
    return ConfigError(
        f"the chat template changes earlier text when a message of role {message.get('role')!r} is added, so turns "
        "cannot be rendered append-only: train on the traces of a gateway, which need no rendering, or use a template "
        "that prints each message once"
    )
