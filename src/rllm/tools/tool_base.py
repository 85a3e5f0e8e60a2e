"""A tool: a schema that the model reads, and a call that always comes back with an output or an error.

def search(query: str) -> list[str]: ...

tool = Tool(function=search)
tool.json                                    # the function's schema, in the OpenAI format
tool(query="rivers")                         # ToolOutput(name="search", output=[...])
await tool.call({"query": "rivers"})         # the same beside the event loop; blocking code gets a thread
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
from typing import Any, Literal, cast, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs

from rllm._runtime.threads import in_thread, run_in_own_loop
from rllm.errors import ConfigError, shown
from rllm.parser.tool_parser import ToolCall
from rllm.telemetry import Span, tool_span

__all__ = ["Tool", "ToolCall", "ToolOutput"]

logger = logging.getLogger(__name__)

MAX_OUTPUT_CHARS = 20_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass
class ToolOutput:
    """Result of one call."""

    name: str
    output: Any = None
    error: str | None = None
    """Reason why there is no output, in words for the model and for readers of the episode."""
    metadata: dict[str, Any] | None = None

    def to_string(self) -> str:
        """Return the text for the model: the error, JSON for a mapping or a list, else the output as text.

        `?` replaces invalid Unicode, such as half of an escaped emoji, which no model accepts in a prompt.
        """
        return self._text().encode(errors="replace").decode()

    def __str__(self) -> str:
        return self.to_string()

    def _text(self) -> str:
        if self.error is not None:
            return f"Error: {self.error}"
        if self.output is None:
            return ""
        if isinstance(self.output, dict | list):
            try:
                return json.dumps(self.output, ensure_ascii=False, default=str)
            except (TypeError, ValueError):  # keys that JSON lacks, or a value that contains itself
                return str(self.output)
        return str(self.output)


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
        ConfigError: if there is nothing to call, or its name or signature has no JSON schema.
    """

    def __init__(
        self,
        name: str | None = None,
        description: str | None = None,
        function: Callable[..., Any] | None = None,
        *,
        parameters: dict[str, Any] | None = None,
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
    def json(self) -> dict[str, Any]:
        """The tool as chat requests list it."""
        function = {"name": self.name, "description": self.description, "parameters": self._parameters}
        return {"type": "function", "function": function}

    @overload
    def __call__(self, *args: Any, use_async: Literal[False] = False, **kwargs: Any) -> ToolOutput: ...
    @overload
    def __call__(self, *args: Any, use_async: Literal[True], **kwargs: Any) -> Awaitable[ToolOutput]: ...
    def __call__(self, *args: Any, use_async: bool = False, **kwargs: Any) -> ToolOutput | Awaitable[ToolOutput]:
        """Call the tool and wait, from any thread; with `use_async`, return what waits, as `call` does."""
        if use_async:
            return self._called_beside(args, kwargs)
        with tool_span(self.name) as span:
            return _told(self._called(args, kwargs), span)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ToolOutput:
        try:
            args, kwargs = self._arguments.check(args, kwargs)
            returned = (self._blocking or self._awaitable)(*args, **kwargs)  # type: ignore[misc]
            return self._output(run_in_own_loop(returned) if inspect.isawaitable(returned) else returned)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return self._failure(error)

    async def call(self, arguments: Mapping[str, Any]) -> ToolOutput:
        """Call the tool with what a model sent."""
        return await self._called_beside((), arguments)

    async def _called_beside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ToolOutput:
        with tool_span(self.name) as span:
            return _told(await self._awaited(args, kwargs), span)

    async def _awaited(self, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> ToolOutput:
        try:
            if not isinstance(arguments, Mapping):
                raise ArgumentError(f"the arguments must be a JSON object, not {arguments!r:.80}")
            args, kwargs = self._arguments.check(args, arguments)
            if self._awaitable:
                return self._output(await self._awaitable(*args, **kwargs))
            returned = await in_thread(lambda: self._output_of(args, kwargs), name=f"tool {self.name}")
            return self._output(await returned) if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:
            return self._failure(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._failure(error)  # the call was not cancelled, but something that the tool awaited was

    def _output_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ToolOutput | Awaitable[Any]:
        """Return the output of a blocking function, or the awaitable that a decorated async function returns."""
        returned = self._blocking(*args, **kwargs)  # type: ignore[misc]
        return returned if inspect.isawaitable(returned) else self._output(returned)

    @property
    def _blocking(self) -> Callable[..., Any] | None:
        if self.function is not None:
            return None if inspect.iscoroutinefunction(self.function) else self.function
        return None if type(self).forward is Tool.forward else self.forward

    @property
    def _awaitable(self) -> Callable[..., Awaitable[Any]] | None:
        if self.function is not None:
            return self.function if inspect.iscoroutinefunction(self.function) else None
        return None if type(self).async_forward is Tool.async_forward else self.async_forward

    def _output(self, value: Any) -> ToolOutput:
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


def _told(output: ToolOutput, span: Span) -> ToolOutput:
    if output.error is not None:
        span.end("tool_error")
    return output


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {len(text) - max_chars} of {len(text)} characters are left out]"


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class ArgumentError(ValueError):
    """Arguments that do not match the signature; the message names each of them."""


class Arguments:
    """The signature of one function.

    Raises:
        ConfigError: if a type hint has no JSON schema, is not defined, or a parameter cannot be given by name.
    """

    def __init__(self, function: Callable[..., Any], owner: str) -> None:
        @functools.wraps(_hinted(function))
        def capture(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        cast("Any", capture).__signature__ = _unbound_signature(function)
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", capture))
            self.schema: dict[str, Any] = self._adapter.json_schema(schema_generator=_WithoutTitles)
        except (PydanticUserError, NameError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise ConfigError(f"{owner}{_signature(function)}: {reason}; use types that JSON has") from error
        if self.schema["type"] != "object":
            raise ConfigError(f"{owner}{_signature(function)}: a model gives arguments by name; remove '/' and '*args'")
        _add_descriptions(self.schema["properties"], split_docstring(_hinted(function).__doc__)[1])

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments converted to the declared types, with defaults filled in.

        Raises:
            ArgumentError: if they do not match.
        """
        try:
            checked: tuple[tuple[Any, ...], dict[str, Any]] = self._adapter.validate_python(
                ArgsKwargs(args, dict(kwargs))
            )
        except ValidationError as error:
            raise ArgumentError("; ".join(self._describe(item) for item in error.errors(include_url=False))) from None
        return checked

    def _describe(self, error: Mapping[str, Any]) -> str:
        name, message = ".".join(map(str, error["loc"])), error["msg"]
        if error["type"] == "missing_argument":
            return f"argument {name!r} is missing"
        if error["type"] == "unexpected_keyword_argument":
            return f"argument {name!r} is not known: there are {list(self.schema['properties'])}"
        return f"argument {name!r} = {_shortened(error['input'])}: {message}"


def split_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return the summary of a docstring, and the description of each argument under `Args:` (Google style)."""
    summary, *sections = _SECTION.split(inspect.cleandoc(docstring or ""))
    about: dict[str, str] = {}
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            about |= _about_arguments(text)
    return summary.strip(), about


def _about_arguments(section: str) -> dict[str, str]:
    lines = [line for line in section.split("\n") if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    about: dict[str, str] = {}
    for line in lines:
        opening = None if line[indent].isspace() else _ARGUMENT.match(line[indent:])
        if opening:
            about[opening[1]] = opening[2]
        elif about:
            name = next(reversed(about))
            about[name] = f"{about[name]} {line.strip()}".strip()
    return about


def _add_descriptions(properties: dict[str, Any], about: Mapping[str, str]) -> None:
    for name, schema in properties.items():
        if about.get(name):
            schema.setdefault("description", about[name])


def unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a `functools.partial`; anything else is returned unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _hinted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the type hints: inside a `functools.partial`, or the `__call__` of an object."""
    hinted: Any = unwrap_partial(function)
    return hinted if inspect.isroutine(hinted) or inspect.isclass(hinted) else hinted.__call__


def _unbound_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature without arguments already bound by a `functools.partial`, which the model cannot choose."""
    signature = inspect.signature(function)
    given = function.keywords if isinstance(function, functools.partial) else {}
    return signature.replace(parameters=[item for name, item in signature.parameters.items() if name not in given])


def _signature(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function))


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:80]}..."


class _WithoutTitles(GenerateJsonSchema):
    """Generator of schemas without pydantic's titles, which repeat the property names and cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
