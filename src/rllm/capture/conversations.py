"""Which earlier answer of a session a request goes on from, and the exact tokens that led there.

An agent sends its conversation back as messages. Rendered anew they would often be other tokens than those that were sampled:
arguments are serialised again, reasoning is dropped, white space is stripped. So the answer is recognised by what was *said*,
and the next prompt is made of the tokens that are known and of what is new.

What counts as the same answer: its tool calls have the same ids, and the same arguments as JSON (`7` is `7.0`; arguments that
were never JSON come back in any form); its content is the same but for white space around it. Its reasoning, and whatever else
clients add or leave out, is ignored. All other messages must be the same word for word, and so must the tools.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from rllm.types import Message, Trace, text_of

Drift: TypeAlias = Literal["edited", "reasoning", "tool_json", "template"]
"""Why a prompt does not begin with the tokens of the answer that it follows: the agent changed what was said; the template or
the agent left out the reasoning; the arguments of a tool call were written otherwise; or the template prints the past, or its
white space, otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """An earlier call, prompt and answer, with which a request's messages begin."""

    trace_id: str
    num_messages: int
    """How many of the request's messages it makes up."""
    token_ids: list[int]
    """Its prompt and its answer as they were sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A request's messages, with a digest of every beginning of theirs."""

    messages: Sequence[Message]
    digests: list[int]
    """`digests[k]` stands for the tools and the first k messages, in this process."""
    num_before_answers: int
    """How many messages precede the first answer among them."""

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Said:
        digest = hash(_as_text(list(tools))) if tools else 0
        digests = [digest]
        for message in messages:
            digest = hash((digest, _essence(message)))
            digests.append(digest)
        places = (place for place, message in enumerate(messages) if _is_answer(message))
        return cls(messages=messages, digests=digests, num_before_answers=next(places, len(messages)))

    @property
    def goes_on(self) -> bool:
        """Whether there is an answer among the messages."""
        return self.num_before_answers < len(self.messages)

    @property
    def opening(self) -> int:
        """Stands for what precedes the first answer."""
        return self.digests[self.num_before_answers]


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call that may be gone on from. Its tokens are kept as what they add to those of the call that it went on from."""

    trace_id: str
    before: _Call | None
    added_ids: array[int] | None
    """`None` until somebody goes on from it: most first calls have no second one."""
    arguments: list[str]
    """Of each tool call, as written."""
    has_reasoning: bool

    def from_the_first(self) -> list[_Call]:
        """The calls that lead to this one, and it."""
        calls = [self]
        while (before := calls[-1].before) is not None:
            calls.append(before)
        return calls[::-1]

    @property
    def first(self) -> _Call:
        return self.from_the_first()[0]

    def token_ids(self) -> list[int]:
        return [token for call in self.from_the_first() for token in call.added_ids or ()]


@dataclass(slots=True)
class Conversations:
    """The answers of one session."""

    heeds_reasoning: bool = False
    """Whether an answer whose reasoning was left out is another one, because whoever asks leaves it out on purpose."""
    _calls: dict[int, _Call] = field(default_factory=dict)
    """By the digest of the messages and the answer; of those that said the same, the latest."""
    _openings: set[int] = field(default_factory=set)

    def lacks(self, said: Said) -> str | None:
        """The trace that must be supplied before the methods below can be asked about these messages."""
        found = self._found(said)
        if found is None or found[0].first.added_ids is not None:
            return None
        return found[0].first.trace_id

    def supply(self, said: Said, trace: Trace | None) -> None:
        """Give what `lacks` named; `None` if it is nowhere any more."""
        found = self._found(said)
        if found is None:
            return
        if trace is None:
            first = found[0].first
            self._calls = {digest: call for digest, call in self._calls.items() if call.first is not first}
        else:
            found[0].first.added_ids = array("q", [*trace.prompt_ids, *trace.response_ids])

    def prior_of(self, said: Said) -> Prior | None:
        """The latest answer among the messages that is one of ours, if all before it was said as it is now."""
        found = self._found(said)
        if found is None or not self._is_the_same(said, *found):
            return None
        call, num_messages = found
        return Prior(trace_id=call.trace_id, num_messages=num_messages, token_ids=call.token_ids())

    def drift_of(self, said: Said, prompt_ids: Sequence[int]) -> Drift | None:
        """Why a prompt does not go on from the tokens that were sampled before; `None` if it does, or if it begins anew."""
        if not said.goes_on:
            return None
        found = self._found(said)
        if found is None:
            return "edited" if said.opening in self._openings else None
        call, num_messages = found
        known = call.token_ids()
        if list(prompt_ids[: len(known)]) == known:
            return None
        if not self._same_arguments(said, num_messages):
            return "edited"
        answer = said.messages[num_messages - 1]
        if call.has_reasoning and not _has_reasoning(answer):
            return "reasoning"
        if [item["function"].get("arguments") for item in _tool_calls(answer)] != call.arguments:
            return "tool_json"
        return "reasoning" if call.has_reasoning else "template"

    def add(self, said: Said, trace: Trace) -> None:
        """Remember an answer, once it is given; one without tokens cannot be gone on from.

        The tokens of one that goes on from another are kept; those of a first one are asked for when they are needed.
        """
        self.adding(said, trace)()

    def adding(self, said: Said, trace: Trace) -> Callable[[], None]:
        """`add` for later, which has no hold of the trace."""
        if not trace.response_ids:
            return _nothing
        call = _Call(
            trace_id=trace.id,
            before=None,
            added_ids=None,
            arguments=[str(item["function"].get("arguments")) for item in _tool_calls(trace.response)],
            has_reasoning=_has_reasoning(trace.response),
        )
        if (before := self._found(said)) and self.lacks(said) is None:
            known, tokens = before[0].token_ids(), [*trace.prompt_ids, *trace.response_ids]
            if tokens[: len(known)] == known:
                call.before, call.added_ids = before[0], array("q", tokens[len(known) :])
        return partial(self._add, said.opening, hash((said.digests[-1], _essence(trace.response))), call)

    def _add(self, opening: int, digest: int, call: _Call) -> None:
        self._openings.add(opening)
        self._calls[digest] = call

    def _found(self, said: Said) -> tuple[_Call, int] | None:
        for place in range(len(said.messages), 0, -1):
            call = self._calls.get(said.digests[place])
            if call is not None:
                return call, place
        return None

    def _is_the_same(self, said: Said, call: _Call, num_messages: int) -> bool:
        """Whether what the digest leaves out is the same, too."""
        if self.heeds_reasoning and call.has_reasoning and not _has_reasoning(said.messages[num_messages - 1]):
            return False
        return self._same_arguments(said, num_messages)

    def _same_arguments(self, said: Said, num_messages: int) -> bool:
        """Whether no answer that we know among the messages has other arguments now, where they were JSON."""
        for place in range(1, num_messages + 1):
            call = self._calls.get(said.digests[place])
            if call is None or not call.arguments:
                continue
            echoed = [item["function"].get("arguments") for item in _tool_calls(said.messages[place - 1])]
            for now, written in zip(echoed, call.arguments, strict=True):
                if now != written and (parsed := _parsed(written)) is not None and _parsed(now) != parsed:
                    return False
        return True


def _nothing() -> None:
    """Nothing is remembered of an answer without tokens."""


def _is_answer(message: Message) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _essence(message: Message) -> tuple[str, ...]:
    """What of a message must be the same to be the same message."""
    if not isinstance(message, Mapping):
        return (_as_text(message),)
    if not _is_answer(message):
        return (str(message.get("role")), _content(message), str(message.get("tool_call_id")))
    calls = (
        str(item.get("id") or _as_text([item["function"].get("name"), _parsed(item["function"].get("arguments"))]))
        for item in _tool_calls(message)
    )
    return ("assistant", text_of(message).strip(), *calls)


def _content(message: Message) -> str:
    """The text, whatever it came as; other parts as JSON without the marks that clients move about."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return text_of(message)
    return _as_text(
        [
            {name: value for name, value in part.items() if name != "cache_control"}
            if isinstance(part, Mapping)
            else part
            for part in parts
        ]
    )


def _has_reasoning(message: Message) -> bool:
    return bool(message.get("reasoning_content") or message.get("reasoning"))


def _tool_calls(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    return [item for item in calls if isinstance(item, Mapping) and isinstance(item.get("function"), Mapping)]


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, however they were written; `None` if they are no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
