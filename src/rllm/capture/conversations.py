"""Which earlier answer of a session a request goes on from, and the exact tokens that led there.

An agent sends its conversation back as messages. Rendered anew they would often be other tokens than those that were sampled:
arguments are serialised again, reasoning is dropped, white space is stripped. So the answer is recognised by what was *said*,
and the next prompt is made of the tokens that are known and of what is new.

What counts as the same answer: its tool calls have the same names and ids, and the same arguments as JSON (`7` is `7.0`;
arguments that were never JSON come back in any form, if no other answer can be meant); its content is the same but for white
space around it, or is left out beside the tool calls, or there was none, of which LiteLLM makes a remark. Its reasoning tells two
such answers apart where a client sends it back; else that, and whatever else clients add or leave out, is ignored.
All other messages must be the same word for word, and so must the tools.

Ids alone do not tell answers apart: some servers give the first call of a tool the same id in every answer. So arguments are
part of a digest, and an answer whose arguments come back otherwise is taken as it was written.

An answer that a stop string ended may be written on: agents that call tools by text put the results right behind it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from rllm.capture.essence import (
    arguments_of,
    as_text,
    essence_of,
    gist_of,
    has_content,
    has_reasoning,
    is_answer,
    may_return_as,
    outline_of,
    reasoning_of,
    same_json,
    tool_calls_of,
    without_content,
)
from rllm.capture.session_tree import TokenIds, begins_with
from rllm.types import Message, Trace, text_of

Drift: TypeAlias = Literal["edited", "reasoning", "tool_json", "template"]
"""Why a prompt does not begin with the tokens of the answer that it follows: the agent changed what was said; the template or
the agent left out the reasoning; the arguments of a tool call were written otherwise; or the template prints the past, or its
white space, otherwise."""

Turn: TypeAlias = int
"""Stands for the tools, an answer, however it is written, and either the one message that precedes it, whatever precedes that, or the
beginning of the conversation and the answers before it, whatever is between them."""

_CALL_BYTES = 750
"""What a call takes beside its tokens and its arguments."""
_OUTLINE_BYTES = 160
"""What it takes to find an answer with tool calls by its outline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """An earlier call, prompt and answer, with which a request's messages begin."""

    trace_id: str
    num_messages: int
    """How many of the request's messages it makes up."""
    token_ids: list[int]
    """Its prompt and its answer as they were sampled."""
    written_on: str = ""
    """What the agent has put behind the answer, in the same message; it may begin with the stop string that ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A request's messages, with a digest of every beginning of theirs."""

    messages: Sequence[Message]
    digests: list[int]
    """`digests[k]` stands for the tools and the first k messages, in this process; known answers as they were written."""
    num_before_answers: int
    """How many messages precede the first answer among them."""
    turns: list[Turn]
    """`turns[k]` stands for the messages before the first answer, and the answers among the first k messages."""

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        known: Conversations | None = None,
    ) -> Said:
        """`known` has the answers that the messages may write otherwise than they were given."""
        digest = hash(as_text(list(tools))) if tools else 0
        digests, turns, num_before_answers = [digest], [digest], len(messages)
        for place, message in enumerate(messages):
            essence = essence_of(message)
            before, digest = digest, hash((digest, essence))
            turn = turns[-1] if place > num_before_answers else digest
            if is_answer(message):
                num_before_answers = min(num_before_answers, place)
                turn = _turn(turns[-1], essence)
                if known is not None and message.get("tool_calls"):
                    digest = known.as_written(before, digest, message)
            digests.append(digest)
            turns.append(turn)
        return cls(messages=messages, digests=digests, turns=turns, num_before_answers=num_before_answers)

    @property
    def goes_on(self) -> bool:
        """Whether there is an answer among the messages."""
        return self.num_before_answers < len(self.messages)

    def turns_from(self, start: int) -> Iterator[tuple[int, list[Turn]]]:
        """Of each answer after the first `start` messages, what stands for all that precedes it, and what stands for it."""
        for place in range(max(start, 1), len(self.messages)):
            if is_answer(self.messages[place]):
                yield self.digests[place], self.turns_of(place, self.messages[place])

    def turns_of(self, place: int, answer: Message) -> list[Turn]:
        """What stands for an answer to the first `place` messages."""
        before = hash((self.digests[0], essence_of(self.messages[place - 1])))
        essence = essence_of(answer)
        return [_turn(before, essence), _turn(self.turns[place], essence)]


def _turn(before: int, essence: tuple[str, ...]) -> Turn:
    return hash((before, gist_of(essence)))


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call that may be gone on from. Its tokens are kept as what they add to those of the call that it went on from."""

    trace_id: str
    before: _Call | None
    added_ids: array[int] | None
    """4 bytes each, since a gateway keeps those of thousands of sessions. `None` until somebody goes on from it: most first
    calls have no second one."""
    arguments: list[str]
    """Of each tool call, as written."""
    has_reasoning: bool
    has_content: bool

    def has_more_than(self, answer: Message) -> bool:
        """Whether this answer's reasoning or content is missing there."""
        return (self.has_reasoning and not has_reasoning(answer)) or (self.has_content and not has_content(answer))

    def from_the_first(self) -> list[_Call]:
        """The calls that lead to this one, and it."""
        calls = [self]
        while (before := calls[-1].before) is not None:
            calls.append(before)
        return calls[::-1]

    @property
    def first(self) -> _Call:
        return self.from_the_first()[0]

    def token_ids(self) -> array[int]:
        ids = array("I")
        for call in self.from_the_first():
            ids.extend(call.added_ids or ())
        return ids


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """A form in which an answer may come back, with its content or without."""

    digests: list[int]
    """Of the messages and it, and of that with the reasoning."""
    outline: int
    """The digest of the messages and its outline."""
    has_content: bool

    @classmethod
    def of(cls, before: int, answer: Message) -> _Form:
        digest, thought = hash((before, essence_of(answer))), reasoning_of(answer)
        return cls(
            digests=[digest, hash((digest, thought))] if thought else [digest],
            outline=hash((before, outline_of(answer))),
            has_content=has_content(answer),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The latest answer among some messages that is one of ours."""

    call: _Call
    num_messages: int
    written_on: str = ""


@dataclass(slots=True)
class Conversations:
    """The answers of one session."""

    heeds_reasoning: bool = False
    """Whether an answer whose reasoning (or text beside tool calls) was left out is another one, because whoever asks leaves it
    out on purpose."""
    _calls: dict[int, _Call] = field(default_factory=dict)
    """By the digest of the messages and the answer, and by that with the reasoning; of those that said the same, the latest."""
    _outlined: dict[int, list[int]] = field(default_factory=dict)
    """The digests of answers with tool calls, the latest last, by the digest of the messages and the answer's outline."""
    _stopped: dict[int, list[tuple[str, _Call]]] = field(default_factory=dict)
    """Answers that were asked for with stop strings, with their contents, by the digest of the messages before them."""
    _answered: set[int] = field(default_factory=set)
    """The digests of all messages that were answered."""
    _turns: set[Turn] = field(default_factory=set)
    num_bytes: int = 0
    """About what it takes in memory."""

    def as_written(self, before: int, digest: int, answer: Message) -> int:
        """The digest of the answer of ours that this one is, which follows what `before` stands for; `digest` if it is none.

        Of several, the one with the very arguments, or else the latest with the same as JSON; or else the only one whose
        arguments were no JSON, and may have come back as these.
        """
        if digest in self._calls:
            return digest
        outlined = self._outlined.get(hash((before, outline_of(answer))), ())
        written = {known: call.arguments for known in outlined if (call := self._calls.get(known))}
        now = arguments_of(answer)
        for known in reversed(written):
            if all(map(same_json, written[known], now)):
                return known
        possible = [known for known, arguments in written.items() if all(map(may_return_as, arguments, now))]
        return possible[0] if len(possible) == 1 else digest

    def lacks(self, said: Said) -> str | None:
        """The trace that must be supplied before the methods below can be asked about these messages."""
        found = self._found(said)
        if found is None or found.call.first.added_ids is not None:
            return None
        return found.call.first.trace_id

    def supply(self, said: Said, trace: Trace | None) -> None:
        """Give what `lacks` named; `None` if it is nowhere any more."""
        found = self._found(said)
        if found is None:
            return
        first = found.call.first
        if trace is None:
            self._forget(first)
        elif first.trace_id == trace.id and first.added_ids is None:  # else another one was kept meanwhile
            first.added_ids = array("I", [*trace.prompt_ids, *trace.response_ids])
            self.num_bytes += sys.getsizeof(first.added_ids)

    def prior_of(self, said: Said) -> Prior | None:
        """The latest answer among the messages that is one of ours, if all before it was said as it is now."""
        found = self._found(said)
        if found is None:
            return None
        if self.heeds_reasoning and found.call.has_more_than(said.messages[found.num_messages - 1]):
            return None
        return Prior(
            trace_id=found.call.trace_id,
            num_messages=found.num_messages,
            token_ids=found.call.token_ids().tolist(),
            written_on=found.written_on,
        )

    def drift_of(self, said: Said, prompt_ids: TokenIds) -> Drift | None:
        """Why a prompt does not go on from the tokens that were sampled before; `None` if it does, or if it begins anew."""
        if not said.goes_on:
            return None
        found = self._found(said)
        if found is None:
            return "edited" if self._are_edited(said, 0) else None
        call = found.call
        if begins_with(prompt_ids, call.token_ids()):
            return "edited" if self._are_edited(said, found.num_messages) else None
        if found.written_on:
            return "edited"
        answer = said.messages[found.num_messages - 1]
        if call.has_content and not has_content(answer):
            return "edited"
        if call.has_reasoning and not has_reasoning(answer):
            return "reasoning"
        if [item["function"].get("arguments") for item in tool_calls_of(answer)] != call.arguments:
            return "tool_json"
        return "reasoning" if call.has_reasoning else "template"

    def add(self, said: Said, trace: Trace) -> None:
        """Remember an answer, once it is given; one without tokens cannot be gone on from, nor one to a prompt of bare ids.

        The tokens of one that goes on from another are kept; those of a first one are asked for when they are needed.
        """
        self.adding(said, trace)()

    def adding(self, said: Said, trace: Trace) -> Callable[[], None]:
        """`add` for later, which has no hold of the trace."""
        if not trace.response_ids or not said.messages:
            return _nothing
        call = _Call(
            trace_id=trace.id,
            before=None,
            added_ids=None,
            arguments=arguments_of(trace.response),
            has_reasoning=has_reasoning(trace.response),
            has_content=has_content(trace.response),
        )
        if (before := self._found(said)) and self.lacks(said) is None:
            known = before.call.token_ids()
            if begins_with(trace.prompt_ids, known):
                call.before = before.call
                call.added_ids = array("I", trace.prompt_ids[len(known) :])
                call.added_ids.extend(trace.response_ids)
        content = text_of(trace.response) if trace.sampling.get("stop") and not call.arguments else ""
        forms = [_Form.of(said.digests[-1], trace.response)]
        if call.has_content and (bare := without_content(trace.response)) is not None:
            forms.append(_Form.of(said.digests[-1], bare))
        return partial(self._add, said, said.turns_of(len(said.messages), trace.response), forms, content, call)

    def _add(
        self, said: Said, turns: Sequence[Turn], forms: Sequence[_Form], stopped_content: str, call: _Call
    ) -> None:
        self._answered.add(said.digests[-1])
        self._turns.update(turns)
        self.num_bytes += _CALL_BYTES + sum(map(sys.getsizeof, (call.added_ids, stopped_content, *call.arguments)))
        for form in forms:
            self._add_form(form, call)
        if stopped_content:
            self._stopped.setdefault(said.digests[-1], []).append((stopped_content, call))

    def _add_form(self, form: _Form, call: _Call) -> None:
        for digest in form.digests:
            known = self._calls.get(digest)
            # Where content is missing, one that had none is meant, rather than one that lost its own.
            if form.has_content == call.has_content or known is None or known.has_content:
                self._calls[digest] = call
        if call.arguments:
            outlined = self._outlined.setdefault(form.outline, [])
            if form.digests[0] in outlined:
                outlined.remove(form.digests[0])
            outlined.append(form.digests[0])
            self.num_bytes += _OUTLINE_BYTES

    def _forget(self, first: _Call) -> None:
        """Drop the calls that go on from this one."""
        self._calls = {digest: call for digest, call in self._calls.items() if call.first is not first}
        self._stopped = {
            digest: [(content, call) for content, call in answers if call.first is not first]
            for digest, answers in self._stopped.items()
        }

    def _found(self, said: Said) -> _Found | None:
        if not said.goes_on:
            return None
        for place in range(len(said.messages), 0, -1):
            call = self._call(said, place)
            if call is not None:
                return _Found(call=call, num_messages=place)
            if found := self._written_on(said, place):
                return found
        return None

    def _are_edited(self, said: Said, start: int) -> bool:
        """Whether messages after the first `start` were of a conversation of ours: another answer stands where we gave one, or
        one that we gave is there without what preceded it. Examples that an agent shows are neither."""
        return any(
            before in self._answered or not self._turns.isdisjoint(turns) for before, turns in said.turns_from(start)
        )

    def _call(self, said: Said, place: int) -> _Call | None:
        """The answer that ends the first messages: of those that said the same, one that was thought alike, or else the latest."""
        digest, answer = said.digests[place], said.messages[place - 1]
        thought = reasoning_of(answer) if is_answer(answer) else ""
        return (self._calls.get(hash((digest, thought))) if thought else None) or self._calls.get(digest)

    def _written_on(self, said: Said, place: int) -> _Found | None:
        """The answer with which the message before `place` begins; of several, the latest."""
        stopped = self._stopped.get(said.digests[place - 1])
        message = said.messages[place - 1]
        if not stopped or not is_answer(message) or tool_calls_of(message):
            return None
        text = text_of(message)
        for content, call in reversed(stopped):
            if text.startswith(content):
                return _Found(call=call, num_messages=place, written_on=text.removeprefix(content))
        return None


def _nothing() -> None:
    """Nothing is remembered of it."""
