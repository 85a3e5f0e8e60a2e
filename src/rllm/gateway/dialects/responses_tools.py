"""Tools of OpenAI's responses as functions of a chat, and back; a chat knows neither namespaces nor custom tools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from rllm.gateway.dialects.base import field, invalid, objects
from rllm.types import JSONMapping, JSONObject

CUSTOM_INPUT = "input"
"""Only argument of the function that stands for a custom tool, which takes plain text."""

_SHOWN = frozenset({"function", "custom", "namespace"})
"""Types of tools that the model sees."""
_RUN_BY_CLIENTS = ("apply_patch", "computer", "computer_use_preview", "local_shell", "shell")
"""Types of tools that clients run, and that are not functions; a shell may run in a server's container instead."""
_CHAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function, or a custom tool."""

    name: str
    namespace: str
    """Namespace of the tool; empty outside of any."""
    is_custom: bool
    function: JSONMapping
    """Members of the chat's function besides its name."""


class Tools:
    """Tools of a request, and the names that a chat knows them by."""

    def __init__(self, asked: JSONMapping) -> None:
        given = list(_given(asked))
        self._any_given = bool(given)
        self._tools = [tool for each in given for tool in _flattened(each)]
        self._chat_names = _chat_names(self._tools)
        self._by_chat_name = {self.chat_name(tool.name, tool.namespace): tool for tool in self._tools}

    def chat_name(self, name: str, namespace: str) -> str:
        """Return the chat's name of a tool; of one that the request does not have, its own name."""
        return self._chat_names.get((namespace, name), name)

    def called(self, chat_name: str) -> Tool:
        """Return the tool of a chat's name; an unknown one is taken for a function."""
        unknown = Tool(name=chat_name, namespace="", is_custom=False, function={})
        return self._by_chat_name.get(chat_name, unknown)

    def unlike_functions(self) -> JSONObject:
        """Return the tools that functions of a chat do not describe fully, by their name there, for `given_again`."""
        return {
            chat_name: {"name": tool.name, "namespace": tool.namespace, "is_custom": tool.is_custom}
            for chat_name, tool in self._by_chat_name.items()
            if tool.namespace or tool.is_custom
        }

    def to_chat(self, choice: Any) -> JSONObject:
        """Return `tools` and `tool_choice` of a chat; of a choice among some tools, only these are shown."""
        tools = self._tools
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind == "allowed_tools":
                tools = self._allowed(choice)
                choice = choice.get("mode") or "auto"
            elif kind in ("function", "custom"):
                choice = {"type": "function", "function": {"name": self._chosen(choice)}}
            else:
                raise invalid(f"tool_choice.type={kind!r}: use function, custom or allowed_tools", "tool_choice")
        if not tools:
            if choice not in (None, "auto", "none") and not self._any_given:
                raise invalid(f"tool_choice={choice!r:.80}: there are no tools: send 'tools' with it", "tool_choice")
            return {}
        shown = [{"type": "function", "function": self._function(tool)} for tool in tools]
        return {"tools": shown} | ({"tool_choice": choice} if choice is not None else {})

    def _function(self, tool: Tool) -> JSONObject:
        return {"name": self.chat_name(tool.name, tool.namespace), **tool.function}

    def _allowed(self, choice: JSONMapping) -> list[Tool]:
        allowed = objects(choice.get("tools"), "tool_choice.tools")
        tools = [tool for tool in self._tools if any(_is_named(tool, named) for named in allowed)]
        unknown = [named.get("name") for named in allowed if named.get("type") in _SHOWN]
        if unknown and not tools:
            names = ", ".join(repr(name)[:80] for name in unknown[:8])
            raise invalid(f"tool_choice.tools: none of 'tools' is called {names}: name some of them", "tool_choice")
        return tools

    def _chosen(self, choice: JSONMapping) -> str:
        """Return the chat's name of the one tool that must be called."""
        name = field(choice, "name", str, "tool_choice")
        outside = not choice.get("namespace") and ("", name) in self._chat_names
        found = [] if outside else [tool for tool in self._tools if tool.name == name and _is_named(tool, choice)]
        namespaces = dict.fromkeys(tool.namespace for tool in found)
        if len(namespaces) > 1:
            raise invalid(
                f"tool_choice.name={name!r} is in several namespaces ({', '.join(namespaces)}): add its 'namespace'",
                "tool_choice.name",
            )
        return self.chat_name(name, *namespaces or [""])


def given_again(functions: Iterable[JSONMapping], unlike_functions: JSONMapping) -> list[JSONObject]:
    """Return the tools of a request from the functions of its chat, and from `Tools.unlike_functions`."""
    tools: list[JSONObject] = []
    inner: dict[str, list[JSONObject]] = {}
    for function in functions:
        note = unlike_functions.get(function.get("name") or "") or {}
        namespace = note.get("namespace")
        if namespace and namespace not in inner:
            inner[namespace] = []
            tools.append({"type": "namespace", "name": namespace, "description": "", "tools": inner[namespace]})
        (inner[namespace] if namespace else tools).append(_tool_again(function, note))
    return tools


def _tool_again(function: JSONMapping, note: JSONMapping) -> JSONObject:
    if note.get("is_custom"):
        return {"type": "custom", "name": note["name"], "description": function.get("description")}
    return {"type": "function", "strict": None, **function, **({"name": note["name"]} if note else {})}


def custom_input(arguments: str) -> str:
    """Return the text for a custom tool; the sampled arguments themselves where they have another form."""
    try:
        given = orjson.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def _given(asked: JSONMapping) -> Iterable[JSONObject]:
    """Yield the tools as they came, including those in input items."""
    yield from objects(asked.get("tools") or [], "tools")
    items = asked["input"] if isinstance(asked.get("input"), list) else ()
    for position, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            yield from objects(item.get("tools"), f"input[{position}].tools")


def _flattened(tool: JSONMapping, namespace: str = "") -> Iterable[Tool]:
    """Yield the tools of a tool: none for one that OpenAI's servers run, several for a namespace.

    Raises:
        GatewayError: 400, if it is malformed, or cannot be a function.
    """
    match tool.get("type"):
        case "function":
            function = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
            function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
            yield Tool(name=_name(tool), namespace=namespace, is_custom=False, function=function)
        case "custom":
            text = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
            function = {"description": tool["description"]} if tool.get("description") is not None else {}
            yield Tool(name=_name(tool), namespace=namespace, is_custom=True, function=function | {"parameters": text})
        case "namespace":
            for inner in objects(tool.get("tools"), "tools[].tools"):
                yield from _flattened(inner, _name(tool))
        case _:
            _check_left_out(tool)


def _check_left_out(tool: JSONMapping) -> None:
    """Check that a client does not wait for calls that a chat completion cannot hold.

    Raises:
        GatewayError: 400, if it would run the tool itself.
    """
    kind, environment = tool.get("type"), tool.get("environment")
    is_hosted = isinstance(environment, dict) and str(environment.get("type")).startswith("container")
    if kind in _RUN_BY_CLIENTS and not is_hosted:
        raise invalid(f"tools[].type={kind!r}: a chat completion has no calls of it: give it as a function", "tools")


def _name(tool: JSONMapping) -> str:
    return field(tool, "name", str, "tools[]")


def _chat_names(tools: Iterable[Tool]) -> dict[tuple[str, str], str]:
    """Return the chat's names by namespace and name: the name alone where it is unique, else both joined."""
    known = dict.fromkeys((tool.namespace, tool.name) for tool in tools)
    num_of_name = Counter(name for _, name in known)
    taken = set(num_of_name)
    chat_names: dict[tuple[str, str], str] = {}
    for namespace, name in known:
        is_plain = not namespace or num_of_name[name] == 1
        chat_names[namespace, name] = name if is_plain else _qualified(namespace, name, taken)
        taken.add(chat_names[namespace, name])
    return chat_names


def _qualified(namespace: str, name: str, taken: Container[str]) -> str:
    """Return a name of the characters and the length that a chat allows."""
    both = f"{namespace}__{name}"
    if _CHAT_NAME.fullmatch(both) and both not in taken:
        return both
    digest = blake2b(f"{namespace}\0{name}".encode(), digest_size=4).hexdigest()
    return f"{_NOT_IN_NAMES.sub('_', both)[:55]}_{digest}"


def _is_named(tool: Tool, named: JSONMapping) -> bool:
    """Return whether a choice names a tool, or the namespace that it is in."""
    namespace = named.get("namespace") or tool.namespace
    return namespace == tool.namespace and named.get("name") in (tool.name, tool.namespace)
