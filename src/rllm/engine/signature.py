"""What of a task an agent function is called with, and whether the two fit, checked before anything starts.

A function gets the columns as `f(**task)`. One without `**kwargs` must name every column, because a column that is dropped
in silence is a misspelt one that nobody finds; only the task's id may be left out. A parameter named `base_url` or
`session_url` that the task lacks receives the URL at which this attempt's model calls are captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, shown
from rllm.registry import did_you_mean

ID_COLUMNS = ("id", "task_id")
"""Columns that a function need not take."""
URL_PARAMETERS = ("base_url", "session_url")
"""Parameters that we fill, unless the task does."""

Parameters: TypeAlias = Mapping[str, inspect.Parameter] | None
"""Of a function, by name; `None` where it does not tell."""


def check_signature(function: Callable[..., Any], columns: Collection[str]) -> None:
    """Compare a function with the columns of the dataset it will be called with.

    Raises:
        ConfigError: if it needs a column that is missing, or a column is there that it does not take.
    """
    parameters = parameters_of(function)
    if parameters is None:
        return
    name = name_of(function)
    seen = f"the data has {sorted(map(str, columns))}"
    unnamed = [column for column in columns if not isinstance(column, str)]
    if unnamed:
        raise ConfigError(f"{name} cannot take the column {unnamed[0]!r}: columns are passed by name, so make it text")
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(f"{name}: parameter {parameter.name!r} is positional-only: columns are passed by name")
        if _is_required(parameter) and parameter.name not in {*columns, *URL_PARAMETERS}:
            remedy = "rename it or give it a default"
            if len(parameters) == 1:
                remedy = f"columns are passed by name, so name them, or take the whole row as **{parameter.name}"
            raise ConfigError(f"{name} needs {parameter.name!r}, which is not a column: {seen}; {remedy}")
    if not _takes_any(parameters):
        unknown = sorted(set(columns) - _named(parameters) - set(ID_COLUMNS))
        if unknown:
            raise ConfigError(f"{name} does not take the column {unknown[0]!r}: {seen}; add **kwargs to its parameters")


def check_arguments(**arguments: Any) -> None:
    """Raise `ConfigError` if one of these is neither a mapping of names to values nor `None`."""
    for name, value in arguments.items():
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"{name}={shown(value)}: give a mapping of names to values")


def check_made_with(kind: type, name: str, arguments: Mapping[str, Any] | None, **ours: Any) -> None:
    """Raise `ConfigError` if a class cannot be called with these arguments, which the user gave by this name, and ours. It is
    called only where its `**kwargs` hide what becomes of them: that may take long, and belongs to the rollout."""
    arguments = arguments or {}
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a builtin that says nothing of its parameters
        return
    try:
        signature.bind(**ours, **arguments)
    except TypeError as error:
        meant = _misspelt(signature.parameters, arguments, ours)
        raise ConfigError(f"{kind.__name__}(**{name}): {error}{meant}") from error
    if arguments and _takes_any(signature.parameters):
        _check_taken(kind, name, {**ours, **arguments})


def _check_taken(kind: type, name: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if making an object, which is thrown away, finds an argument that nobody takes. What else it raises
    may come of what ours stand in for, such as an engine that is not there yet, and is told when the rollouts begin."""
    try:
        kind(**arguments)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            raise ConfigError(f"{kind.__name__}(**{name}): {error}") from error


def check_named(kind: type, name: str, arguments: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `ConfigError` if one of the arguments in the setting `name` is not among those that a class accepts."""
    for key in arguments:
        if key not in known:
            meant = did_you_mean(str(key), known, name) or f"known here: {', '.join(known)}"
            raise ConfigError(f"{name}.{key}: {kind.__name__} does not take this argument; {meant}")


def _misspelt(parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], ours: Collection[str]) -> str:
    """A question, for the end of a message, where an argument that is no parameter is like one that was not given."""
    names = _named(parameters)
    left = names - set(arguments) - set(ours)
    questions = (did_you_mean(key, left) for key in arguments if key not in names)
    return next((f"; {question}" for question in questions if question), "")


def check_rows(function: Callable[..., Any], data: Dataset) -> None:
    """Compare a function with every row that it will be called with.

    Raises:
        ConfigError: naming the first row that does not fit, and why.
    """
    for columns, row in data.shapes().items():
        try:
            check_signature(function, columns)
        except ConfigError as error:
            raise ConfigError(f"row {row} of {data.name or 'the dataset'}: {error}") from error


def arguments_for(parameters: Parameters, task: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """The keyword arguments for one attempt at this task, of a function with these parameters."""
    arguments = dict(task)
    if parameters is None:
        return arguments
    if not _takes_any(parameters):
        for column in set(ID_COLUMNS) - _named(parameters):
            arguments.pop(column, None)
    for parameter in set(URL_PARAMETERS) & _named(parameters):
        arguments.setdefault(parameter, base_url)
    return arguments


def name_of(function: Callable[..., Any]) -> str:
    """What to call this function in messages."""
    function = getattr(function, "func", function)  # a functools.partial
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Of a function, to be found once: that costs more than all else that is done with them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None  # some functions written in C tell nothing


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _named(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in by_name}
