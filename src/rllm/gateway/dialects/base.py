"""What a wire format is: how its requests, answers, streams and errors are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rllm.gateway.errors import GatewayError


class StreamEncoder(Protocol):
    """Writes one streamed answer. Whatever tells the client that the answer is complete is kept for `finish`."""

    def feed(self, chunks: list[dict[str, Any]]) -> bytes:
        """What can be sent at once for these chunks, which it may change."""
        ...

    def finish(self) -> bytes:
        """The end of a complete answer; sent only when its trace is durable."""
        ...

    def fail(self, error: GatewayError) -> bytes:
        """The end of an answer that broke off."""
        ...


class Dialect(Protocol):
    """A wire format. Inside the gateway every request and answer is OpenAI's chat completion."""

    def parse(self, body: bytes) -> dict[str, Any]:
        """The request as a chat request.

        Raises:
            GatewayError: 400, if it is not one.
        """
        ...

    def render(self, response: dict[str, Any], *, asked: Mapping[str, Any]) -> bytes:
        """A whole answer, without the token fields that this request did not ask for; it may change `response`."""
        ...

    def encoder(self, *, asked: Mapping[str, Any]) -> StreamEncoder: ...

    def render_error(self, error: GatewayError) -> bytes: ...
