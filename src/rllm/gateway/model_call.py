"""One model call of a session, as a chat request."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rllm._runtime.ids import new_id
from rllm.capture import CallNode, MessageDigests, PriorAnswer
from rllm.gateway.sessions import Session
from rllm.gateway.upstream.route import Route
from rllm.types import DRIFT_KEY, Trace


def new_call_id(prefix: str) -> str:
    """A new id, in the form that answers of one wire format have."""
    return prefix + new_id()


@dataclass(kw_only=True, slots=True, eq=False)
class ModelCall:
    """One model call as a chat request, whatever wire format it came in."""

    asked: Mapping[str, Any]
    """The agent's own request, as a chat request."""
    prompt_ids: Sequence[int] | None = None
    """The prompt, as far as its tokens are known before it is sampled from: where the agent sent them, and there are no messages
    then, or where they go on from an earlier answer."""
    session: Session
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """Its own W3C headers, which go to the upstream as they came."""
    id: str
    """The id of the answer and of its trace. Ours, so that no two upstreams can ever give the same."""
    started_at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    route: Route = field(init=False)
    said: MessageDigests | None = field(init=False, default=None)
    """What is compared with the session's earlier calls, if it may have any."""
    lost: tuple[str, ...] = field(init=False, default=())
    """Kinds of content that the upstream's chat template leaves out of the prompt, such as `tools`."""
    traces: list[Trace] = field(init=False, default_factory=list)
    """What came of it, once that is durable."""
    left: asyncio.Task[None] | None = field(init=False, default=None)
    """For a call whose client has left: ends when what came of it is durable, or cannot be."""

    def __post_init__(self) -> None:
        # A session that is not kept has this call only.
        self.route = Route(None if self.session.parents is None else self.session.id)
        if self.session.conversations is not None:
            self.said = MessageDigests.of(self.asked["messages"], self.asked.get("tools"), self.session.conversations)

    def prior(self) -> PriorAnswer | None:
        """The earlier call of the session that the messages go on from."""
        if self.said is None or self.session.conversations is None:
            return None
        return self.session.conversations.prior_answer(self.said)

    def lacks(self) -> str | None:
        """The earlier trace whose tokens must be supplied to tell."""
        if self.said is None or self.session.conversations is None or not self.said.has_answer:
            return None
        return self.session.conversations.missing_trace(self.said)

    def supply(self, trace: Trace | None) -> None:
        """The trace that was missing."""
        if self.said is not None and self.session.conversations is not None:
            self.session.conversations.provide_tokens(self.said, trace)

    def parent_of(self, prompt_ids: Any) -> str | None:
        """The earlier call of the session whose tokens the prompt goes on from."""
        if self.session.parents is None or not isinstance(prompt_ids, list | array):
            return None
        return self.session.parents.parent_of(prompt_ids)

    def drift(self, prompt_ids: Any) -> dict[str, Any]:
        """As metadata, why the prompt does not go on from the tokens of the answer that it follows; empty if it does."""
        if self.said is None or self.session.conversations is None or not isinstance(prompt_ids, list | array):
            return {}
        drift = self.session.conversations.drift_of(self.said, prompt_ids)
        return {} if drift is None else {DRIFT_KEY: drift}

    def keeping(self, trace: Trace) -> Iterator[Callable[[], None]]:
        """What, once it is called, lets later calls of the session find this one; it has no hold of the trace."""
        if self.session.parents is not None:
            yield partial(self.session.parents.add, CallNode.of_trace(trace))
        if self.said is not None and self.session.conversations is not None and trace.error is None:
            conversations = self.session.conversations
            yield partial(conversations.add, conversations.prepare(self.said, trace))
