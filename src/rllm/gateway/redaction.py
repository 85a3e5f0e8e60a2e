"""Redaction: a hook that changes the texts of traces before they are stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TypeAlias

from rllm.errors import ConfigError
from rllm.gateway.errors import GatewayError
from rllm.registry import load_object
from rllm.types import Trace

Redact: TypeAlias = Callable[[Trace], Trace]
"""Returns a trace with other texts. It gets a copy, and runs in the gateway's event loop, so it must be quick."""

TEXTS = frozenset({"messages", "tools", "response", "requested_sampling", "sampling", "metadata", "error"})
"""Fields of a trace that a hook may change. Ids and log-probabilities stay; note that ids spell the text of which they
are the tokens."""


def load_redact(path: str) -> Redact:
    """Return the function `pkg.mod:function`.

    Raises:
        ConfigError: if there is none of this name.
    """
    if ":" not in path:
        raise ConfigError(f"redact={path!r}: use package.module:function")
    hook = load_object(path, kind="redact")
    if not callable(hook):
        raise ConfigError(f"redact={path!r} is {type(hook).__name__}: name a function of a Trace that returns a Trace")
    found: Redact = hook
    return found


def redacted(traces: Sequence[Trace], hook: Redact) -> tuple[list[Trace], GatewayError | None]:
    """Return the traces as they may be stored, and the error if the hook failed.

    A trace for which it failed is stored without any text, so that nothing gets out and the call is still on record.
    """
    kept: list[Trace] = []
    problem: GatewayError | None = None
    for trace in traces:
        try:
            changed = hook(copy.deepcopy(trace))
            if not isinstance(changed, Trace):
                raise TypeError(f"it returned {type(changed).__name__}, which is not a Trace")
            for item in fields(Trace):
                if item.name not in TEXTS and getattr(changed, item.name) != getattr(trace, item.name):
                    raise ValueError(f"it changed {item.name}, and may change only {', '.join(sorted(TEXTS))}")
            kept.append(changed)
        except Exception as error:
            problem = GatewayError(
                500, f"the redaction hook failed: {type(error).__name__}: {error}", code="redaction_failed"
            )
            problem.__cause__ = error
            kept.append(_without_texts(trace))
    return kept, problem


def _without_texts(trace: Trace) -> Trace:
    return replace(
        trace,
        messages=[],
        tools=None,
        response={},
        requested_sampling={},
        sampling={},
        metadata={},
        error="the redaction hook failed, so no text of this call was stored",
    )
