"""Interface of upstreams, which answer the calls: an HTTP server, several, or an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rllm.capture import PriorAnswer
from rllm.types import JSONMapping, JSONObject, Message

IGNORED_HEADER = "x-rllm-ignored"
"""Header of an answer: the fields of its request that have no effect, separated by commas."""

FACTS_KEY = "rllm"
"""Key of our own field in an answer: `{"weight_version", "weight_updates", "template_hash", "logprobs_kind",
"sampling"}`, as far as they are known; `weight_updates` has an entry for each choice, and `sampling` holds the
parameters in effect. `rllm serve` sends it too, so the facts survive a gateway in front of a gateway."""

UPSTREAM_KEY = "rllm.upstream"
"""Metadata key of a trace: the route of its call, `{"replica", "retries", "updated_to"}`, as far as these exist."""


@dataclass(slots=True)
class Route:
    """Route of one call through the upstreams: made for each call, and filled in by them."""

    session_id: str | None = None
    """Session of the call, whose calls share prompt prefixes; `None` for a call that nothing continues."""
    seed: int | None = None
    """Seed that the session imposes on its calls, before each gets one derived from it."""
    deadline: float | None = None
    """End of the call's time, waiting and retries included, on `time.monotonic`'s clock; `None` until a pool sets
    it."""
    replica: str | None = None
    """Address that answered, if there are several."""
    weight_version: int | None = None
    """Published weight version when the call reached the replica."""
    updated_to: int | None = None
    """Published weight version when the call ended, if it had changed."""
    is_passed_on: bool = False
    """True if the agent has some of the answer, so that the call cannot be retried."""
    queue_s: float = 0.0
    """Total seconds for which the call waited."""
    retries: list[JSONObject] = field(default_factory=list)
    """Failed attempts, each as `{"replica", "fault", "status", "error", "lost_s"}`."""
    ignored: str = ""
    """Fields of the request without effect at the upstream, as another gateway names them in its header."""

    def timings(self) -> Mapping[str, float]:
        """Return the entries to add to the trace's timings."""
        if not self.queue_s and not self.retries:
            return {}
        return {"queue_s": self.queue_s, "retry_s": sum(retry["lost_s"] for retry in self.retries)}

    def notes(self) -> JSONMapping:
        """Return the entries to add to the trace's metadata."""
        if self.replica is None and not self.retries and self.updated_to is None:
            return {}
        known = {"replica": self.replica, "retries": self.retries or None, "updated_to": self.updated_to}
        return {UPSTREAM_KEY: {name: value for name, value in known.items() if value is not None}}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamCall:
    """One call of an upstream."""

    id: str
    """Id of the answer."""
    request: JSONMapping
    """Request from `Upstream.prepare`."""
    prompt_ids: Sequence[int] | None = None
    """Prompt in place of the messages: from `Upstream.continued_prompt`, or from an agent that sent ids. In the latter
    case there are no messages, and the whole text is the answer."""
    logprob_details: bool = True
    """Ask for token texts and alternatives with the log-probabilities. Otherwise the bare numbers may be in
    `logprobs.token_logprobs`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for the HTTP request, if there is one."""
    route: Route = field(default_factory=Route)
    """Route of the call, which the upstream fills in."""


class Upstream(Protocol):
    """Answers chat requests in the shape of vLLM's chat completions, token fields included."""

    def prepare(self, request: JSONMapping) -> JSONObject:
        """Return the request to send, with explicit sampling parameters, and asking for token fields.

        Raises:
            ConfigError: if a parameter is of the wrong type or out of range, or if the upstream refuses it.
        """
        ...

    def ignored(self, request: JSONMapping) -> Sequence[str]:
        """Return the fields of a chat request that are known to have no effect there.

        They are keys of `rllm.inference.parameters`; those that a server ignores are not known.
        """
        ...

    def continued_prompt(self, request: JSONMapping, prior: PriorAnswer) -> Sequence[int] | None:
        """Return the prompt ids that continue exactly the tokens of an earlier answer.

        `None` if the upstream takes only messages, or if its template cannot continue from there.

        Args:
            request: a prepared one.
            prior: the earlier call that its messages begin with.
        """
        ...

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        """Return the kinds of content that the template leaves out of a prompt, as far as it is known."""
        ...

    async def complete(self, call: UpstreamCall) -> JSONObject:
        """Return the whole answer.

        Raises:
            InferenceError: with the status that the agent should see.
        """
        ...

    def stream(self, call: UpstreamCall) -> AsyncGenerator[list[JSONObject], None]:
        """Yield the answer's chunks, in batches of those that one network read brought.

        Closing the generator early cancels the generation.

        Raises:
            InferenceError: before the first batch, or after any.
        """
        ...

    async def models(self) -> list[JSONObject]:
        """Return the models that are served, in the OpenAI format.

        Raises:
            InferenceError: if the server does not list them.
        """
        ...

    async def check(self) -> None:
        """Return if calls can be answered now, else raise `InferenceError`."""
        ...

    async def close(self) -> None:
        """Release connections. Closing twice is allowed."""
        ...
