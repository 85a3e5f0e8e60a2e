"""What a wire format is: how its requests, answers, streams and errors are written.

Inside the gateway every request and every answer is OpenAI's chat completion; a dialect translates to and from it by pure
functions. So an upstream needs to speak chat completions only, and tokens are captured once, below all dialects.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from rllm.gateway.errors import GatewayError
from rllm.types import Trace


class StreamEncoder(Protocol):
    """Writes one streamed answer. Whatever a client may act on, such as a tool call, is kept for `finish`."""

    keep_alive: bytes
    """What may be sent between events while there is nothing to say."""

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
    """A wire format; `asked` is always a request as its client wrote it."""

    id_prefix: str
    """How the ids of its answers begin."""
    name: str
    """The dialect's name in logs, metrics and `parameters.TABLES`."""
    chat_names: Mapping[str, str]
    """By key of a chat field, its own name for it, where that is another; see `rllm.inference.parameters`."""
    continues_answers: bool
    """Whether a request may name an earlier answer instead of repeating the conversation."""

    def parse(self, body: bytes) -> dict[str, Any]:
        """The request of this body.

        Raises:
            GatewayError: 400, if it is not a JSON object.
        """
        ...

    def refers_to(self, asked: Mapping[str, Any]) -> Sequence[str]:
        """The ids of the earlier answers that `to_chat` needs."""
        ...

    def to_chat(self, asked: dict[str, Any], earlier: Mapping[str, Trace]) -> dict[str, Any]:
        """The request as a chat request; members that the dialect does not know are passed on.

        Args:
            asked: the request.
            earlier: the traces of the answers that it refers to, as far as there are any.

        Raises:
            GatewayError: 400, if it is malformed, or asks for what a chat completion cannot give.
        """
        ...

    def prompt_ids(self, asked: Mapping[str, Any]) -> list[int] | None:
        """The prompt of a request that gives it as token ids; `to_chat` has made a request without messages of it then."""
        ...

    def notes(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a trace must say about the request to be continued later; goes to its metadata."""
        ...

    def render(self, response: dict[str, Any], *, asked: Mapping[str, Any]) -> bytes:
        """A whole answer, without the token fields that this request did not ask for; it may change `response`."""
        ...

    def encoder(self, *, asked: Mapping[str, Any]) -> StreamEncoder: ...

    def render_error(self, error: GatewayError) -> bytes: ...


class WholeConversations:
    """The part of a dialect whose requests never refer to earlier answers."""

    continues_answers = False

    def refers_to(self, asked: Mapping[str, Any]) -> Sequence[str]:
        return ()

    def prompt_ids(self, asked: Mapping[str, Any]) -> list[int] | None:
        return None

    def notes(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}


COMMENT = b": keep-alive\n\n"
"""A server-sent event that every client ignores, and that ends its read timeout."""


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """A typed server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(data))


def first_choice(response: Mapping[str, Any]) -> dict[str, Any]:
    """The answer that a dialect shows which knows one answer to a call only."""
    choices: Sequence[dict[str, Any]] = response.get("choices") or ({},)
    return choices[0]


def reasoning_of(message: Mapping[str, Any]) -> str:
    """What was thought before a message or a delta was said; servers disagree about the name of the field."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def created_at(response: Mapping[str, Any]) -> int:
    """Unix seconds at which an answer was made."""
    created = response.get("created")
    return created if isinstance(created, int) else int(time.time())


def usage_of(response: Mapping[str, Any]) -> dict[str, int]:
    """How many tokens were read and written; counted, where the server does not say."""
    usage = response.get("usage") or {}
    read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    choices = response.get("choices") or ()
    num_written = sum(len(choice.get("token_ids") or ()) for choice in choices)
    return {
        "prompt": usage.get("prompt_tokens") or len(response.get("prompt_token_ids") or ()),
        "completion": usage.get("completion_tokens") or num_written,
        "cached": read.get("cached_tokens") or 0,
        "reasoning": written.get("reasoning_tokens") or 0,
    }


def token_fields(response: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of the prompt and of the first choice, for clients that ask for them."""
    if not asked.get("return_token_ids"):
        return {}
    return {
        "prompt_token_ids": response.get("prompt_token_ids"),
        "token_ids": first_choice(response).get("token_ids"),
    }
