"""Protocol of a dialect: how the requests, answers, streams and errors of one wire format are written.

Inside the gateway every request and every answer is OpenAI's chat completion; a dialect translates to and from it with pure
functions. So an upstream needs to speak chat completions only, and tokens are captured once, below all dialects.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import orjson

from rllm.capture.wire_formats import WIRE_FORMATS, WireFormat
from rllm.gateway.dialects.fields import is_too_deep, parse_object
from rllm.gateway.errors import GatewayError
from rllm.types import Trace


class StreamEncoder(Protocol):
    """Encoder of one streamed answer. Everything that a client may act on, such as a tool call, is held until `finish`."""

    keep_alive: bytes
    """Bytes that may be sent between events while there is nothing else to send."""

    def feed(self, chunks: list[dict[str, Any]]) -> bytes:
        """Return the bytes that can be sent at once for these chunks, which it may change."""
        ...

    def finish(self) -> bytes:
        """Return the end of a complete answer; sent only after its trace is durable."""
        ...

    def fail(self, error: GatewayError) -> bytes:
        """Return the end of an answer that broke off."""
        ...


class Dialect(Protocol):
    """A wire format. `asked` is always a request as its client wrote it."""

    wire: WireFormat
    """Its row in the registry: paths, key header, variables."""
    id_prefix: str
    """Beginning of the ids of its answers."""
    chat_names: Mapping[str, str]
    """The dialect's own names of chat fields, where they differ, by key; see `rllm.inference.parameters`."""
    continues_answers: bool
    """Whether a request may name an earlier answer instead of repeating the conversation."""

    def parse(self, body: bytes, path: Mapping[str, str]) -> dict[str, Any]:
        """Return the request of a body and of the path it was sent to.

        Args:
            body: of the HTTP request.
            path: the named parts of the path's template, and the `template` and `query` themselves.

        Raises:
            GatewayError: 400, if the body is not a JSON object.
        """
        ...

    def refers_to(self, asked: Mapping[str, Any]) -> Sequence[str]:
        """Return the ids of the earlier answers that `to_chat` needs."""
        ...

    def to_chat(self, asked: dict[str, Any], earlier: Mapping[str, Trace]) -> dict[str, Any]:
        """Return the request as a chat request; members that the dialect does not know are passed on.

        Args:
            asked: the request.
            earlier: the traces of the answers it refers to, as far as there are any.

        Raises:
            GatewayError: 400, if it is malformed, or asks for something that a chat completion cannot give.
        """
        ...

    def prompt_ids(self, asked: Mapping[str, Any]) -> list[int] | None:
        """Return the prompt of a request that gives it as token ids; `to_chat` returns no messages for it."""
        ...

    def trace_metadata(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata that a trace needs so that the request can be continued later."""
        ...

    def render(self, response: dict[str, Any], *, asked: Mapping[str, Any]) -> bytes:
        """Return a whole answer, without token fields that this request did not ask for; may change `response`."""
        ...

    def encoder(self, *, asked: Mapping[str, Any]) -> StreamEncoder:
        """Return an encoder for one streamed answer."""
        ...

    def render_count(self, num_tokens: int) -> bytes:
        """Return the answer to a request for the number of tokens of a prompt."""
        ...

    def render_error(self, error: GatewayError) -> bytes:
        """Return an error object as the body of an answer."""
        ...

    def render_models(self, models: Sequence[Mapping[str, Any]]) -> bytes:
        """Return a list of models, given in OpenAI's format."""
        ...

    def render_model(self, model: Mapping[str, Any]) -> bytes:
        """Return one model, given in OpenAI's format."""
        ...


def wire_format(name: str) -> WireFormat:
    """Return the row of a wire format in the registry."""
    return next(row for row in WIRE_FORMATS if row.name == name)


class OpenAIDialect:
    """Shared part of OpenAI's dialects, and the default of the others."""

    needs: str
    """Members that every request has, for the error message of a body that is not an object."""
    prompt_name = "messages"
    """Name of the prompt in error objects."""
    chat_names: Mapping[str, str] = MappingProxyType({})
    continues_answers = False

    def parse(self, body: bytes, path: Mapping[str, str]) -> dict[str, Any]:
        return parse_object(body, needs=self.needs)

    def refers_to(self, asked: Mapping[str, Any]) -> Sequence[str]:
        return ()

    def prompt_ids(self, asked: Mapping[str, Any]) -> list[int] | None:
        return None

    def trace_metadata(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    def render_count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": num_tokens})

    def render_error(self, error: GatewayError) -> bytes:
        return orjson.dumps(error.to_dict(prompt=self.prompt_name))

    def render_models(self, models: Sequence[Mapping[str, Any]]) -> bytes:
        return orjson.dumps({"object": "list", "data": models})

    def render_model(self, model: Mapping[str, Any]) -> bytes:
        return orjson.dumps(model)


COMMENT = b": keep-alive\n\n"
"""A server-sent comment, which clients ignore, but which resets their read timeout."""


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a typed server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(data))


def first_choice(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first choice, for dialects that know one answer per call only."""
    choices: Sequence[dict[str, Any]] = response.get("choices") or ({},)
    return choices[0]


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message or a delta; servers disagree about the name of the field."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def created_at(response: Mapping[str, Any]) -> int:
    """Return the time of an answer, in Unix seconds."""
    created = response.get("created")
    return created if isinstance(created, int) else int(time.time())


def usage_of(response: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of prompt and completion tokens; counted where the server does not report them."""
    usage = response.get("usage") or {}
    prompt, completion = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    choices = response.get("choices") or ()
    num_sampled = sum(len(choice.get("token_ids") or ()) for choice in choices)
    return {
        "prompt": usage.get("prompt_tokens") or len(response.get("prompt_token_ids") or ()),
        "completion": usage.get("completion_tokens") or num_sampled,
        "cached": prompt.get("cached_tokens") or 0,
        "reasoning": completion.get("reasoning_tokens") or 0,
    }


def token_fields(response: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token ids of the prompt and of the first choice, for clients that ask for them."""
    if not asked.get("return_token_ids"):
        return {}
    return {
        "prompt_token_ids": response.get("prompt_token_ids"),
        "token_ids": first_choice(response).get("token_ids"),
    }


RAW_ARGUMENTS = "INVALID_JSON"
"""Only member of a tool's input whose sampled arguments are not a JSON object, in dialects whose inputs are objects."""


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object; see `RAW_ARGUMENTS`."""
    try:
        given = orjson.loads(arguments or "{}")
    except ValueError:
        given = None
    return given if isinstance(given, dict) and not is_too_deep(given) else {RAW_ARGUMENTS: arguments}


def arguments_text(given: Mapping[str, Any]) -> str:
    """Return the arguments of a tool call as they were sampled: the inverse of `arguments_object`."""
    raw = given.get(RAW_ARGUMENTS) if given.keys() == {RAW_ARGUMENTS} else None
    return raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)


def joined_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a chat message's content: one text as a string, anything else as parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def bytes_of(entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry's token, or of its text where nothing better is known."""
    known = entry.get("bytes")
    return bytes(known) if known is not None else str(entry.get("token") or "").encode()
