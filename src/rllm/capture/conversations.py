"""Recognition of a session's earlier answers in the messages of a request, and the exact tokens that led to them.

An agent sends its conversation back as messages. Rendered again, they often give other tokens than those that were
sampled: arguments are serialized differently, reasoning is dropped, white space is stripped. So an answer is recognized
by its content, and the next prompt is made of the known tokens and of the new messages.

Two answers count as the same if their tool calls have the same names and ids, and the same arguments as JSON (`7` is
`7.0`; arguments that were never JSON may come back in any form, if only one answer matches), and if their content is
the same apart from white space around it. Clients may leave out the content if there are tool calls, and LiteLLM sends
a placeholder if there was none. Reasoning distinguishes two such answers if a client sends it back; otherwise it is
ignored, as is everything else that clients add or leave out. All other messages must be equal word for word, and so
must the tools.

Ids alone do not identify an answer: some servers give the first call of a tool the same id in every answer. So
arguments are part of a digest, and an answer whose arguments come back in another form is looked up in the form it was
written in.

Text may be appended to an answer that a stop string ended: agents that call tools by text put the results right after
it.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from rllm.capture.session_tree import ParentIndex, begins_with
from rllm.types import JSONMapping, Message, Trace, text_of

Drift: TypeAlias = Literal["edited", "reasoning", "tool_json", "template"]
"""Reason why a prompt does not begin with the tokens of the answer that it follows. `edited`: the agent changed the
history; `reasoning`: the template or the agent left out the reasoning; `tool_json`: the arguments of a tool call were
written differently; `template`: the template prints earlier turns, or their white space, differently."""

MessageKey: TypeAlias = tuple[str, ...]
"""Parts of a message that must be equal for it to be the same message."""
TurnKey: TypeAlias = int
"""Hash of the tools, of an answer in any form, and of one of two contexts: the one message before it, or the beginning
of the conversation with the answers before it."""

_NO_CONTENT = "[System: Empty message content sanitised to satisfy protocol]"
"""Content that LiteLLM sends to Anthropic's endpoint for a streamed answer that had tool calls only."""
_BYTES_PER_CALL = 800
"""Memory of a call without its tokens and its arguments."""
_BYTES_PER_TOOL_KEY = 160
"""Memory of the index entry for an answer with tool calls."""
_MAX_DIGESTED = 4
"""Conversations of a session whose digests are kept: agents and their sub-agents take turns."""


class PriorAnswer(NamedTuple):
    """An earlier call whose prompt and answer a request's messages begin with."""

    trace_id: str
    num_messages: int
    """Number of the request's messages that its prompt and answer stand for."""
    token_ids: Sequence[int]
    """Tokens of its prompt and its answer, as they were sampled."""
    appended_text: str = ""
    """Text that the agent appended to the answer's message; it may begin with the stop string that ended the answer."""


class MessageDigests(NamedTuple):
    """The messages of a request, with a digest of each of their prefixes. Digests are valid in this process only."""

    messages: Sequence[Message]
    digests: array[int]
    """`digests[k]` is the digest of the tools and the first k messages, with known answers as they were written."""
    num_before_answers: int
    """Number of messages before the first answer."""
    turns: array[int]
    """`turns[k]` is the `TurnKey` of the messages before the first answer, and of the answers among the first k
    messages."""
    json_size: int
    """Length of the messages as JSON, without the closing bracket; 0 if that is not known."""
    json_hash: int
    """Hash of this JSON."""
    num_known: int
    """Number of messages whose digests come from an answered request."""
    known_hash: int
    """Hash of the JSON of these."""

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: Sequence[JSONMapping] | None,
        known: Conversations | None = None,
        as_json: bytes = b"",
    ) -> MessageDigests:
        """Digest messages.

        Args:
            messages: The messages.
            tools: The tools.
            known: The answers that the messages may contain in another form.
            as_json: The messages as JSON. With it, messages that begin with an answered request's are digested only
                from there on, so that a turn of a long conversation takes no longer than one of a short one.
        """
        digest = hash(stable_text(list(tools))) if tools else 0
        text = as_json.removesuffix(b"]")
        earlier = known.digested(digest, text) if known is not None else None
        if earlier is None:
            digests, turns, num_before_answers = array("q", [digest]), array("q", [digest]), len(messages)
        else:
            digests, turns, num_before_answers = earlier.digests[:], earlier.turns[:], earlier.num_before_answers
        digest, num_known = digests[-1], len(digests) - 1
        for place in range(num_known, len(messages)):
            message = messages[place]
            key = canonical(message)
            before, digest = digest, hash((digest, key))
            turn = turns[-1] if place > num_before_answers else digest
            if is_answer(message):
                num_before_answers = min(num_before_answers, place)
                turn = _turn_key(turns[-1], key)
                if known is not None and message.get("tool_calls"):
                    digest = known.as_written(before, digest, message)
            digests.append(digest)
            turns.append(turn)
        return cls(
            messages=messages,
            digests=digests,
            turns=turns,
            num_before_answers=num_before_answers,
            json_size=len(text),
            json_hash=hash(text),
            num_known=num_known,
            known_hash=earlier.json_hash if earlier is not None else 0,
        )

    @property
    def has_answer(self) -> bool:
        return self.num_before_answers < len(self.digests) - 1

    def turn_keys(self, place: int, answer: MessageKey) -> list[TurnKey]:
        """Return the keys of an answer to the first `place` messages."""
        before = hash((self.digests[0], canonical(self.messages[place - 1])))
        return [_turn_key(before, answer), _turn_key(self.turns[place], answer)]


def _turn_key(before: int, answer: MessageKey) -> TurnKey:
    return hash((before, content_key(answer)))


@dataclass(kw_only=True, slots=True)
class _Tokens:
    """Tokens, in four bytes each, of a chain of calls that continue each other."""

    ids: array[int] | None = None
    """`None` until the first call is continued: most never are."""
    before: _Tokens | None = None
    """Tokens of the conversation that these branch off from."""
    start: int = 0
    """Number of tokens before these."""

    def first(self, size: int) -> array[int]:
        """Return the first tokens of the conversation."""
        tokens: _Tokens | None = self
        parts = []
        while tokens is not None:
            parts.append((tokens.ids or array("I"))[: size - tokens.start])
            size = tokens.start
            tokens = tokens.before
        ids = parts.pop()
        for part in reversed(parts):
            ids.extend(part)
        return ids

    def continued(self, size: int, added: array[int]) -> _Tokens:
        """Add tokens after the first `size`; in a new branch if others already follow these."""
        assert self.ids is not None
        if self.start + len(self.ids) != size:
            return _Tokens(ids=added, before=self, start=size)
        self.ids.extend(added)
        return self


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call that may be continued."""

    trace_id: str
    tokens: _Tokens
    num_ids: int
    """Number of its tokens, prompt and answer."""
    arguments: list[str]
    """Arguments of each tool call, as written."""
    has_reasoning: bool
    has_content: bool

    def token_ids(self) -> array[int]:
        return self.tokens.first(self.num_ids)


class NewAnswer(NamedTuple):
    """An answer for `Conversations.add`."""

    asked: MessageDigests
    """Messages that were answered."""
    response: Message
    key: MessageKey
    """`canonical` of the response."""
    is_stopped: bool
    """True if it was asked for with stop strings: text may be appended to it."""
    call: _Call
    before: _Call | None
    """The call that it continues."""
    added_ids: array[int]
    """Tokens that it adds to that call's tokens."""


class _Found(NamedTuple):
    """The latest known answer among some messages."""

    call: _Call
    num_messages: int
    appended_text: str = ""


@dataclass(slots=True)
class Conversations:
    """The answers of one session."""

    match_reasoning: bool = False
    """Treat an answer without its reasoning (or without its text if it has tool calls) as another answer, because the
    agent leaves it out on purpose."""
    parents: ParentIndex = field(default_factory=ParentIndex)
    """The calls of the session by tokens; callers add them."""
    num_bytes: int = 0
    """Approximate size in memory, without the parents."""
    _calls: dict[int, _Call] = field(default_factory=dict)
    """Calls by the digest of the messages and the answer, and by that with the reasoning; of equal ones, the latest."""
    _by_tool_key: dict[int, list[int]] = field(default_factory=dict)
    """Digests of answers with tool calls, the latest last, by the hash of the messages and the answer's tool key."""
    _stopped: dict[int, list[tuple[str, _Call]]] = field(default_factory=dict)
    """Answers that were asked for with stop strings, with their contents, by the digest of the messages before them."""
    _answered: set[int] = field(default_factory=set)
    """Digests of all messages that were answered."""
    _turns: set[TurnKey] = field(default_factory=set)
    _digested: dict[int, MessageDigests] = field(default_factory=dict)
    """Digests of the last request of each conversation, without its messages, by `json_hash`; the latest last."""

    def digested(self, tools: int, text: bytes) -> MessageDigests | None:
        """Return the digests of the longest known request that these messages begin with.

        Args:
            tools: Digest of the tools.
            text: The messages as JSON, without the closing bracket.
        """
        same = (
            known
            for known in self._digested.values()
            # A comma follows the known messages; few other requests have one there, so few are hashed.
            if text[known.json_size : known.json_size + 1] in (b",", b"")
            and known.digests[0] == tools
            and known.json_size <= len(text)
            and hash(text[: known.json_size]) == known.json_hash
        )
        return max(same, key=lambda known: known.json_size, default=None)

    def as_written(self, before: int, digest: int, answer: Message) -> int:
        """Return the digest of the known answer that a message repeats, or `digest` if there is none.

        Of several candidates, the one with exactly these arguments is meant, or else the latest with the same as JSON,
        or else the only one whose arguments were not JSON and may have come back in this form.

        Args:
            before: Digest of the messages before the answer.
            digest: Digest of these and the answer as it is now.
            answer: The message.
        """
        if digest in self._calls:
            return digest
        candidates = self._by_tool_key.get(hash((before, tool_key(answer))), ())
        written = {known: call.arguments for known in candidates if (call := self._calls.get(known))}
        now = arguments_of(answer)
        for known in reversed(written):
            if all(map(same_json, written[known], now)):
                return known
        possible = [known for known, arguments in written.items() if all(map(may_return_as, arguments, now))]
        return possible[0] if len(possible) == 1 else digest

    def missing_trace(self, asked: MessageDigests) -> str | None:
        """Return the id of the trace to pass to `provide_tokens` before the methods below are called, if any."""
        found = self._find(asked)
        if found is None or found.call.tokens.ids is not None:
            return None
        return found.call.trace_id

    def provide_tokens(self, asked: MessageDigests, trace: Trace | None) -> None:
        """Provide the trace that `missing_trace` named; `None` if it no longer exists."""
        found = self._find(asked)
        if found is None:
            return
        tokens = found.call.tokens
        if trace is None:
            self._calls = {digest: call for digest, call in self._calls.items() if call.tokens is not tokens}
            for digest, answers in self._stopped.items():
                self._stopped[digest] = [(content, call) for content, call in answers if call.tokens is not tokens]
        elif found.call.trace_id == trace.id and tokens.ids is None:  # another one may have been added meanwhile
            tokens.ids = array("I", [*trace.prompt_ids, *trace.response_ids])
            self.num_bytes += sys.getsizeof(tokens.ids)

    def prior_answer(self, asked: MessageDigests) -> PriorAnswer | None:
        """Return the latest known answer among the messages whose context is unchanged."""
        found = self._find(asked)
        if found is None:
            return None
        call, answer = found.call, asked.messages[found.num_messages - 1]
        lost_reasoning = call.has_reasoning and not reasoning_of(answer)
        if self.match_reasoning and (lost_reasoning or (call.has_content and not has_content(answer))):
            return None
        return PriorAnswer(
            trace_id=call.trace_id,
            num_messages=found.num_messages,
            token_ids=call.token_ids(),
            appended_text=found.appended_text,
        )

    def drift_of(self, asked: MessageDigests, prompt_ids: Sequence[int]) -> Drift | None:
        """Return the reason why a prompt does not continue the tokens sampled before.

        `None` if it does continue them, or if it begins a conversation.
        """
        if not asked.has_answer:
            return None
        found = self._find(asked)
        if found is None:
            return "edited" if self._are_edited(asked, 0) else None
        call = found.call
        if begins_with(prompt_ids, call.token_ids()):
            return "edited" if self._are_edited(asked, found.num_messages) else None
        if found.appended_text:
            return "edited"
        answer = asked.messages[found.num_messages - 1]
        if call.has_content and not has_content(answer):
            return "edited"
        if call.has_reasoning and not reasoning_of(answer):
            return "reasoning"
        if [item["function"].get("arguments") for item in tool_calls_of(answer)] != call.arguments:
            return "tool_json"
        return "reasoning" if call.has_reasoning else "template"

    def prepare(self, asked: MessageDigests, trace: Trace) -> NewAnswer | None:
        """Return an answer to add once it is stored.

        `None` for one that cannot be continued: it failed, or has no tokens, or its prompt had no messages. Tokens are
        kept for a call that continues another one; a first call's are loaded when needed (`missing_trace`).
        """
        if trace.error is not None or not trace.response_ids or not asked.messages:
            return None
        (role, content, *calls), arguments = tool_key(trace.response), arguments_of(trace.response)
        call = _Call(
            trace_id=trace.id,
            tokens=_Tokens(),
            num_ids=len(trace.prompt_ids) + len(trace.response_ids),
            arguments=arguments,
            has_reasoning=bool(reasoning_of(trace.response)),
            has_content=bool(content),
        )
        before: _Call | None = None
        added_ids = array("I")
        found = self._find(asked)
        if found and found.call.tokens.ids is not None and begins_with(trace.prompt_ids, found.call.token_ids()):
            before = found.call
            added_ids.extend(trace.prompt_ids[before.num_ids :])
            added_ids.extend(trace.response_ids)
        return NewAnswer(
            asked=asked,
            response=trace.response,
            key=(role, content, *calls, *arguments),
            is_stopped=bool(trace.sampling.get("stop")) and not call.arguments,
            call=call,
            before=before,
            added_ids=added_ids,
        )

    def add(self, answer: NewAnswer | None) -> None:
        """Remember an answer; `None` is ignored."""
        if answer is None:
            return
        call, response, before = answer.call, answer.response, answer.asked.digests[-1]
        content = text_of(response) if answer.is_stopped else ""
        self._answered.add(before)
        self._turns.update(answer.asked.turn_keys(len(answer.asked.messages), answer.key))
        self.num_bytes += _BYTES_PER_CALL + sum(map(sys.getsizeof, (answer.added_ids, content, *call.arguments)))
        self._keep_digests(answer.asked)
        if (continued := answer.before) is not None:
            call.tokens = continued.tokens.continued(continued.num_ids, answer.added_ids)
        # The forms in which it may come back: with its content, or without.
        forms = [(answer.key, True)]
        if call.has_content and (bare := without_content(response)):
            forms.append((canonical(bare), False))
        reasoning = reasoning_of(response) if call.has_reasoning else ""
        for form, is_whole in forms:
            digest = hash((before, form))
            for key in (digest, hash((digest, reasoning))) if reasoning else (digest,):
                known = self._calls.get(key)
                # An answer without content stands for one that never had any, rather than for one that lost its own.
                if is_whole or known is None or known.has_content:
                    self._calls[key] = call
            if call.arguments:
                digests = self._by_tool_key.setdefault(hash((before, form[: len(form) - len(call.arguments)])), [])
                if digest in digests:
                    digests.remove(digest)
                digests.append(digest)
                self.num_bytes += _BYTES_PER_TOOL_KEY
        if content:
            self._stopped.setdefault(before, []).append((content, call))

    def _keep_digests(self, asked: MessageDigests) -> None:
        """Keep the digests of an answered request, and drop the digests of the request that it continues.

        Digests of first calls are not kept, since most of these calls are never continued.
        """
        if not (asked.json_size and asked.has_answer):
            return
        for key in (asked.known_hash, asked.json_hash):
            self._digested.pop(key, None)
        self._digested[asked.json_hash] = asked._replace(messages=())
        if len(self._digested) > _MAX_DIGESTED:
            del self._digested[next(iter(self._digested))]

    def _find(self, asked: MessageDigests) -> _Found | None:
        if not asked.has_answer:
            return None
        for place in range(len(asked.messages), 0, -1):
            digest, message = asked.digests[place], asked.messages[place - 1]
            reasoning = reasoning_of(message) if is_answer(message) else ""
            # The answer with this reasoning, or else the latest.
            call = (self._calls.get(hash((digest, reasoning))) if reasoning else None) or self._calls.get(digest)
            if call is not None:
                return _Found(call=call, num_messages=place)
            stopped = self._stopped.get(asked.digests[place - 1])
            if stopped and is_answer(message) and not tool_calls_of(message):
                text = text_of(message)
                for content, call in reversed(stopped):
                    if text.startswith(content):
                        return _Found(call=call, num_messages=place, appended_text=text.removeprefix(content))
        return None

    def _are_edited(self, asked: MessageDigests, start: int) -> bool:
        """Return True if messages after the first `start` are from an edited conversation of this session.

        Either another answer replaces one that was given, or a given one appears without the messages that preceded it.
        Few-shot examples in a prompt are neither.
        """
        answers = [place for place in range(max(start, 1), len(asked.messages)) if is_answer(asked.messages[place])]
        return any(
            asked.digests[place] in self._answered
            or not self._turns.isdisjoint(asked.turn_keys(place, canonical(asked.messages[place])))
            for place in answers
        )


def is_answer(message: Message) -> bool:
    """Return True for a message of the model."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def canonical(message: Message) -> MessageKey:
    """Return the parts of a message that must be equal for it to be the same message."""
    if not isinstance(message, dict):
        return (stable_text(message),)
    if not is_answer(message):
        return (str(message.get("role")), _content(message), str(message.get("tool_call_id")))
    return (*tool_key(message), *arguments_of(message))


def tool_key(answer: Message) -> tuple[str, ...]:
    """Return the parts of an answer that do not depend on how its arguments are written."""
    calls = [f"{item['function'].get('name')} {item.get('id') or ''}" for item in tool_calls_of(answer)]
    return ("assistant", _own_content(answer), *calls)


def content_key(answer: MessageKey) -> MessageKey:
    """Return the parts of a canonical answer that no client rewrites: tool calls without arguments, or else text."""
    num_calls = len(answer) // 2 - 1
    return answer[2 : 2 + num_calls] or answer


def arguments_of(answer: Message) -> list[str]:
    """Return the arguments of each tool call, as written."""
    return [
        arguments if isinstance(arguments, str) else stable_text(arguments)
        for arguments in (item["function"].get("arguments") for item in tool_calls_of(answer))
    ]


def same_json(written: str, now: str) -> bool:
    """Return True if arguments are equal as JSON."""
    return now == written or ((parsed := _parsed(written)) is not None and _parsed(now) == parsed)


def may_return_as(written: str, now: str) -> bool:
    """Return True if a client may send arguments back in this form: text that is not JSON comes back in any form."""
    return _parsed(written) is None or same_json(written, now)


def _content(message: Message) -> str:
    """Return the text of a message; other parts as JSON without the cache marks that clients move around."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return text_of(message)
    return stable_text(
        [
            {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part
            for part in parts
        ]
    )


def without_content(answer: Message) -> Message | None:
    """Return an answer with its tool calls but without its text; `None` unless the ids of the calls identify it."""
    calls = tool_calls_of(answer)
    return {**answer, "content": None} if calls and all(item.get("id") for item in calls) else None


def has_content(message: Message) -> bool:
    """Return True if an answer has text, with or without tool calls."""
    return bool(_own_content(message))


def _own_content(answer: Message) -> str:
    text = text_of(answer).strip()
    return "" if text == _NO_CONTENT else text


def reasoning_of(message: Message) -> str:
    """Return the reasoning of an answer, without the white space around it."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "").strip()


def tool_calls_of(message: Message) -> list[JSONMapping]:
    """Return the well-formed tool calls of a message."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [item for item in calls if isinstance(item, dict) and isinstance(item.get("function"), dict)]


def _parsed(arguments: str) -> object:
    """Return arguments as a value; `None` if they are not JSON, or nested too deep."""
    try:
        value: object = json.loads(arguments)
        return value
    except (ValueError, RecursionError):
        return None


def stable_text(value: object) -> str:
    """Return the same text for equal values."""
    return json.dumps(value, sort_keys=True, default=str)
