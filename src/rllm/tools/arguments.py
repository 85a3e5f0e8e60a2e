"""What a function accepts, as a JSON schema for the model and as a check of what the model sends."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs

from rllm.errors import ConfigError

__all__ = ["ArgumentError", "Arguments", "behind_partial", "split_docstring"]

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class ArgumentError(ValueError):
    """What was sent does not fit; the message names each argument."""


class Arguments:
    """The signature of one function.

    Raises:
        ConfigError: if a type hint has no JSON schema, is not defined, or a parameter cannot be given by name.
    """

    def __init__(self, function: Callable[..., Any], owner: str) -> None:
        @functools.wraps(_hinted(function))
        def capture(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        cast("Any", capture).__signature__ = _left_to_give(function)
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
        """The arguments with the types that the function declares, and with its defaults.

        Raises:
            ArgumentError: if they do not fit.
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
    """What a docstring says of the function, and of each argument under `Args:` (Google's style)."""
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


def behind_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a `functools.partial` calls; anything else is itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _hinted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that has the type hints: behind a `functools.partial`, and of an object that can be called."""
    hinted: Any = behind_partial(function)
    return hinted if inspect.isroutine(hinted) or inspect.isclass(hinted) else hinted.__call__


def _left_to_give(function: Callable[..., Any]) -> inspect.Signature:
    """The signature without what a `functools.partial` gives already: that is not the model's to choose."""
    signature = inspect.signature(function)
    given = function.keywords if isinstance(function, functools.partial) else {}
    return signature.replace(parameters=[item for name, item in signature.parameters.items() if name not in given])


def _signature(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function))


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:80]}..."


class _WithoutTitles(GenerateJsonSchema):
    """pydantic titles every property with its own name, which costs tokens and says nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
