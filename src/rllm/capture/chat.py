"""Chat-completion exchanges to traces: pure functions that know the wire format and no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rllm._runtime.ids import new_id
from rllm.capture.tokens import tokens_of_choice
from rllm.errors import CaptureError, TokenMismatchError
from rllm.types import LogprobsKind, Trace

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "chat_template_kwargs",
)
"""The request fields that shape the distribution an answer is drawn from, OpenAI's and vLLM's."""

_SAMPLING_FIELDS = frozenset(SAMPLING_FIELDS)


def sampling_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that a chat request sets."""
    return {name: value for name, value in request.items() if value is not None and name in _SAMPLING_FIELDS}


def traces_from_chat(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    session_id: str,
    started_at: float,
    timings: Mapping[str, float],
    metadata: Mapping[str, Any],
    weight_version: int | None = None,
    weight_updates: Sequence[list[list[int]]] = (),
    template_hash: str | None = None,
    requested_sampling: Mapping[str, Any] | None = None,
    logprobs_kind: LogprobsKind = "unknown",
    require_tokens: bool = False,
    parent_id: str | None = None,
) -> list[Trace]:
    """One trace for each choice of a chat completion.

    Args:
        request: what was really sent to the server.
        response: the whole completion, with the token fields that vLLM adds.
        weight_updates: of each choice, where updates of the weights fell into it; see `Trace`. Empty: nowhere.
        requested_sampling: what the agent asked for (its request will do); kept where it differs from what was sent.
        require_tokens: raise where a trace would only explain why it holds no usable tokens.

    Raises:
        TokenMismatchError: if ids and log-probabilities contradict each other.
        CaptureError: if tokens are required and missing.
    """
    sampling = sampling_of(request)
    requested = (requested_sampling or {}).items()
    shared: dict[str, Any] = {
        "call_id": response.get("id") or f"call-{new_id()}",
        "session_id": session_id,
        "parent_id": parent_id,
        "model": response.get("model") or request.get("model") or "",
        "messages": list(request.get("messages") or ()),
        "tools": request.get("tools"),
        "logprobs_kind": logprobs_kind,
        "sampling": sampling,
        "requested_sampling": {
            name: value
            for name, value in requested
            if value is not None and name in _SAMPLING_FIELDS and sampling.get(name) != value
        },
        "weight_version": weight_version,
        "template_hash": template_hash,
        "started_at": started_at,
        "timings": dict(timings),
        "metadata": dict(metadata),
    }
    choices = response.get("choices")
    if choices and weight_updates and len(weight_updates) != len(choices):
        raise TokenMismatchError(f"the answer has {len(choices)} choices and weight_updates of {len(weight_updates)}")
    traces = [
        _trace_of_choice(response, choice, place, shared, weight_updates[place] if weight_updates else [])
        for place, choice in enumerate(choices or ())
    ] or [_trace_of_no_choice(response, shared)]
    if require_tokens:
        for trace in traces:
            if trace.error is not None:
                raise CaptureError(trace.error)
    return traces


def _trace_of_choice(
    response: Mapping[str, Any],
    choice: Mapping[str, Any],
    place: int,
    shared: Mapping[str, Any],
    weight_updates: list[list[int]],
) -> Trace:
    index = choice.get("index", place)
    tokens = tokens_of_choice(response, choice, index)
    return Trace(
        id=shared["call_id"] if index == 0 else f"{shared['call_id']}:{index}",
        choice_index=index,
        response=choice.get("message") or {},
        prompt_ids=tokens.prompt_ids,
        response_ids=tokens.response_ids,
        logprobs=tokens.logprobs,
        finish_reason=choice.get("finish_reason"),
        weight_updates=weight_updates,
        error=tokens.problem,
        **shared,
    )


def _trace_of_no_choice(response: Mapping[str, Any], shared: Mapping[str, Any]) -> Trace:
    given = response.get("choices")
    return Trace(
        id=shared["call_id"],
        response={},
        prompt_ids=response.get("prompt_token_ids") or [],
        finish_reason="error",
        error=f"the server's chat completion (OpenAI format) has choices={given!r}: there is no answer to capture",
        **shared,
    )


def failed_trace(
    request: Mapping[str, Any],
    *,
    session_id: str,
    error: str,
    started_at: float = 0.0,
    timings: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    weight_version: int | None = None,
    requested_sampling: Mapping[str, Any] | None = None,
    call_id: str | None = None,
) -> Trace:
    """The record of a call that got no answer: `error` says why, and there are no tokens."""
    no_answer: dict[str, Any] = {"id": call_id, "choices": []}
    [trace] = traces_from_chat(
        request,
        no_answer,
        session_id=session_id,
        started_at=started_at,
        timings=timings or {},
        metadata=metadata or {},
        weight_version=weight_version,
        requested_sampling=requested_sampling,
    )
    return replace(trace, error=error)
