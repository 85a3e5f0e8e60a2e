"""Check that an agent function accepts the columns of its tasks, before anything starts.

A function gets the columns as `f(**task)`. Without `**kwargs` it must name every column but the task's id, because a
silently dropped column may be a misspelt parameter. A parameter named `base_url` or `session_url` that the task lacks
receives the URL at which this attempt's model calls are captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, shown
from rllm.registry import did_you_mean, suggestion
from rllm.types import JSONMapping, JSONObject

ID_COLUMNS = ("id", "task_id")
"""Columns that a function may ignore."""
URL_PARAMETERS = ("base_url", "session_url")
"""Parameters that we fill unless the task has them."""

Parameters: TypeAlias = Mapping[str, inspect.Parameter] | None
"""Parameters by name; `None` if they are unknown."""


def check_signature(function: Callable[..., object], columns: Collection[str]) -> None:
    """Raise `ConfigError` if a function needs a column that its dataset lacks, or does not take one that it has."""
    parameters = parameters_of(function)
    if parameters is None:
        return
    name = name_of(function)
    seen = f"the data has {sorted(map(str, columns))}"
    unnamed = [column for column in columns if not isinstance(column, str)]
    if unnamed:
        raise ConfigError(f"{name} cannot take the column {unnamed[0]!r}: columns are passed by name, so make it text")
    for parameter in parameters.values():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic or parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{name}: parameter {parameter.name!r} is positional-only: columns are passed by name")
        if parameter.name not in {*columns, *URL_PARAMETERS}:
            remedy = "rename it or give it a default"
            if len(parameters) == 1:
                remedy = f"columns are passed by name, so name them, or take the whole row as **{parameter.name}"
            raise ConfigError(f"{name} needs {parameter.name!r}, which is not a column: {seen}; {remedy}")
    if not _takes_any(parameters):
        unknown = sorted(set(columns) - _named(parameters) - set(ID_COLUMNS))
        if unknown:
            raise ConfigError(f"{name} does not take the column {unknown[0]!r}: {seen}; add **kwargs to its parameters")


def check_arguments(**arguments: object) -> None:
    """Raise `ConfigError` if an argument is neither a mapping of names to values nor `None`."""
    for name, value in arguments.items():
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"{name}={shown(value)}: use a mapping of names to values")


def check_made_with(kind: type, name: str, arguments: JSONMapping | None, **ours: object) -> None:
    """Raise `ConfigError` if a class cannot be called with the arguments of the setting `name` and with `ours`.

    The class is only called if `**kwargs` in its signature hide which arguments it accepts.
    """
    arguments = arguments or {}
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(**ours, **arguments)
    except TypeError as error:
        # An unknown argument may be a missing one, misspelt.
        names = _named(signature.parameters)
        left = names - set(arguments) - set(ours)
        questions = (did_you_mean(key, left) for key in arguments if key not in names)
        meant = next((f"; {question}" for question in questions if question), "")
        raise ConfigError(f"{kind.__name__}(**{name}): {error}{meant}") from error
    if not (arguments and _takes_any(signature.parameters)):
        return
    try:
        kind(**{**ours, **arguments})
    except ConfigError:
        raise
    except Exception as error:
        # Any other may come from placeholders among our own arguments, and is reported when rollouts start.
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            raise ConfigError(f"{kind.__name__}(**{name}): {error}") from error


def check_named(kind: type, name: str, arguments: JSONMapping, known: Collection[str]) -> None:
    """Raise `ConfigError` if an argument of the setting `name` is not among those that a class accepts."""
    for key in arguments:
        if key not in known:
            hint = suggestion(str(key), known, name)
            raise ConfigError(f"{name}.{key}: {kind.__name__} does not take this argument; {hint}")


def check_rows(function: Callable[..., object], data: Dataset) -> None:
    """Raise a `ConfigError` with the first row of its dataset that a function does not fit, and the reason."""
    for columns, row in data.shapes().items():
        try:
            check_signature(function, columns)
        except ConfigError as error:
            raise ConfigError(f"row {row} of {data.name or 'the dataset'}: {error}") from error


def arguments_for(parameters: Parameters, task: JSONMapping, base_url: str) -> JSONObject:
    """Return the keyword arguments for an attempt at a task, for a function with these parameters."""
    arguments = dict(task)
    if parameters is None:
        return arguments
    if not _takes_any(parameters):
        for column in set(ID_COLUMNS) - _named(parameters):
            arguments.pop(column, None)
    for parameter in set(URL_PARAMETERS) & _named(parameters):
        arguments.setdefault(parameter, base_url)
    return arguments


def name_of(function: Callable[..., object]) -> str:
    """Return the name of a function for messages."""
    function = getattr(function, "func", function)  # a functools.partial
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")


def parameters_of(function: Callable[..., object]) -> Parameters:
    """Return the parameters of a function; slow, so call it once."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None  # some functions in C have no signature


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _named(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in by_name}
