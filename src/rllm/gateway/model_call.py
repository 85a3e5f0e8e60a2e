"""One model call of a session, as a chat request, and the metadata that its trace gets."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rllm.capture import CallNode, MessageDigests, side_call
from rllm.capture.conversations import NewAnswer
from rllm.gateway.sessions import Session
from rllm.gateway.upstream.base import Route
from rllm.store.codec import any_to_json
from rllm.types import DRIFT_KEY, SIDE_CALL_KEY, JSONMapping, JSONObject, Trace

_SUB_AGENT_HEADERS = (b"x-claude-code-agent-id", b"x-parent-session-id")
"""Headers by which programs name the sub-agent that calls, and the session that it belongs to."""


@dataclass(kw_only=True, slots=True, eq=False)
class ModelCall:
    """One model call as a chat request, whatever its wire format was."""

    asked: JSONMapping
    """The agent's own request, as a chat request."""
    prompt_ids: Sequence[int] | None = None
    """Token ids of the prompt, if known before sampling: sent by the agent, or continuing an earlier answer."""
    session: Session
    metadata: JSONMapping = field(default_factory=dict)
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """Its own W3C headers, which are sent to the upstream unchanged."""
    id: str
    """Id of the answer and of its trace. It is ours, so that no two upstreams can give the same one."""
    started_at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    route: Route = field(init=False)
    digests: MessageDigests | None = field(init=False, default=None)
    """Digests of the messages, to compare with the session's earlier calls, if it may have any."""
    lost: tuple[str, ...] = field(init=False, default=())
    """Kinds of content that the upstream's chat template leaves out of the prompt, such as `tools`."""
    traces: list[Trace] = field(init=False, default_factory=list)
    """Its traces, once they are durable, if spans are exported."""
    background_write: asyncio.Task[None] | None = field(init=False, default=None)
    """Of a call whose client has gone: the task that ends once its traces are durable, or cannot be."""

    def __post_init__(self) -> None:
        # A session that is not kept has this call only.
        session_id = None if self.session.parents is None else self.session.id
        self.route = Route(session_id, seed=self.session.sampling.parameters.get("seed"))
        if self.session.conversations is not None:
            messages = self.asked["messages"]
            self.digests = MessageDigests.of(
                messages, self.asked.get("tools"), self.session.conversations, any_to_json(messages)
            )

    def parent_of(self, prompt_ids: array[int]) -> str | None:
        """Return the earlier call of the session whose tokens the prompt of this call's answer continues."""
        return None if self.session.parents is None else self.session.parents.parent_of(prompt_ids)

    def drift_metadata(self, prompt_ids: array[int]) -> JSONObject:
        """Return as metadata why the prompt does not continue the tokens of the answer before it; empty if it does."""
        if self.digests is None or self.session.conversations is None:
            return {}
        drift = self.session.conversations.drift_of(self.digests, prompt_ids)
        return {} if drift is None else {DRIFT_KEY: drift}

    def to_remember(self, trace: Trace) -> tuple[CallNode | None, NewAnswer | None]:
        """Return the entries by which later calls of the session continue this one, without references to the trace."""
        node = answer = None
        if self.session.parents is not None:
            node = CallNode.of_trace(trace)
        if self.digests is not None and self.session.conversations is not None and trace.error is None:
            answer = self.session.conversations.prepare(self.digests, trace)
        return node, answer

    def remember(self, node: CallNode | None, answer: NewAnswer | None) -> None:
        """Let later calls of the session continue this one, whose trace is durable."""
        if self.session.parents is not None:
            self.session.parents.add(node)
        if self.session.conversations is not None:
            self.session.conversations.add(answer)


def call_metadata(chat: JSONMapping, session: Session, headers: Mapping[bytes, bytes], *, is_own: bool) -> JSONObject:
    """Return the metadata of a call: its sub-agent, and the reason if it is beside its program's task. Mostly empty.

    Args:
        chat: its request. The session remembers whether any of its calls had tools.
        session: its session.
        headers: of its HTTP request.
        is_own: whether the author's own code made it.
    """
    metadata: JSONObject = {
        name.decode(): headers[name].decode("latin-1") for name in _SUB_AGENT_HEADERS if name in headers
    }
    if reason := side_call(chat, session_has_tools=session.has_tools, is_own=is_own):
        metadata[SIDE_CALL_KEY] = reason
    elif chat.get("tools"):
        session.has_tools = True
    return metadata
