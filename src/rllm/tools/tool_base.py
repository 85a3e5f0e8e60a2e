"""A tool: a schema that the model reads, and a call that always comes back with an output or an error.

def search(query: str) -> list[str]: ...

tool = Tool(function=search)
tool.json                                    # the function's schema, in the OpenAI format
tool(query="rivers")                         # ToolOutput(name="search", output=[...])
await tool.call({"query": "rivers"})         # the same beside the event loop; blocking code gets a thread
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from rllm._runtime.threads import in_thread, run_in_own_loop
from rllm.errors import ConfigError, shown
from rllm.parser.tool_call import ToolCall
from rllm.telemetry import Span, tool_span
from rllm.tools.arguments import ArgumentError, Arguments, behind_partial, split_docstring

__all__ = ["Tool", "ToolCall", "ToolOutput"]

logger = logging.getLogger(__name__)

MAX_OUTPUT_CHARS = 20_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass
class ToolOutput:
    """What came of one call."""

    name: str
    output: Any = None
    error: str | None = None
    """Why there is no output, in words for the model and for whoever reads the episode."""
    metadata: dict[str, Any] | None = None

    def to_string(self) -> str:
        """What the model sees: the error, JSON for a mapping or a list, else the output as text; `?` stands for what is not
        Unicode, such as half of an emoji that a model has escaped, because no model can be asked with it."""
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
    """A function, or a subclass with `forward` or `async_forward`, which a model may call by name.

    The schema comes from the signature, its type hints and the docstring. Whatever the code raises becomes
    `ToolOutput.error`; what it returns is cut at `max_output_chars` characters.

    Args:
        name: by default the function's name.
        description: by default the beginning of the docstring.
        function: blocking or `async`.
        parameters: the JSON schema of the arguments, in place of the one from the signature.
        max_output_chars: of the output as the model sees it.

    Raises:
        ConfigError: if there is nothing to call, or its name or signature cannot be told to a model.
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
        described = type(self) if function is None else behind_partial(function)
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
        """The work, blocking; what it returns is the output. A subclass defines it with the tool's own arguments."""
        raise NotImplementedError

    async def async_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The work, for an event loop. A subclass defines this, or `forward`, or both."""
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
            returned = await in_thread(lambda: self._told_by(args, kwargs), name=f"tool {self.name}")
            return self._output(await returned) if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:
            return self._failure(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._failure(error)  # nobody cancelled the call: something that the tool awaited was cancelled

    def _told_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ToolOutput | Awaitable[Any]:
        """The output of a blocking function; or the awaitable that it returns, as an async one with a decorator does."""
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
