"""Parsing of upstreams' answers: a fast path for plain ones, checks of their fields, and conversion of their errors.

Nearly every event of a stream carries only text and tokens. Such events are decoded straight into four values, without
a dictionary for every token, and those that arrived together become one chunk: the network merges events as it likes
anyway. Any other event is parsed as it is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
import orjson

from rllm._runtime.untrusted import LARGE, TooLargeError, check_values, parse_json
from rllm.capture import has_labels
from rllm.gateway.errors import CONTEXT_OVERFLOW, UpstreamError, UpstreamFault
from rllm.types import JSONObject, LogprobsKind

_TOO_LONG = re.compile(r"context (?:length|window|size)|prompt is too long|max_new_tokens", re.IGNORECASE)
"""Words of vLLM, SGLang, llama.cpp, TGI and the providers for a prompt that is too long."""
_ENGINE_DIED = re.compile(r"engine ?core", re.IGNORECASE)
_BUSY = (429, 502, 503, 504)
"""Statuses of servers, and of proxies before them, that cannot answer now."""
_DAY_S = 86_400.0
MAX_ANSWER_VALUE_BYTES = 512 * 1024 * 1024
"""See `check_values`: more than the longest answer takes with an entry for every token."""
_PERMANENT = ("insufficient_quota", "billing_hard_limit_reached")
"""Codes of answers with status 429 after which waiting does not help."""


def json_object(status: int, body: bytes, headers: Mapping[str, str]) -> JSONObject:
    """Return the body of a successful answer.

    Raises:
        UpstreamError: if the status is not 200, or if the body is not a JSON object.
    """
    if status != 200:
        raise refusal_of(status, body, headers)
    try:
        answer = parse_json(body, limit=MAX_ANSWER_VALUE_BYTES)
    except TooLargeError as error:
        raise UpstreamError(f"the upstream's answer cannot be read: {error}") from error
    except ValueError as error:
        raise UpstreamError(f"the upstream's answer is not JSON ({error}); it begins with {start_of(body)}") from error
    if not isinstance(answer, dict):
        raise UpstreamError(f"the upstream's answer is not a JSON object; it begins with {start_of(body)}")
    return answer


def without_error(answers: list[JSONObject]) -> list[JSONObject]:
    """Return these answers or chunks; raise `UpstreamError` if one of them is an error instead."""
    for answer in answers:
        if error := answer.get("error"):
            raise _reported(error, 502)
    return answers


def refusal_of(status: int, body: bytes, headers: Mapping[str, str]) -> UpstreamError:
    """Return an error answer as an exception; a redirect or an unknown status becomes 502: no agent can act on it."""
    try:
        answer = orjson.loads(body) if len(body) < LARGE else None
    except ValueError:
        answer = None
    shown = status if 400 <= status < 600 else 502
    error = None
    if isinstance(answer, dict):  # Under OpenAI's name or FastAPI's; SGLang's error is the whole answer.
        error = answer.get("error") or answer.get("detail") or (answer if answer.get("object") == "error" else None)
    if error:
        refusal = _reported(error, shown)
    else:
        refusal = UpstreamError(f"the upstream answered with status {status} and {start_of(body)}", status_code=shown)
    if status in _BUSY and refusal.details.get("code") not in _PERMANENT:
        refusal.fault, refusal.retry_after_s = "refused", _retry_after_s(headers.get("retry-after"))
    return refusal


def _retry_after_s(header: str | None) -> float | None:
    """Return the `Retry-After` header, a number or a date (RFC 9110, section 10.2.3), in seconds; a day at most."""
    if header is None:
        return None
    try:
        seconds = float(header) if header.isdecimal() else parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
        return None
    return min(max(seconds, 0.0), _DAY_S)


def _reported(error: Any, status: int) -> UpstreamError:
    """Return an OpenAI error object as an exception; a too long prompt gets the code that clients recognize."""
    details = dict(error) if isinstance(error, dict) else {"message": str(error)}
    message = str(details.get("message") or error)
    if status in (400, 413, 422) and (details.get("param") == "input_tokens" or _TOO_LONG.search(message)):
        details["code"] = CONTEXT_OVERFLOW
    # A vLLM whose engine has died exits then, and its successor or another replica can answer the call.
    fault: UpstreamFault = "broke_off" if status >= 500 and _ENGINE_DIED.search(message) else "call"
    return UpstreamError(message, status_code=status, details=details, fault=fault)


def start_of(body: bytes) -> str:
    """Return the beginning of a body, for an error message."""
    return repr(body[:120].decode(errors="replace"))


def check_answer(answer: JSONObject) -> None:
    """Check a completion, or a chunk of one.

    Raises:
        UpstreamError: if a field has the wrong type; the message names it.
    """
    _check(answer, _AnswerWithIds)


def check_models(answer: JSONObject) -> None:
    """Check a list of models."""
    _check(answer, _Models)


def _check(answer: JSONObject, shape: type[msgspec.Struct]) -> None:
    try:
        msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise UpstreamError(f"the upstream's answer is malformed: {error}") from error


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | JSONObject | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | list[_Part] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[Any] | None = None
    token_logprobs: list[Any] | None = None
    tokens: list[str | None] | None = None
    top_logprobs: list[JSONObject | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int | None = None
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _ReadTokens(msgspec.Struct, gc=False):
    cached_tokens: int | float | None = None


class _WrittenTokens(msgspec.Struct, gc=False):
    reasoning_tokens: int | float | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | float | None = None
    completion_tokens: int | float | None = None
    prompt_tokens_details: _ReadTokens | None = None
    completion_tokens_details: _WrittenTokens | None = None


class _Facts(msgspec.Struct, gc=False):
    """See `FACTS_KEY`."""

    weight_version: int | None = None
    weight_updates: list[list[list[int]]] | None = None
    template_hash: str | None = None
    logprobs_kind: LogprobsKind = "unknown"
    sampling: JSONObject | None = None


class _Answer(msgspec.Struct, gc=False):
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    rllm: _Facts | None = None


class _Model(msgspec.Struct, gc=False):
    id: str
    created: int | float | None = None


class _Models(msgspec.Struct, gc=False):
    data: list[_Model] | None = None


class _ChoiceWithIds(_Choice, gc=False):
    token_ids: list[int] | None = None


class _AnswerWithIds(_Answer, gc=False):
    prompt_token_ids: list[int] | None = None
    choices: list[_ChoiceWithIds] | None = None  # type: ignore[assignment]  # A list that is only read.


def parse_plain_answer(body: bytes) -> JSONObject | None:
    """Parse a plain chat completion, with `logprobs.token_logprobs` for `logprobs.content`; return `None` for others.

    Args:
        body: body of the HTTP answer.

    Raises:
        UpstreamError: if a field has the wrong type.
    """
    try:
        check_values(body, limit=MAX_ANSWER_VALUE_BYTES)
        answer = _decode_plain(body)
    except (TooLargeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # `json_object` names the problem
    fields = _given(answer)
    fields["choices"] = [
        {**_given(choice), "logprobs": {"token_logprobs": [entry.logprob for entry in choice.logprobs.content]}}
        for choice in answer.choices
    ]
    _check(fields, _Answer)  # The token ids were checked while it was parsed.
    return fields


def _given(struct: msgspec.Struct) -> JSONObject:
    """Return the fields that the answer has."""
    pairs = zip(struct.__struct_fields__, msgspec.structs.astuple(struct), strict=True)
    return {name: value for name, value in pairs if value is not msgspec.UNSET}


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Entries(msgspec.Struct, gc=False):
    content: list[_Entry]


class _PlainChoice(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    index: int
    message: JSONObject
    logprobs: _Entries
    token_ids: list[int]
    finish_reason: Any = msgspec.UNSET
    stop_reason: Any = msgspec.UNSET
    routed_experts: Any = msgspec.UNSET


class _PlainAnswer(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    choices: list[_PlainChoice]
    prompt_token_ids: list[int]
    id: Any = msgspec.UNSET
    object: Any = msgspec.UNSET
    created: Any = msgspec.UNSET
    model: Any = msgspec.UNSET
    usage: Any = msgspec.UNSET
    service_tier: Any = msgspec.UNSET
    system_fingerprint: Any = msgspec.UNSET
    prompt_logprobs: Any = msgspec.UNSET
    prompt_text: Any = msgspec.UNSET
    kv_transfer_params: Any = msgspec.UNSET
    rllm: Any = msgspec.UNSET


_decode_plain = msgspec.json.Decoder(_PlainAnswer).decode


# --- streams ----------------------------------------------------------------------------------------------------------


def parse_events(events: Sequence[bytes], *, logprob_details: bool) -> list[JSONObject]:
    """Return the chunks of these events, in order.

    Args:
        events: data of server-sent events, one JSON object each.
        logprob_details: keep token texts and alternatives. Otherwise the bare numbers are in `logprobs.token_logprobs`.

    Raises:
        UpstreamError: if one of them is not a JSON object, or has a field of the wrong type.
    """
    if logprob_details:
        return [_parse(payload) for payload in events]
    chunks: list[JSONObject] = []
    runs: list[_Run] = []
    run: _Run | None = None
    for payload in events:
        try:
            text_chunk = _decode_text_chunk(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            run = None
            chunks.append(_with_bare_logprobs(_parse(payload)))
            continue
        choice = text_chunk.choices[0]
        logprobs = choice.logprobs
        if run is None or choice.index != run.index or (logprobs is None) is not run.is_bare:
            run = _Run(text_chunk)
            runs.append(run)
            chunks.append(run.chunk)
        # Values are taken out at once, so that the next event reuses the memory of this one.
        run.texts.append(choice.delta.content)
        run.ids += choice.token_ids
        if logprobs is not None:
            for entry in logprobs.content:
                run.numbers.append(entry.logprob)
    for run in runs:
        run.delta["content"] = "".join(run.texts)
    return chunks


def _parse(payload: bytes) -> JSONObject:
    try:
        chunk = parse_json(payload, limit=MAX_ANSWER_VALUE_BYTES)
    except ValueError as error:
        raise UpstreamError(f"the upstream's stream holds an event that is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise UpstreamError(f"the upstream's stream holds an event that is not a JSON object: {payload[:80]!r}")
    if not chunk.get("error"):
        check_answer(chunk)
    return chunk


def _with_bare_logprobs(chunk: JSONObject) -> JSONObject:
    """Return the chunk with bare log-probabilities, like a merged one, unless ids must be read from its token texts."""
    for choice in chunk.get("choices") or ():
        entries = (choice.get("logprobs") or {}).get("content")
        if entries is None or (choice.get("token_ids") is None and has_labels(entries)):
            continue
        numbers = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
        choice["logprobs"] = {"token_logprobs": numbers}
    return chunk


class _Run:
    """Consecutive text chunks of one choice, merged into one."""

    __slots__ = ("chunk", "delta", "ids", "index", "is_bare", "numbers", "texts")

    def __init__(self, first: _TextChunk) -> None:
        [choice] = first.choices
        self.index = choice.index
        self.is_bare = choice.logprobs is None
        """True if its events have no log-probabilities."""
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.numbers: list[float] = []
        self.delta: dict[str, str] = {}
        self.chunk: JSONObject = {
            "id": first.id,
            "object": first.object,
            "created": first.created,
            "model": first.model,
            "choices": [
                {
                    "index": self.index,
                    "delta": self.delta,
                    "logprobs": None if self.is_bare else {"token_logprobs": self.numbers},
                    "finish_reason": None,
                    "token_ids": self.ids,
                }
            ],
        }
        if first.system_fingerprint is not None:
            self.chunk["system_fingerprint"] = first.system_fingerprint


# Fields of a text chunk. A chunk with another field, or with a value where null is expected, is parsed as any other.


class _TextDelta(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: str
    role: None = None
    refusal: None = None
    reasoning: None = None
    reasoning_content: None = None
    tool_calls: None = None


class _TextChoice(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    index: int
    delta: _TextDelta
    token_ids: list[int]
    """Required: without them the ids may be in the texts of the log-probabilities, which are dropped here."""
    logprobs: _Entries | None = None
    finish_reason: None = None
    stop_reason: None = None
    matched_stop: None = None


class _TextChunk(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_TextChoice]
    system_fingerprint: str | None = None
    usage: None = None


_decode_text_chunk = msgspec.json.Decoder(_TextChunk).decode
