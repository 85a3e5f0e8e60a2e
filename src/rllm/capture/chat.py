"""Conversion of model calls to traces: of chat completions from the wire, and of answers of engines in this process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rllm._runtime.ids import new_id
from rllm.capture.tokens import check_tokens, tokens_of_choice
from rllm.errors import CaptureError, TokenMismatchError
from rllm.types import JSONMapping, JSONObject, LogprobsKind, Message, Trace

T = TypeVar("T")

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
"""Request fields that shape the distribution an answer is drawn from: OpenAI's and vLLM's."""

_SAMPLING_FIELDS = frozenset(SAMPLING_FIELDS)


def sampling_of(request: JSONMapping) -> JSONObject:
    """Return the sampling fields that a chat request sets."""
    return {name: value for name, value in request.items() if value is not None and name in _SAMPLING_FIELDS}


def traces_from_chat(
    request: JSONMapping,
    response: JSONMapping,
    *,
    session_id: str,
    started_at: float,
    timings: Mapping[str, float],
    metadata: JSONMapping,
    weight_version: int | None = None,
    weight_updates: Sequence[list[list[int]]] = (),
    template_hash: str | None = None,
    requested_sampling: JSONMapping | None = None,
    logprobs_kind: LogprobsKind = "unknown",
    require_tokens: bool = False,
    parent_id: str | None = None,
) -> list[Trace]:
    """Return one trace for each choice of a chat completion.

    Args:
        request: The request that was sent to the server.
        response: The whole completion, with the token fields that vLLM adds.
        session_id: Session of the call.
        started_at: Unix seconds at which the request arrived.
        timings: Durations in seconds; see `Trace`.
        metadata: Metadata of the trace.
        weight_version: Weights that sampled the answer, or its beginning.
        weight_updates: Updates of the weights during each choice; see `Trace`. Empty for none.
        template_hash: Hash of the chat template.
        requested_sampling: Sampling parameters that the agent asked for, or its whole request; differences are
            stored.
        logprobs_kind: Distribution of the log-probabilities.
        require_tokens: Raise if a trace would have no usable tokens, instead of storing the reason in it.
        parent_id: The call that the prompt continues.

    Raises:
        TokenMismatchError: if ids and log-probabilities contradict each other.
        CaptureError: if tokens are required and missing.
    """
    sampling = sampling_of(request)
    requested = (requested_sampling or {}).items()
    shared: JSONObject = {
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
        raise TokenMismatchError(f"the answer has {len(choices)} choices and weight_updates for {len(weight_updates)}")
    traces = []
    for place, choice in enumerate(choices or ()):
        index = choice.get("index", place)
        tokens = tokens_of_choice(response, choice, index)
        traces.append(
            Trace(
                id=shared["call_id"] if index == 0 else f"{shared['call_id']}:{index}",
                choice_index=index,
                response=choice.get("message") or {},
                prompt_ids=tokens.prompt_ids,
                response_ids=tokens.response_ids,
                logprobs=tokens.logprobs,
                finish_reason=choice.get("finish_reason"),
                weight_updates=weight_updates[place] if weight_updates else [],
                error=tokens.problem,
                **shared,
            )
        )
    if not traces:
        no_answer = "there is no answer to capture"
        traces.append(
            Trace(
                id=shared["call_id"],
                response={},
                prompt_ids=response.get("prompt_token_ids") or [],
                finish_reason="error",
                error=f"the server's chat completion (OpenAI format) has choices={choices!r}: {no_answer}",
                **shared,
            )
        )
    if require_tokens and (error := next((trace.error for trace in traces if trace.error is not None), None)):
        raise CaptureError(error)
    return traces


def failed_trace(
    request: JSONMapping,
    *,
    session_id: str,
    error: str,
    started_at: float = 0.0,
    timings: Mapping[str, float] | None = None,
    metadata: JSONMapping | None = None,
    weight_version: int | None = None,
    requested_sampling: JSONMapping | None = None,
    call_id: str | None = None,
) -> Trace:
    """Return the trace of a call without an answer: `error` is the reason, and there are no tokens."""
    no_answer: JSONObject = {"id": call_id, "choices": []}
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


class EngineAnswer(Protocol):
    """An answer of an engine in this process; `rllm.inference.engine.ModelOutput` is one."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    logprobs_kind: LogprobsKind
    finish_reason: str | None
    weight_version: int | None
    weight_updates: list[list[int]]
    template_hash: str | None
    sampling: JSONObject

    def to_message(self) -> Message: ...


def trace_from_output(
    output: EngineAnswer,
    *,
    call_id: str,
    session_id: str,
    messages: Sequence[Message],
    tools: Sequence[JSONMapping] | None,
    requested_sampling: JSONMapping,
    model: str,
    started_at: float,
    timings: Mapping[str, float],
    metadata: JSONMapping,
    parent_id: str | None = None,
) -> Trace:
    """Return the trace of one answer of an engine, held to the same checks as an answer from the wire.

    `error` names the tokens that are missing. The trace shares no mutable object with the agent.

    Raises:
        TokenMismatchError: if ids and log-probabilities contradict each other.
    """
    problem = check_tokens(output.prompt_ids, output.completion_ids, output.logprobs, where=f"call {call_id}")
    sampling, requested = _as_json(output.sampling), _as_json(sampling_of(requested_sampling))
    return Trace(
        id=call_id,
        call_id=call_id,
        session_id=session_id,
        parent_id=parent_id,
        model=model,
        messages=snapshot(list(messages)),
        tools=snapshot([dict(tool) for tool in tools]) if tools else None,
        response=snapshot(output.to_message()),
        prompt_ids=list(output.prompt_ids),
        response_ids=list(output.completion_ids),
        logprobs=list(output.logprobs),
        logprobs_kind=output.logprobs_kind,
        sampling=sampling,
        requested_sampling={name: value for name, value in requested.items() if sampling.get(name) != value},
        finish_reason=output.finish_reason,
        weight_version=output.weight_version,
        weight_updates=snapshot(output.weight_updates),
        template_hash=output.template_hash,
        started_at=started_at,
        timings=dict(timings),
        metadata=dict(metadata),
        error=problem,
    )


def _as_json(sampling: JSONMapping) -> JSONObject:
    """Copy sampling parameters with lists for tuples, as a store returns them."""
    return {name: list(value) if isinstance(value, tuple) else snapshot(value) for name, value in sampling.items()}


def snapshot(value: T) -> T:
    """Copy the dicts, lists, tuples, sets and NumPy arrays that a value consists of.

    Everything else in it, such as texts and clients, is shared.
    """
    if isinstance(value, str | int | float | None):
        return value
    data: Any = value
    if isinstance(data, dict):
        data = {key: snapshot(item) for key, item in data.items()}
    elif isinstance(data, list):
        data = [snapshot(item) for item in data]
    elif type(data) is tuple:
        data = tuple([snapshot(item) for item in data])
    elif isinstance(data, set | bytearray) or (
        # An array that can copy itself: not a tensor, nor a lazily read file.
        hasattr(type(data), "__array__") and hasattr(type(data), "__copy__")
    ):
        data = copy.copy(data)
    copied: T = data
    return copied
