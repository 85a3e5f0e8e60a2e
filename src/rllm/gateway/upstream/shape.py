"""What an upstream's answer must look like for the gateway to read it: checked once, where its bytes come in.

Only the types of the fields that are read here; any other field is passed on as it is, and one that is missing is completed
or named later.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rllm.gateway.errors import UpstreamError
from rllm.types import LogprobsKind


def check_answer(answer: dict[str, Any]) -> None:
    """Check a completion, or a chunk of one.

    Raises:
        UpstreamError: naming the field whose type is wrong.
    """
    _check(answer, _AnswerWithIds)


def check_plain_answer(answer: dict[str, Any]) -> None:
    """`check_answer` for one whose token ids were checked while it was parsed."""
    _check(answer, _Answer)


def check_models(answer: dict[str, Any]) -> None:
    """The same of a list of models."""
    _check(answer, _Models)


def _check(answer: dict[str, Any], shape: type[msgspec.Struct]) -> None:
    try:
        msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise UpstreamError(f"the upstream's answer is not what was asked for: {error}") from error


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


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
    top_logprobs: list[dict[str, Any] | None] | None = None


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
    sampling: dict[str, Any] | None = None


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
