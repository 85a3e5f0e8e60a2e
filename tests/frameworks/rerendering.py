"""Prompts without token-exact continuation: rendered again from the messages that a framework sends back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rllm.capture import Conversations, MessageDigests
from rllm.gateway.upstream.token_prompts import for_template
from rllm.types import DRIFT_KEY, Trace

from .forced_engine import ForcedEngine


def rerender(traces: Sequence[Trace], engine: ForcedEngine) -> list[Trace]:
    """Return the traces of one session as a gateway with `exact_turns=False` would have made them of the same requests."""
    conversations = Conversations()
    made: dict[str, Trace] = {}
    for trace in traces:
        answer = MessageDigests.of(trace.messages, trace.tools, conversations)
        prompt_ids = engine.template.render(for_template(trace.messages), trace.tools)
        if missing := conversations.missing_trace(answer):
            conversations.provide_tokens(answer, made[missing])
        drift = conversations.drift_of(answer, prompt_ids)
        metadata = {name: value for name, value in trace.metadata.items() if name != DRIFT_KEY}
        made[trace.id] = replace(
            trace, prompt_ids=prompt_ids, metadata=metadata if drift is None else {**metadata, DRIFT_KEY: drift}
        )
        conversations.add(conversations.prepare(answer, made[trace.id]))
    return list(made.values())
