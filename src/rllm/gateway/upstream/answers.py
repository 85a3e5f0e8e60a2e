"""Whole answers, parsed without an object for every token: of a log-probability's entry only the number is kept.

That holds for plain answers: every field is one that OpenAI or vLLM defines. Any other answer is left to an ordinary parser,
so that no field is ever lost.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rllm._runtime.untrusted import TooLargeError, check_values
from rllm.capture.tokens import TOKEN_ID_PREFIX
from rllm.gateway.upstream.refusals import MAX_ANSWER_VALUE_BYTES
from rllm.gateway.upstream.shape import check_plain_answer


def parse_plain_answer(body: bytes) -> dict[str, Any] | None:
    """A chat completion with `logprobs.token_logprobs` instead of `logprobs.content`; `None` if it is not a plain one.

    Args:
        body: of the HTTP answer.

    Raises:
        UpstreamError: if one of its fields has another type than it should.
    """
    if not _has_few_values(body):
        return None
    try:
        answer = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if any(_has_labels(choice.logprobs.content) for choice in answer.choices):
        return None  # an ordinary parser compares these with the ids
    fields = _given(answer)
    fields["choices"] = [_choice_to_dict(choice) for choice in answer.choices]
    check_plain_answer(fields)
    return fields


def _has_few_values(body: bytes) -> bool:
    try:
        check_values(body, limit=MAX_ANSWER_VALUE_BYTES)
    except TooLargeError:
        return False  # `json_object` names it
    return True


def _has_labels(entries: list[_Entry]) -> bool:
    return bool(entries) and (entries[0].token or "").startswith(TOKEN_ID_PREFIX)


def _choice_to_dict(choice: _Choice) -> dict[str, Any]:
    fields = _given(choice)
    fields["logprobs"] = {"token_logprobs": [entry.logprob for entry in choice.logprobs.content]}
    return fields


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields that the answer has."""
    pairs = zip(struct.__struct_fields__, msgspec.structs.astuple(struct), strict=True)
    return {name: value for name, value in pairs if value is not msgspec.UNSET}


class _Entry(msgspec.Struct, gc=False):
    logprob: float
    token: str | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry]


class _Choice(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    index: int
    message: dict[str, Any]
    logprobs: _Logprobs
    token_ids: list[int]
    finish_reason: Any = msgspec.UNSET
    stop_reason: Any = msgspec.UNSET
    routed_experts: Any = msgspec.UNSET


class _Answer(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    choices: list[_Choice]
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


_decode = msgspec.json.Decoder(_Answer).decode
