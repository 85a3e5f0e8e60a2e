"""What the gateway needs from whatever answers the calls: an HTTP server or an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rllm.capture import PriorAnswer
from rllm.gateway.upstream.route import Route

IGNORED_HEADER = "x-rllm-ignored"
"""Of an answer: the fields of its request that ask for something and change nothing, separated by commas."""

FACTS_KEY = "rllm"
"""A field of our own in an answer: `{"weight_version", "weight_updates", "template_hash", "logprobs_kind", "sampling"}`, as
far as they are known; `weight_updates` has an entry for each choice, and `sampling` is what was really used.
`rllm serve` sends it too, so the facts survive a gateway in front of a gateway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamCall:
    """One call as it is put to an upstream."""

    id: str
    """The id that the answer will have."""
    request: Mapping[str, Any]
    """As `Upstream.prepare` made it."""
    prompt_ids: Sequence[int] | None = None
    """In the place of the messages: those of `Upstream.continued_prompt`, or of an agent that sent ids. In the latter case there
    are no messages, and the answer is its text, whatever is in it."""
    logprob_details: bool = True
    """Whether token texts and alternatives are wanted beside the log-probabilities. Where they are not, the bare numbers may
    stand in `logprobs.token_logprobs`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """To send along, where there is an HTTP request."""
    route: Route = field(default_factory=Route)
    """Whose call it is, and where the upstream notes what became of it on the way."""


class Upstream(Protocol):
    """Answers chat requests in the shape of vLLM's chat completions, token fields included."""

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request that will really be sent: sampling parameters explicit, token fields asked for.

        Raises:
            ConfigError: if a parameter is of the wrong type or out of range, or if the upstream refuses it.
        """
        ...

    def ignored(self, request: Mapping[str, Any]) -> Sequence[str]:
        """Return the fields of a chat request that are known to change nothing there, as keys of
        `rllm.inference.parameters`; none of a server, which is not known that well."""
        ...

    def continued_prompt(self, request: Mapping[str, Any], prior: PriorAnswer) -> list[int] | None:
        """The ids that ask for the next answer behind exactly the tokens of an earlier one.

        Args:
            request: a prepared one.
            prior: the earlier call that its messages begin with.

        Returns `None` where the upstream takes nothing but messages, or where its template cannot go on from there.
        """
        ...

    async def complete(self, call: UpstreamCall) -> dict[str, Any]:
        """The whole answer.

        Raises:
            InferenceError: with the status that the agent should see.
        """
        ...

    def stream(self, call: UpstreamCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The answer's chunks, as many at a time as one network read brought. Closing it early cancels the generation.

        Raises:
            InferenceError: before the first chunks or after any.
        """
        ...

    async def models(self) -> list[dict[str, Any]]:
        """The models that can be asked for, in the OpenAI format.

        Raises:
            InferenceError: if the server does not say.
        """
        ...

    async def check(self) -> None:
        """Return if calls can be answered now, else raise `InferenceError`."""
        ...

    async def close(self) -> None:
        """Release connections. Closing twice is allowed."""
        ...
