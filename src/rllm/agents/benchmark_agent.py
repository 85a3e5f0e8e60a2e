"""Default agent of a benchmark: one model call for each task, scored by the benchmark's scorer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from rllm.data.benchmarks import BENCHMARKS, messages_of
from rllm.registry import load_object
from rllm.rewards.scoring import AnyReward, with_reward
from rllm.types import JSONObject

if TYPE_CHECKING:
    from openai import OpenAI


def benchmark_agent(name: str, reward: AnyReward | None = None) -> Callable[..., Any]:
    """Return an agent function for the tasks of a benchmark; `reward` replaces its scorer.

    The answer to score is the model's text, or its tool calls as `{"name": ..., "arguments": {...}}`, if the task
    offers tools and the model called any.

    Raises:
        MissingDependencyError: if the scorer needs a package that is not installed.
    """
    benchmark = BENCHMARKS[name]
    if benchmark.check is not None and reward is None:
        load_object(benchmark.check)()

    def answer(**task: Any) -> str | list[JSONObject]:
        request: JSONObject = {"model": "policy", "messages": messages_of(benchmark, task)}
        if task.get("tools"):
            request["tools"] = task["tools"]
        response = _client(os.environ.get("OPENAI_BASE_URL")).chat.completions.create(**request)
        message = response.choices[0].message
        called: list[Any] = message.tool_calls or []
        calls = [{"name": call.function.name, "arguments": _parsed(call.function.arguments)} for call in called]
        return calls or message.content or ""

    answer.__name__ = answer.__qualname__ = name
    return with_reward(answer, reward or load_object(benchmark.reward, kind="reward"))


@cache
def _client(base_url: str | None) -> OpenAI:
    """Return the client of a gateway; making one is slow."""
    from openai import OpenAI

    return OpenAI(base_url=base_url)


def _parsed(arguments: str) -> object:
    """Return the value of JSON text; text that is not JSON as it is, which no scorer accepts."""
    try:
        value: object = json.loads(arguments)
    except ValueError:
        return arguments
    return value
