"""A tool: a schema that the model reads, and a call that always returns an output or an error.

def search(query: str) -> list[str]: ...

tool = Tool(function=search)
tool.json                                    # the function's schema, in the OpenAI format
tool(query="rivers")                         # ToolOutput(name="search", output=[...])
await tool.call({"query": "rivers"})         # the same in an event loop; blocking code gets a thread
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs

from rllm._runtime.threads import in_thread, run_in_own_loop
from rllm.errors import ConfigError, shown
from rllm.parser.tool_parser import ToolCall
from rllm.telemetry import tool_span
from rllm.types import JSONMapping, JSONObject

__all__ = ["Tool", "ToolCall", "ToolOutput"]

logger = logging.getLogger(__name__)

MAX_OUTPUT_CHARS = 20_000

Function: TypeAlias = Callable[..., object]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass
class ToolOutput:
    """Result of one call."""

    name: str
    output: Any = None
    error: str | None = None
    """Reason why there is no output, in words for the model and for readers of the episode."""
    metadata: JSONObject | None = None

    def to_string(self) -> str:
        """Return the text for the model: the error, JSON for a mapping or a list, else the output as text.

        `?` replaces invalid Unicode, such as half of an escaped emoji, which no model accepts in a prompt.
        """
        if self.error is not None:
            text = f"Error: {self.error}"
        elif isinstance(self.output, dict | list):
            try:
                text = json.dumps(self.output, ensure_ascii=False, default=str)
            except (TypeError, ValueError):  # keys that JSON lacks, or a value that contains itself
                text = str(self.output)
        else:
            text = "" if self.output is None else str(self.output)
        return text.encode(errors="replace").decode()

    def __str__(self) -> str:
        return self.to_string()


class Tool:
    """Function, or subclass with `forward` or `async_forward`, that a model may call by name.

    The schema comes from the signature, its type hints and the docstring. An exception becomes `ToolOutput.error`; the
    result is truncated to `max_output_chars` characters.

    Args:
        name: by default the function's name.
        description: by default the beginning of the docstring.
        function: blocking or `async`.
        parameters: JSON schema of the arguments, in place of the one from the signature.
        max_output_chars: limit of the output that the model sees.

    Raises:
        ConfigError: if neither `function` nor `forward` is given, the name is invalid, or the signature has no JSON
            schema.
    """

    def __init__(
        self,
        name: str | None = None,
        description: str | None = None,
        function: Function | None = None,
        *,
        parameters: JSONObject | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        if callable(name):
            raise ConfigError(f"tool name={shown(name)}: pass a function by its name, as Tool(function=...)")
        self.function = function
        described = type(self) if function is None else unwrap_partial(function)
        self.name = name or str(getattr(described, "__name__", type(described).__name__))
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"tool name {self.name!r}: use 1 to 64 letters, digits, '_' and '-', as model servers demand"
            )
        self._blocking: Function | None = None
        self._awaitable: Callable[..., Awaitable[object]] | None = None
        if function is None:
            self._blocking = None if type(self).forward is Tool.forward else self.forward
            self._awaitable = None if type(self).async_forward is Tool.async_forward else self.async_forward
        elif inspect.iscoroutinefunction(function):
            self._awaitable = function
        else:
            self._blocking = function
        target = self._blocking or self._awaitable
        if target is None:
            raise ConfigError(f"tool {self.name!r} has nothing to call: pass `function`, or define `forward`")
        self.description = description or split_docstring(described.__doc__)[0]
        self.max_output_chars = max_output_chars
        self._arguments = Arguments(target, owner=self.name)
        self._parameters = parameters or self._arguments.schema

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, blocking. A subclass defines it with the tool's own arguments."""
        raise NotImplementedError

    async def async_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output in an event loop. A subclass defines this, or `forward`, or both."""
        raise NotImplementedError

    @property
    def json(self) -> JSONObject:
        """The tool as chat requests list it."""
        function = {"name": self.name, "description": self.description, "parameters": self._parameters}
        return {"type": "function", "function": function}

    @overload
    def __call__(self, *args: object, use_async: Literal[False] = False, **kwargs: object) -> ToolOutput: ...
    @overload
    def __call__(self, *args: object, use_async: Literal[True], **kwargs: object) -> Awaitable[ToolOutput]: ...
    def __call__(self, *args: object, use_async: bool = False, **kwargs: object) -> ToolOutput | Awaitable[ToolOutput]:
        """Call the tool and wait, from any thread; with `use_async`, return an awaitable, as `call` does."""
        if use_async:
            return self._call_async(args, kwargs)
        with tool_span(self.name) as span:
            try:
                args, kwargs = self._arguments.check(args, kwargs)
                returned = (self._blocking or self._awaitable)(*args, **kwargs)  # type: ignore[misc]
                output = self._output(run_in_own_loop(returned) if inspect.isawaitable(returned) else returned)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                output = self._failure(error)
            if output.error is not None:
                span.end("tool_error")
            return output

    async def call(self, arguments: JSONMapping) -> ToolOutput:
        """Call the tool with the arguments that a model sent."""
        return await self._call_async((), arguments)

    async def _call_async(self, args: tuple[object, ...], arguments: Mapping[str, object]) -> ToolOutput:
        with tool_span(self.name) as span:
            try:
                if not isinstance(arguments, Mapping):
                    raise ArgumentError(f"the arguments must be a JSON object, not {arguments!r:.80}")
                args, kwargs = self._arguments.check(args, arguments)
                output = await self._await_output(args, kwargs)
            except (Exception, SystemExit) as error:
                output = self._failure(error)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                output = self._failure(error)  # the call was not cancelled, but something that the tool awaited was
            if output.error is not None:
                span.end("tool_error")
            return output

    async def _await_output(self, args: tuple[object, ...], kwargs: dict[str, object]) -> ToolOutput:
        if self._awaitable:
            return self._output(await self._awaitable(*args, **kwargs))

        def run() -> ToolOutput | Awaitable[object]:
            returned = self._blocking(*args, **kwargs)  # type: ignore[misc]
            return returned if inspect.isawaitable(returned) else self._output(returned)

        returned = await in_thread(run, name=f"tool {self.name}")
        return returned if isinstance(returned, ToolOutput) else self._output(await returned)

    def _output(self, value: object) -> ToolOutput:
        output = value if isinstance(value, ToolOutput) else ToolOutput(name=self.name, output=value)
        if output.error is not None:
            return replace(output, error=_cut(output.error, self.max_output_chars))
        text = output.to_string()
        if len(text) <= self.max_output_chars:
            return output
        return replace(output, output=_cut(text, self.max_output_chars))

    def _failure(self, error: BaseException) -> ToolOutput:
        if isinstance(error, ArgumentError):
            return ToolOutput(name=self.name, error=f"tool {self.name!r} was called wrongly: {error}")
        trace = "".join(traceback.format_exception(error))
        logger.debug("tool %r raised", self.name, exc_info=error)
        message = f"tool {self.name!r} raised {type(error).__name__}: {error}"
        return ToolOutput(
            name=self.name,
            error=_cut(message, self.max_output_chars),
            metadata={"traceback": _cut(trace, MAX_OUTPUT_CHARS)},
        )


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {len(text) - max_chars} of {len(text)} characters are left out]"


class ArgumentError(ValueError):
    """Arguments that do not match the signature; the message names each of them."""


class Arguments:
    """The signature of one function.

    Raises:
        ConfigError: if a type hint has no JSON schema, is not defined, or a parameter cannot be given by name.
    """

    def __init__(self, function: Function, owner: str) -> None:
        inner: Any = unwrap_partial(function)
        hinted = inner if inspect.isroutine(inner) or inspect.isclass(inner) else inner.__call__
        signature = inspect.signature(function)
        bound = function.keywords if isinstance(function, functools.partial) else {}  # not for the model to choose
        chosen = [parameter for name, parameter in signature.parameters.items() if name not in bound]
        capture: Any = functools.wraps(hinted)(lambda *args, **kwargs: (args, kwargs))
        capture.__signature__ = signature.replace(parameters=chosen)
        try:
            self._adapter: TypeAdapter[tuple[tuple[object, ...], dict[str, object]]] = TypeAdapter(capture)
            self.schema: JSONObject = self._adapter.json_schema(schema_generator=_WithoutTitles)
        except (PydanticUserError, NameError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise ConfigError(f"{owner}{signature}: {reason}; use types that JSON has") from error
        if self.schema["type"] != "object":
            raise ConfigError(f"{owner}{signature}: a model gives arguments by name; remove '/' and '*args'")
        about = split_docstring(hinted.__doc__)[1]
        for name, schema in self.schema["properties"].items():
            if about.get(name):
                schema.setdefault("description", about[name])

    def check(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments converted to the declared types, with defaults filled in.

        Raises:
            ArgumentError: if they do not match.
        """
        try:
            return self._adapter.validate_python(ArgsKwargs(args, dict(kwargs)))
        except ValidationError as error:
            raise ArgumentError("; ".join(map(self._describe, error.errors(include_url=False)))) from None

    def _describe(self, error: Mapping[str, Any]) -> str:
        name, value = ".".join(map(str, error["loc"])), json.dumps(error["input"], default=repr)
        if error["type"] == "missing_argument":
            return f"argument {name!r} is missing"
        if error["type"] == "unexpected_keyword_argument":
            return f"argument {name!r} is not known: use one of {', '.join(self.schema['properties'])}"
        return f"argument {name!r} = {value if len(value) <= 80 else f'{value[:80]}...'}: {error['msg']}"


def unwrap_partial(function: Function) -> Function:
    """Return the function inside a `functools.partial`; anything else is returned unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def split_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return the summary of a docstring, and the description of each argument under `Args:` (Google style)."""
    summary, *sections = _SECTION.split(inspect.cleandoc(docstring or ""))
    about: dict[str, str] = {}
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        name = None
        for line in inspect.cleandoc(f"\n{text}").split("\n"):
            opening = _ARGUMENT.match(line)
            if opening:
                name, about[opening[1]] = opening[1], opening[2]
            elif name:
                about[name] = f"{about[name]} {line.strip()}".strip()
    return summary.strip(), about


class _WithoutTitles(GenerateJsonSchema):
    """Generator of schemas without pydantic's titles, which repeat the property names and cost tokens."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False
