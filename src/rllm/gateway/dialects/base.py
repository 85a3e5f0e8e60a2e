"""Shared part of all dialects: their protocol, the checks of requests, and what answers have in common.

Inside the gateway every request and every answer is OpenAI's chat completion; a dialect translates to and from it
with pure functions. So an upstream needs to speak chat completions only, and tokens are captured once, below all
dialects.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import orjson

from rllm._runtime.untrusted import TooLargeError, parse_json
from rllm.capture.wire_formats import WIRE_FORMATS, WireFormat
from rllm.gateway.errors import GatewayError
from rllm.inference.parameters import NAMED, Table, field_of
from rllm.types import JSONMapping, JSONObject, Message, Trace


class StreamEncoder(Protocol):
    """Encoder of one streamed answer. Everything that clients act on, such as tool calls, waits until `finish`."""

    keep_alive: bytes
    """Bytes that may be sent between events while there is nothing else to send."""

    def feed(self, chunks: list[JSONObject]) -> bytes:
        """Return the bytes that can be sent at once for these chunks, which it may change."""
        ...

    def finish(self, response: JSONMapping) -> bytes:
        """Return the end of a complete answer, given whole; sent only after its trace is durable."""
        ...

    def fail(self, error: GatewayError) -> bytes:
        """Return the end of an answer that broke off."""
        ...


class Dialect(ABC):
    """A wire format; OpenAI's by default. `asked` is always a request as its client wrote it."""

    wire: WireFormat
    """Its row in the registry: paths, key header, variables."""
    parameters: Table
    """Its documented fields, and their effect with the embedded engine and with a server."""
    id_prefix: str
    """Beginning of the ids of its answers."""
    needs: str
    """Members that every request has, for the error message of a body that is not an object."""
    prompt_name = "messages"
    """Name of the prompt in error objects."""
    stream_type = "text/event-stream"
    """Media type of its streams."""
    continues_answers = False
    """True if a request may name an earlier answer instead of repeating the conversation."""

    def parse(self, body: bytes, path: Mapping[str, str]) -> JSONObject:
        """Return the request of a body and of the path it was sent to.

        Args:
            body: body of the HTTP request.
            path: the named parts of the path's template, and the `template` and `query` themselves.

        Raises:
            GatewayError: 400, if the body is not a JSON object.
        """
        return parse_object(body, needs=self.needs)

    def refers_to(self, asked: JSONMapping) -> Sequence[str]:
        """Return the ids of the earlier answers that `to_chat` needs."""
        return ()

    @abstractmethod
    def to_chat(self, asked: JSONObject, earlier: Mapping[str, Trace]) -> JSONObject:
        """Return the request as a chat request; members that the dialect does not know are passed on.

        Args:
            asked: the request.
            earlier: the traces of the answers it refers to, as far as they exist.

        Raises:
            GatewayError: 400, if it is malformed, or asks for something that a chat completion cannot give.
        """

    def prompt_ids(self, asked: JSONMapping) -> list[int] | None:
        """Return the prompt of a request that gives it as token ids; `to_chat` returns no messages for it."""
        return None

    def trace_metadata(self, asked: JSONMapping) -> JSONMapping:
        """Return the metadata that a trace needs so that the request can be continued later."""
        return {}

    def left_out(self, asked: JSONMapping) -> list[str]:
        """Return the keys of the fields of a request that the dialect ignores, whichever server answers."""
        rows = self.parameters.rows_in(asked)
        return [key for key, row in rows.items() if (row.fates[1] == NAMED if row else key != field_of(key))]

    @abstractmethod
    def render(self, response: JSONObject, *, asked: JSONMapping) -> bytes:
        """Return a whole answer, without token fields that this request did not ask for; may change `response`."""

    @abstractmethod
    def encoder(self, *, asked: JSONMapping) -> StreamEncoder:
        """Return an encoder for one streamed answer."""

    def render_count(self, num_tokens: int) -> bytes:
        """Return the answer to a request for the number of tokens of a prompt."""
        return orjson.dumps({"input_tokens": num_tokens})

    def render_error(self, error: GatewayError) -> bytes:
        """Return an error object as the body of an answer."""
        return orjson.dumps(error.to_dict(prompt=self.prompt_name))

    def render_models(self, models: Sequence[JSONMapping]) -> bytes:
        """Return a list of models, given in OpenAI's format."""
        return orjson.dumps({"object": "list", "data": models})

    def render_model(self, model: JSONMapping) -> bytes:
        """Return one model, given in OpenAI's format."""
        return orjson.dumps(model)


def wire_format(name: str) -> WireFormat:
    """Return the row of a wire format in the registry."""
    return next(row for row in WIRE_FORMATS if row.name == name)


# --- requests ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")

_MAX_CHOICES = 128
_MAX_STOPS = 128
"""Limit on stop strings: each one costs a search of the text with every piece."""
_DEEPEST, _WRITTEN_DEEPEST = 200, 254
"""Maximum depth of a request, and of what orjson writes: the request with some levels of ours around its parts."""
_CONTENT = (str, list, type(None))
_TYPES: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "stream": bool,
    "stream_options": dict,
    "tools": list,
    "tool_choice": (str, dict),
    "logprobs": (bool, int),
}


def parse_object(body: bytes, *, needs: str) -> JSONObject:
    """Return the JSON object of a body.

    Raises:
        GatewayError: 400, if it is not an object; 413, if its values would take too much memory.
    """
    try:
        request = parse_json(body)
    except TooLargeError as error:
        raise GatewayError(413, f"the request body: {error}", code="too_many_values") from error
    except ValueError as error:
        raise invalid(f"the request body is not valid JSON: {error}") from error
    if not isinstance(request, dict):
        raise invalid(f"the request body is a JSON {kind_of(request)}: send an object with {needs}")
    if body.count(b"{") + body.count(b"[") > _DEEPEST:  # Most have fewer, and writing them to find out takes longer.
        check_depth(request, "the request body")
    return request


def check_depth(value: Any, what: str) -> None:
    """Check that a JSON value can be written again; `what` names it in the error.

    Raises:
        GatewayError: 400, if it is nested too deep.
    """
    if is_too_deep(value):
        raise invalid(f"{what} is nested too deep: use at most {_DEEPEST} levels of lists and objects")


def is_too_deep(value: Any) -> bool:
    """Return whether a value has too many levels to be written as JSON inside of a few more."""
    for _ in range(_WRITTEN_DEEPEST - _DEEPEST):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def check_chat(request: JSONMapping) -> None:
    """Check the fields of a chat request that the gateway itself relies on; the upstream checks the rest.

    Raises:
        GatewayError: 400, if one is malformed.
    """
    _check_messages(request.get("messages"))
    check_options(request)


def problem_of_n(n: object) -> str | None:
    """Return what is wrong with the number of answers requested at once, or `None`."""
    if n is None or (type(n) is int and 1 <= n <= _MAX_CHOICES):
        return None
    return f"n={n!r}: use a whole number from 1 to {_MAX_CHOICES}"


def check_options(request: JSONMapping) -> None:
    """Check all fields but the messages, as `check_chat` does.

    Raises:
        GatewayError: 400, if one is malformed.
    """
    if problem := problem_of_n(request.get("n")):
        raise invalid(problem, "n")
    stop = request.get("stop")
    if isinstance(stop, list) and len(stop) > _MAX_STOPS:
        raise invalid(f"stop has {len(stop):,} strings: use up to {_MAX_STOPS}", "stop")
    for name, types in _TYPES.items():
        if request.get(name) is not None and not isinstance(request[name], types):
            raise invalid(f"{name}={repr(request[name])[:80]}: expected {names_of(types)}", name)
    if request.get("top_logprobs") and not request.get("logprobs"):
        raise invalid(f"top_logprobs={request['top_logprobs']!r:.80}: send logprobs=true with it", "top_logprobs")


def named_in(tool: Any) -> str | None:
    """Return the name of a function or custom tool, or the name in a choice."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    described = tool.get(kind) if kind in ("function", "custom") else None
    name = described.get("name") if isinstance(described, dict) else None
    return name if isinstance(name, str) else None


def check_single_chat(request: JSONMapping, remedy: str) -> None:
    """Check a chat request of a dialect that has one answer per call.

    Raises:
        GatewayError: 400, as `check_chat` does, and if several answers are requested.
    """
    check_chat(request)
    if request.get("n") not in (None, 1):
        raise invalid(f"n={request['n']!r}: {remedy}", "n")


def field(value: JSONMapping, name: str, kind: type[T], where: str, default: T | None = None) -> T:
    """Return a member of an object, which is required unless it has a default.

    Raises:
        GatewayError: 400, with its place, if it is missing or of another type.
    """
    given = value.get(name)
    if given is None and default is not None:
        return default
    if not isinstance(given, kind):
        place = f"{where}.{name}" if where else name
        found = "missing" if given is None else f"a JSON {kind_of(given)}"
        raise invalid(f"'{place}' is {found}: send a JSON {_KINDS[kind]}", place)
    return given


def objects(values: Any, where: str) -> list[JSONObject]:
    """Return a list of objects.

    Raises:
        GatewayError: 400, with the place of the first value that is not an object.
    """
    if not isinstance(values, list):
        raise invalid(f"'{where}' is a JSON {kind_of(values)}: send a JSON array", where)
    for position, value in enumerate(values):
        if not isinstance(value, dict):
            raise invalid(f"{where}[{position}]={repr(value)[:80]}: send a JSON object", f"{where}[{position}]")
    return values


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> GatewayError:
    """Return the error of an invalid request."""
    return GatewayError(400, message, param=param, code=code)


def kind_of(value: Any) -> str:
    """Return JSON's name for the type of a value."""
    return _KINDS.get(type(value), "number")


_KINDS: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


def names_of(types: type | tuple[type, ...]) -> str:
    """Return JSON's names for Python types, for error messages."""
    names = [_KINDS.get(kind, "number") for kind in (types if isinstance(types, tuple) else (types,))]
    return f"a JSON {' or '.join(names)}"


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        given = "missing" if messages is None else "empty" if messages == [] else f"a JSON {kind_of(messages)}"
        raise invalid(f"'messages' is {given}: send a list of at least one message", "messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(
                f"messages[{position}]={repr(message)[:80]}: use an object with a 'role'", f"messages[{position}]"
            )
        if not isinstance(message.get("content"), _CONTENT):
            place = f"messages[{position}].content"
            raise invalid(f"'{place}' is a JSON {kind_of(message['content'])}: send a text or a list of parts", place)
        if (calls := message.get("tool_calls")) is not None:
            where = f"messages[{position}].tool_calls"
            for number, call in enumerate(objects(calls, where)):
                field(call, "function", dict, f"{where}[{number}]", {})  # A custom tool's call has none.


# --- answers ----------------------------------------------------------------------------------------------------------


COMMENT = b": keep-alive\n\n"
"""A server-sent comment, which clients ignore, but which resets their read timeout."""


def answer_json(answer: object) -> bytes:
    """Return an answer, or a part of one, as JSON; its prompt ids may be in an array."""
    return orjson.dumps(answer, default=list)


def data_event(data: JSONMapping) -> bytes:
    """Return a server-sent event without a type."""
    return b"data: %s\n\n" % answer_json(data)


def event(name: str, data: JSONMapping) -> bytes:
    """Return a typed server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), answer_json(data))


def first_choice(response: JSONMapping) -> JSONObject:
    """Return the first choice, for dialects that know one answer per call only."""
    choices: Sequence[JSONObject] = response.get("choices") or ({},)
    return choices[0]


def reasoning_of(message: JSONMapping) -> str:
    """Return the reasoning of a message or a delta; servers disagree about the name of the field."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def created_at(response: JSONMapping) -> int:
    """Return the time of an answer, in Unix seconds."""
    created = response.get("created")
    return created if isinstance(created, int) else int(time.time())


def usage_of(response: JSONMapping) -> dict[str, int]:
    """Return the numbers of prompt and completion tokens; counted if the server does not report them."""
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


def token_fields(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return the token ids of the prompt and of the first choice, for clients that ask for them."""
    if not asked.get("return_token_ids"):
        return {}
    return {
        "prompt_token_ids": response.get("prompt_token_ids"),
        "token_ids": first_choice(response).get("token_ids"),
    }


RAW_ARGUMENTS = "INVALID_JSON"
"""Only member of a tool's input whose sampled arguments are not a JSON object, in dialects whose inputs are objects."""


def arguments_object(arguments: str) -> JSONObject:
    """Return the arguments of a tool call as an object; see `RAW_ARGUMENTS`."""
    try:
        given = orjson.loads(arguments or "{}")
    except ValueError:
        given = None
    return given if isinstance(given, dict) and not is_too_deep(given) else {RAW_ARGUMENTS: arguments}


def arguments_text(given: JSONMapping) -> str:
    """Return the arguments of a tool call as they were sampled: the inverse of `arguments_object`."""
    raw = given.get(RAW_ARGUMENTS) if given.keys() == {RAW_ARGUMENTS} else None
    return raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)


# --- parts of chat requests -------------------------------------------------------------------------------------------


def content_of(value: Any, where: str, part: Callable[[JSONObject, str], JSONObject]) -> str | list[JSONObject]:
    """Return a chat message's content, given a text or a list of the dialect's parts.

    Args:
        value: the text or list.
        where: its place in the request, for error messages.
        part: translates one part, given its place.
    """
    if isinstance(value, str):
        return value
    return joined_parts([part(item, f"{where}[{position}]") for position, item in enumerate(objects(value, where))])


def joined_parts(parts: list[JSONObject]) -> str | list[JSONObject]:
    """Return a chat message's content: one text as a string, anything else as parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def assistant_message(texts: list[JSONObject], thoughts: list[str], calls: list[JSONObject]) -> Message:
    """Return the chat message of an answer's texts, reasoning and tool calls."""
    message: Message = {"role": "assistant", "content": joined_parts(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def tool_call(call_id: Any, name: str, arguments: str) -> JSONObject:
    """Return a tool call of a chat message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def schema_format(schema: JSONMapping) -> JSONObject:
    """Return the `response_format` of a JSON Schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def present(value: JSONMapping, *names: str) -> JSONObject:
    """Return these members of an object, as far as it has them."""
    return {name: value[name] for name in names if value.get(name) is not None}
