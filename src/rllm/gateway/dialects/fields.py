"""Reading what a client sent: every value of a wrong shape is named, with its place and the remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from starlette.requests import Request

from rllm._runtime.untrusted import LARGE, TooLargeError, parse_json
from rllm.gateway.errors import GatewayError

T = TypeVar("T")

_MAX_CHOICES = 128
_MAX_STOPS = 128
"""Each is looked for in the text again with every piece of it."""
_DEEPEST, _WRITTEN_DEEPEST = 200, 254
"""Levels of lists and objects in a request, and in what orjson writes: the request anew, with some of ours around parts of it."""
_CONTENT = (str, list, type(None))
_TYPES: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "stream": bool,
    "stream_options": dict,
    "tools": list,
    "logprobs": (bool, int),
}


def parse_object(body: bytes, *, needs: str) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
        GatewayError: 400, if it is none; 413, if its values would take too much memory.
    """
    try:
        request = parse_json(body)
    except TooLargeError as error:
        raise GatewayError(413, f"the request body: {error}", code="too_many_values") from error
    except ValueError as error:
        raise invalid(f"the request body is not valid JSON: {error}") from error
    if not isinstance(request, dict):
        raise invalid(f"the request body is a JSON {kind_of(request)}: send an object with {needs}")
    check_depth(body, request, "the request body")
    return request


async def members_of(request: Request, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the `members` of a request's body; a large one is read in a thread, so that no other request waits."""
    body = await request.body()
    return members(body, **kinds) if len(body) < LARGE else await asyncio.to_thread(members, body, **kinds)


def members(body: bytes, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """The members of the JSON object that a body is, those that are `null` left out; an empty body has none.

    Args:
        body: of the request.
        kinds: the types of all the members that there may be.

    Raises:
        GatewayError: 400, if it is no object, or has another member, or one of another type.
    """
    given = parse_object(body or b"{}", needs=", ".join(kinds))
    for name, value in given.items():
        if name not in kinds:
            raise invalid(f"{name!r} is not a field of this request: use {', '.join(kinds)}", name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds[name])):
            raise invalid(f"{name}={repr(value)[:80]}: its type is wrong", name)
    return {name: value for name, value in given.items() if value is not None}


def check_depth(written: bytes, value: Any, what: str) -> None:
    """Check that what was read of some JSON can be written again; `what` names it in the error.

    Raises:
        GatewayError: 400, if it is nested too deep.
    """
    if written.count(b"{") + written.count(b"[") > _DEEPEST and is_too_deep(value):  # fewer cannot be so deep
        raise invalid(f"{what} has more than {_DEEPEST} levels of lists and objects in each other")


def is_too_deep(value: Any) -> bool:
    """Whether a value has so many levels that it cannot be written as JSON again, inside of a few more."""
    for _ in range(_WRITTEN_DEEPEST - _DEEPEST):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def check_chat(request: Mapping[str, Any]) -> None:
    """Check a chat request for what the gateway itself relies on; the rest is the upstream's business.

    Raises:
        GatewayError: 400, if it cannot be one.
    """
    _check_messages(request.get("messages"))
    check_options(request)


def problem_of_n(n: object) -> str | None:
    """Return what is wrong with the number of answers requested at once, or `None`."""
    if n is None or (type(n) is int and 1 <= n <= _MAX_CHOICES):
        return None
    return f"n={n!r}: use a whole number from 1 to {_MAX_CHOICES}"


def check_options(request: Mapping[str, Any]) -> None:
    """`check_chat` for one whose prompt is no messages.

    Raises:
        GatewayError: likewise.
    """
    if problem := problem_of_n(request.get("n")):
        raise invalid(problem, "n")
    stop = request.get("stop")
    if isinstance(stop, list) and len(stop) > _MAX_STOPS:
        raise invalid(f"stop has {len(stop):,} strings: use up to {_MAX_STOPS}", "stop")
    for name, types in _TYPES.items():
        if request.get(name) is not None and not isinstance(request[name], types):
            raise invalid(f"{name}={repr(request[name])[:80]}: its type is wrong", name)
    if request.get("top_logprobs") and not request.get("logprobs"):
        raise invalid(f"top_logprobs={request['top_logprobs']!r:.80}: send logprobs=true with it", "top_logprobs")
    _check_choice(request.get("tool_choice"), request.get("tools") or ())


def _check_choice(choice: Any, tools: Sequence[Any]) -> None:
    """Check that a choice of a tool is one that can be made."""
    if choice in (None, "auto", "none"):
        return
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("required", "function", "custom", "allowed_tools"):
        raise invalid(f"tool_choice={choice!r:.80}: use auto, none, required or an object of a tool", "tool_choice")
    if not tools:
        raise invalid(f"tool_choice={choice!r:.80}: there are no tools: send 'tools' with it", "tool_choice")
    names = [name for tool in tools if (name := named_in(tool)) is not None]
    if kind in ("function", "custom") and (chosen := named_in(choice)) not in names:
        listed = ", ".join(names)[:200] or "none with a name"
        raise invalid(f"tool_choice: {chosen!r:.80} is none of the tools: 'tools' has {listed}", "tool_choice")


def named_in(tool: Any) -> str | None:
    """Return the name of a function or custom tool, or the one that a choice names."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    described = tool.get(kind) if kind in ("function", "custom") else None
    name = described.get("name") if isinstance(described, dict) else None
    return name if isinstance(name, str) else None


def check_single_chat(request: Mapping[str, Any], remedy: str) -> None:
    """`check_chat`, for a dialect whose answer is a single one.

    Raises:
        GatewayError: 400, also if several answers are asked for.
    """
    check_chat(request)
    if request.get("n") not in (None, 1):
        raise invalid(f"n={request['n']!r}: {remedy}", "n")


def field(value: Mapping[str, Any], name: str, kind: type[T], where: str, default: T | None = None) -> T:
    """A member of an object, which must be there unless it has a default, and of its type.

    Raises:
        GatewayError: 400, naming its place.
    """
    given = value.get(name)
    if given is None and default is not None:
        return default
    if not isinstance(given, kind):
        place = f"{where}.{name}" if where else name
        found = "missing" if given is None else f"a JSON {kind_of(given)}"
        raise invalid(f"'{place}' is {found}: send a JSON {_KINDS[kind]}", place)
    return given


def objects(values: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects.

    Raises:
        GatewayError: 400, naming the first value that is none.
    """
    if not isinstance(values, list):
        raise invalid(f"'{where}' is a JSON {kind_of(values)}: send a JSON array", where)
    for position, value in enumerate(values):
        if not isinstance(value, dict):
            raise invalid(f"{where}[{position}]={repr(value)[:80]}: send a JSON object", f"{where}[{position}]")
    return values


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> GatewayError:
    """The error of a request that is not what it should be."""
    return GatewayError(400, message, param=param, code=code)


def kind_of(value: Any) -> str:
    """What JSON calls a value of this type."""
    return _KINDS.get(type(value), "number")


_KINDS: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


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
        if message.get("tool_calls") is not None:
            _check_calls(message["tool_calls"], f"messages[{position}].tool_calls")


def _check_calls(calls: Any, where: str) -> None:
    for position, call in enumerate(objects(calls, where)):
        field(call, "function", dict, f"{where}[{position}]", {})  # a custom tool's call has none
