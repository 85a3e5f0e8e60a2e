"""An answer of an engine in this process to a `Trace`, held to the same checks as an answer from the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rllm.capture.chat import sampling_of
from rllm.capture.snapshot import snapshot
from rllm.capture.tokens import check_tokens
from rllm.types import LogprobsKind, Message, Trace


class Sampled(Protocol):
    """What a trace is made of; `rllm.inference.engine.ModelOutput` is one."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def completion_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def logprobs_kind(self) -> LogprobsKind: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def weight_version(self) -> int | None: ...
    @property
    def weight_updates(self) -> list[list[int]]: ...
    @property
    def template_hash(self) -> str | None: ...
    @property
    def sampling(self) -> dict[str, Any]: ...
    def to_message(self) -> Message: ...


def trace_from_output(
    output: Sampled,
    *,
    call_id: str,
    session_id: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    requested_sampling: Mapping[str, Any],
    model: str,
    started_at: float,
    timings: Mapping[str, float],
    metadata: Mapping[str, Any],
    parent_id: str | None = None,
) -> Trace:
    """The trace of one answer; one without usable tokens says in `error` what is missing.

    It shares nothing that can change with what the agent is given.

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


def _as_json(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """With lists for tuples, as a trace reads that comes back from a store."""
    return {name: list(value) if isinstance(value, tuple) else snapshot(value) for name, value in sampling.items()}
