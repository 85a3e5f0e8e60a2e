"""What a request names: runs, sessions and calls that may not be there, and numbers that may be none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from rllm.capture import SessionTree
from rllm.errors import ConfigError
from rllm.types import Trace
from rllm.viewer.rollouts import Rollout
from rllm.viewer.runs import Run
from rllm.viewer.tokens import TokenTable, token_table

Page: TypeAlias = tuple[str, dict[str, Any]]
"""The name of a template, and its values."""
Given: TypeAlias = Mapping[str, str]
"""A query string."""


class NotFoundError(LookupError):
    """There is no such page; the message says what is missing."""


def rollout_named(run: Run, session_id: str) -> Rollout:
    """The rollout of a session.

    Raises:
        NotFoundError: if there is none.
    """
    found = run.rollouts.get(session_id)
    if found is None:
        raise NotFoundError(
            f"there is no session {session_id!r} in the store: it was deleted, or a resumed run made it again"
        )
    return found


def trace_named(run: Run, session_id: str, trace_id: str) -> Trace:
    """A call of a session; without an id the end of its first sequence.

    Raises:
        NotFoundError: if there is none.
    """
    traces = run.calls(session_id)[0]
    choices = traces if trace_id else SessionTree(traces).leaves()
    found = next((trace for trace in choices if trace_id in (trace.id, "")), None)
    if found is None:
        raise NotFoundError(f"there is no call {trace_id!r} in session {session_id!r}")
    return found


def table_of(run: Run, rollout: Rollout, trace: Trace) -> TokenTable:
    """The tokens of a call and of those before it, with what the store and the run's batches know of them."""
    traces, credits_ = run.calls(rollout.session_id)
    batch = run.batch(rollout.step) if rollout.split == "train" and rollout.step else None
    return token_table(trace, traces, credits_, batch)


def whole(given: Given, name: str) -> int | None:
    """A whole number of the query, if it is there.

    Raises:
        ConfigError: if it is none.
    """
    text = given.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{name}={text!r}: use a whole number")
    return int(text)
