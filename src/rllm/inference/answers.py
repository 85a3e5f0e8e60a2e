"""A chat completion of any server as what an engine gives. It needs no client, so it loads in no time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.capture.tokens import tokens_of_choice
from rllm.inference.engine import ModelOutput
from rllm.parser.reasoning import join_reasoning
from rllm.types import text_of


def output_of_answer(response: Mapping[str, Any], sampling: dict[str, Any]) -> ModelOutput:
    """The first choice of a chat completion; without tokens, where those of the answer cannot be used.

    Raises:
        TokenMismatchError: if its ids and log-probabilities contradict each other.
    """
    choices = response["choices"]
    message = choices[0]["message"]
    tokens = tokens_of_choice(response, choices[0], 0)
    usable = tokens.problem is None
    facts = response.get("rllm") or {}
    usage = response.get("usage") or {}
    content = text_of(message)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return ModelOutput(
        id=str(response.get("id") or ""),
        text=join_reasoning(reasoning, content),
        content=content,
        reasoning=reasoning,
        tool_calls=message.get("tool_calls") or [],
        prompt_ids=tokens.prompt_ids if usable else [],
        completion_ids=tokens.response_ids if usable else [],
        logprobs=tokens.logprobs if usable else [],
        logprobs_kind=facts.get("logprobs_kind", "unknown"),
        finish_reason=choices[0].get("finish_reason"),
        stop_string=_text_or_none(choices[0].get("stop_reason")),
        weight_version=facts.get("weight_version"),
        weight_updates=(facts.get("weight_updates") or [[]])[0],
        template_hash=facts.get("template_hash"),
        sampling=sampling,
        metrics={name: float(usage[name]) for name in ("prompt_tokens", "completion_tokens") if usage.get(name)},
    )


def _text_or_none(stop_reason: Any) -> str | None:
    """vLLM tells a stop token by its id in the same place."""
    return stop_reason if isinstance(stop_reason, str) else None
