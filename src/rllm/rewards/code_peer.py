"""Channel between tests and the solution that they test, which run in two processes and do not trust each other.

Values are exchanged as JSON. Values whose type is exactly a plain one (numbers, texts, containers, dates, NumPy's
arrays) are copied. All others stay where they are; the other end has a `Remote` for each. Whatever a solution does to
itself, it can only send such values: none of its code is executed in the process of the tests. This module imports
nothing of ours.
"""

from __future__ import annotations

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import functools
import io
import json
import operator
import pickle
import re
import socket
import sys
import types
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext, redirect_stdout, suppress
from typing import Any, NoReturn, TypeAlias

ENDED = "the solution ended"
"""Message of `Ended`; the reward replaces it with the way in which the solution ended."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_PRINTED = 1 << 20
"""Maximum number of characters printed by one call that the tests receive."""

Message: TypeAlias = dict[str, Any]
Container: TypeAlias = list[object] | dict[object, object] | set[object]


class Ended(RuntimeError):
    """The process at the other end is gone, or sends invalid messages."""


def words_of(error: BaseException) -> str:
    """Return the type and the message of an error, truncated."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # its message is the solution's
        return type(error).__name__


class Peer:
    """One end of the channel.

    Since tests may pass functions, a request may lead to requests in return before its reply. A message is one line.
    Mutable containers in a request are numbered, and the reply has their new contents, so that a call may change its
    arguments.
    """

    def __init__(self, channel: int, *, trusts: bool) -> None:
        """Open this end.

        Args:
            channel: number of the socket.
            trusts: accept pickles, and any use of objects that were sent. False in the tests' process.
        """
        self.trusts = trusts
        self.is_closed = False
        self.exported: dict[int, object] = {}
        self.error_classes: dict[type, int] = {}
        self._socket = socket.socket(fileno=channel)
        self._reader = self._socket.makefile("rb")

    def send(self, message: Message) -> None:
        """Write one message."""
        line = f"{json.dumps(message)}\n".encode()
        try:
            self._socket.sendall(line)
        except OSError:
            self._end()

    def receive(self) -> Message:
        """Read one message.

        Raises:
            Ended: if there is none.
        """
        try:
            line = b"" if self.is_closed else self._reader.readline(MAX_MESSAGE_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError, MemoryError):
            message = None
        if not isinstance(message, dict):
            self._end()
        return message

    def request(self, operation: str, number: int, /, *arguments: object, **named: object) -> Any:
        """Have the other end apply the operation to its object or module; return the result, or raise the error."""
        table = Table(self)
        self.send({"do": operation, "to": number, "with": table.encoded([list(arguments), named])})
        while "do" in (message := self.receive()):
            self.serve(message)
        try:
            sys.stdout.write(str(message.get("out", "")))
            error = _to_error(message["raise"], self) if "raise" in message else None
            if error is None:
                result = table.decoded(message["result"])
                for index, content in message["changed"]:
                    table.change(index, content)
        except Ended:
            raise
        except Exception as wrong:
            raise TypeError(f"the solution's result cannot be used: {words_of(wrong)}") from None
        if error is not None:
            raise error
        return result

    def serve(self, message: Message) -> None:
        """Carry out a request of the other end, and reply; the reply of a solution includes its printed output."""
        printed = io.StringIO()
        try:
            table = Table(self)
            arguments, named = table.decoded(message["with"])
            target = self.exported[message["to"]]
            if not self.trusts:
                _check_permitted(message["do"], target, arguments)
            before = table.contents()
            with redirect_stdout(printed) if self.trusts else nullcontext():
                result = table.encoded(_OPERATIONS[message["do"]](target, *arguments, **named))
            after = table.contents(len(before))
            changed = [[index, new] for index, (old, new) in enumerate(zip(before, after, strict=True)) if new != old]
            reply: Message = {"result": result, "changed": changed}
        except Ended:
            raise
        except BaseException as error:
            reply = {"raise": _from_error(error, self)}
        self.send({**reply, "out": printed.getvalue()[:MAX_PRINTED]})

    def export(self, value: object) -> int:
        """Keep the object for the other end, and return its number."""
        self.exported[id(value)] = value
        return id(value)

    def error_class(self, number: int, name: str, base: object) -> type:
        """Return the class that stands for a class of errors of the other end, so that tests can catch them."""
        for kind, known in self.error_classes.items():
            if known == number:
                return kind
        kind = type(str(name), (_catchable(base),), {})
        self.error_classes[kind] = number
        return kind

    def _end(self) -> NoReturn:
        self.is_closed = True
        raise Ended(ENDED)


def _check_permitted(operation: str, target: object, arguments: list[object]) -> None:
    """Permit only operations that tests intend if they pass a function, an iterator or an object of their own."""
    own_class = getattr(target if isinstance(target, type) else type(target), "__module__", None) == "tests"
    if operation == "call":
        permitted = callable(target)
    elif isinstance(target, types.FunctionType):
        permitted = operation == "get" and arguments[0] in _NAMES_OF_FUNCTIONS
    elif isinstance(target, Iterator):
        permitted = operation in ("iter", "next")
    elif own_class and operation in ("get", "set"):
        permitted = not str(arguments[0]).startswith("_")
    else:
        permitted = own_class and operation not in ("eval", "await")
    if not permitted:
        raise PermissionError(
            f"the solution may not {operation} an object of type {type(target).__name__} of the tests"
        )


# --- objects of the other end -----------------------------------------------------------------------------------------


class Remote:
    """An object of the other end, where all operations on it are carried out.

    Its own operators never receive an expected value: those with two operands accept only objects of the solution, and
    raise a `TypeError` otherwise, so that neither `==` nor `!=` passes.
    """

    __slots__ = ("_number", "_peer")
    _number: int
    _peer: Peer

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattribute__(self, name: str) -> object:
        if name == "__class__":
            return object.__getattribute__(self, name)
        if name.startswith("__") and name not in _NAMES_OF_FUNCTIONS:  # which libraries look for
            raise AttributeError(name)
        found = _ask("get", self, name)
        if name in _COMPARING_METHODS and not _peer_of(self).trusts:
            return functools.partial(_compare_by, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        _ask("set", self, name, value)

    def __next__(self) -> object:
        found = _ask("next", self)
        if not found:
            raise StopIteration
        return found[0]

    def __contains__(self, item: object) -> bool:
        return any(found is item or found == item for found in self)

    def __iter__(self) -> Iterator[object]:
        return _ask("iter", self)  # type: ignore[no-any-return]

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and _ask("isinstance", self, value) is True

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an object of the solution cannot be copied or pickled")

    def __hash__(self) -> int:
        return _ask("hash", self)  # type: ignore[no-any-return]


def _number_of(remote: Remote) -> int:
    number: int = object.__getattribute__(remote, "_number")
    return number


def _peer_of(remote: Remote) -> Peer:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer


def _ask(operation: str, remote: Remote, /, *arguments: object, **named: object) -> Any:
    return _peer_of(remote).request(operation, _number_of(remote), *arguments, **named)


def _unary(operation: str) -> Callable[..., object]:
    return lambda self, /, *arguments, **named: _ask(operation, self, *arguments, **named)


def _binary(operation: str) -> Callable[[Remote, object], object]:
    def combine(self: Remote, other: object) -> object:
        if other is None and operation in ("eq", "ne"):
            return operation == "ne"
        if type(other) is not Remote and not _peer_of(self).trusts:
            raise _meets(other)
        return _ask(operation, self, other)

    return combine


def _compare_by(method: Callable[..., object], *values: object) -> object:
    """Call a method of a result with other objects of the solution, but not with an expected value."""
    for value in values:
        if type(value) is not Remote:
            raise _meets(value)
    return method(*values)


def _meets(value: object) -> TypeError:
    return TypeError(f"an object of the solution, not a plain value, meets one of type {type(value).__name__}")


def _next(iterator: Iterator[object]) -> list[object]:
    try:
        return [next(iterator)]
    except StopIteration:
        return []


_NAMES_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__")
_COMPARING_METHODS = set("allclose endswith eq equals isclose isdisjoint issubset issuperset startswith".split())
_ALONE = ("abs", "bool", "float", "format", "hash", "int", "len", "repr", "reversed", "round", "str")
_OF_OPERATOR = ("delitem", "getitem", "index", "neg", "setitem")
_WITH_ANOTHER = tuple("eq ne lt le gt ge add and floordiv mod mul or pow sub truediv xor".split())
_OPERATIONS: dict[str, Callable[..., object]] = {
    "await": lambda coroutine: _run(coroutine),
    "call": lambda function, /, *arguments, **named: function(*arguments, **named),
    "enter": lambda manager: manager.__enter__(),
    "eval": lambda module, expression: eval(expression, {**vars(module), "__builtins__": {}}),
    "exit": lambda manager, *_: manager.__exit__(None, None, None),
    "get": getattr,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "iter": iter,
    "next": _next,
    "set": setattr,
    **{name: getattr(builtins, name) for name in _ALONE},
    **{name: getattr(operator, f"__{name}__") for name in _OF_OPERATOR + _WITH_ANOTHER},
    "radd": lambda value, other: other + value,
}
for _name in ("call", "enter", "exit", *_ALONE, *_OF_OPERATOR):
    if _name != "hash":
        setattr(Remote, f"__{_name}__", _unary(_name))
for _name in (*_WITH_ANOTHER, "radd"):
    setattr(Remote, f"__{_name}__", _binary(_name))


# --- values as JSON ---------------------------------------------------------------------------------------------------


class Table:
    """Values of a request and its reply as JSON, with numbers for its mutable containers."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._items: list[Container] = []
        self._numbers: dict[int, int] = {}

    def contents(self, number: int | None = None) -> list[object]:
        """Return the current contents of the first `number` containers, by default of all."""
        return [self._content(item) for item in self._items[:number]]

    def change(self, index: int, content: Any) -> None:
        """Replace the contents of a container."""
        item = self._items[index]
        item.clear()
        self._fill(item, content)

    def encoded(self, value: Any) -> object:
        """Return the value as JSON."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -_LARGE < value < _LARGE else ["int", hex(value)]
        if kind in (list, dict, set):
            if id(value) in self._numbers:
                return ["same", self._numbers[id(value)]]
            self._add(value)
            return [kind.__name__, self._content(value)]
        if kind in _ARGUMENTS:
            return [kind.__name__, *map(self.encoded, _ARGUMENTS[kind](value))]
        return self._encoded_object(value, kind)

    def decoded(self, data: object) -> Any:
        """Return the value that `encoded` was given, or one that stands for it."""
        if not isinstance(data, list):
            if isinstance(data, dict):
                raise TypeError("an object of JSON")
            return data
        name, *parts = data
        if name in _EMPTY:
            item = _EMPTY[name]()
            self._add(item)
            self._fill(item, parts[0])
            return item
        if name == "same":
            return self._items[parts[0]]
        if name in _PLAIN:
            return _PLAIN[name](*map(self.decoded, parts))
        return self._decoded_object(name, parts)

    def _add(self, item: Container) -> None:
        self._numbers[id(item)] = len(self._items)
        self._items.append(item)

    def _content(self, item: Container) -> object:
        if isinstance(item, dict):
            return [[self.encoded(key), self.encoded(value)] for key, value in item.items()]
        return [self.encoded(value) for value in item]

    def _fill(self, item: Container, content: Any) -> None:
        if isinstance(item, dict):
            item.update((self.decoded(key), self.decoded(value)) for key, value in content)
        elif isinstance(item, set):
            item.update(map(self.decoded, content))
        else:
            item.extend(map(self.decoded, content))

    def _encoded_object(self, value: Any, kind: type) -> object:
        if kind is Remote:
            return ["yours", _number_of(value)]
        if isinstance(value, type):
            return self._encoded_class(value)
        if isinstance(value, types.CoroutineType):
            return ["coroutine", self._peer.export(value)]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named tuple", kind.__name__, *map(self.encoded, (tuple(map(str, kind._fields)), *value))]
        if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "O") in "biufcSU":
            return ["array", value.dtype.str, self.encoded(tuple(map(int, value.shape))), self.encoded(value.tobytes())]
        if plain := [exact for base, exact in _EXACT.items() if isinstance(value, base)]:
            return self.encoded(plain[0](value))
        if not self._peer.trusts:
            with suppress(Exception):  # raised by classes of the tests
                return ["pickle", base64.b64encode(pickle.dumps(value)).decode()]
        elif kind.__module__ != "solution" and isinstance(value, dict | list | set):  # of a library: a `Counter`
            return self.encoded(next(base(value) for base in (dict, list, set) if isinstance(value, base)))
        return ["mine", self._peer.export(value)]

    def _encoded_class(self, value: type) -> list[object]:
        if value in self._peer.error_classes:
            return ["yours", self._peer.error_classes[value]]
        if issubclass(value, BaseException):
            base = next((found for found in value.__mro__[1:] if issubclass(found, BaseException)), None)
            return ["error class", self._peer.export(value), value.__module__, value.__name__, self.encoded(base)]
        if getattr(builtins, value.__name__, None) is value:
            return ["class", value.__name__]
        return ["mine", self._peer.export(value)]

    def _decoded_object(self, name: object, parts: list[Any]) -> object:
        match name, parts:
            case "mine", [int(number)]:
                return Remote(self._peer, number)
            case "yours", [number]:
                return self._peer.exported[number]
            case "coroutine", [int(number)]:
                return _awaited(Remote(self._peer, number))
            case "class", [called] if isinstance(found := getattr(builtins, str(called)), type):
                return found
            case "error class", [number, module, called, base]:
                return _known_error(module, called) or self._peer.error_class(number, called, self.decoded(base))
            case "pickle", [content] if self._peer.trusts:
                return pickle.loads(base64.b64decode(content))
        raise TypeError(f"unknown kind of value: {name!r:.100}")


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Callable[..., object]:
    return collections.namedtuple(name, fields, rename=True)


_LARGE = 1 << 63
_EMPTY: dict[str, Callable[[], Container]] = {"list": list, "dict": dict, "set": set}
_EXACT: dict[type, Callable[[Any], object]] = {
    str: lambda value: str.__getitem__(value, slice(None)),
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    type({}.keys()): list,
    type({}.values()): list,
    type({}.items()): list,
}
"""Conversions of values of subclasses of these types, and of views, to plain values."""
_ARGUMENTS: dict[type, Callable[[Any], tuple[object, ...]]] = {
    tuple: tuple,
    frozenset: tuple,
    bytes: lambda value: (base64.b64encode(value).decode(),),
    complex: lambda value: (value.real, value.imag),
    collections.deque: lambda value: (list(value), value.maxlen),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    datetime.timezone: lambda value: value.__getinitargs__(),
    **{
        kind: lambda value: value.__reduce__()[1]
        for kind in (range, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.datetime)
    },
}
"""Arguments from which the functions in `_PLAIN`, by the names of these types, rebuild a value."""
_PLAIN: dict[object, Callable[..., object]] = {
    **{kind.__name__: kind for kind in _ARGUMENTS},
    "int": lambda text: int(text, 16),
    "tuple": lambda *items: items,
    "frozenset": lambda *items: frozenset(items),
    "bytes": base64.b64decode,
    "named tuple": lambda name, fields, *items: _named_tuple(str(name), fields)(*items),
    "array": lambda *parts: _array(*parts),
}


def _array(data_type: str, shape: tuple[int, ...], content: bytes) -> object:
    import numpy as np

    if not re.fullmatch(r"[<>|=][biufcSU]\d{1,6}", data_type):
        raise TypeError(f"unknown type of numbers: {data_type!r:.100}")
    array = np.frombuffer(content, dtype=data_type).reshape(shape).copy()
    return array if shape else array[()]


async def _awaited(remote: Remote) -> object:
    return _ask("await", remote)


def _run(coroutine: Coroutine[object, object, object]) -> object:
    import asyncio  # slow, and rarely needed

    return asyncio.run(coroutine)


# --- errors -----------------------------------------------------------------------------------------------------------

_MODULES_WITH_ERRORS = set(
    "builtins binascii dataclasses decimal json.decoder queue _queue re statistics struct zlib".split()
)


def _known_error(module: object, name: object) -> type[BaseException] | None:
    """Return the module's class of errors, if it is imported here and its errors have no special meaning for tests."""
    found = getattr(sys.modules.get(str(module)), str(name), None) if module in _MODULES_WITH_ERRORS else None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _catchable(kind: object) -> type[BaseException]:
    """Return the class of errors; `RuntimeError` for one that would end an iteration, and tests within it, early."""
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise TypeError("not a class of errors")
    return RuntimeError if issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit) else kind


def _from_error(error: BaseException, peer: Peer) -> Message:
    table = Table(peer)
    try:
        parts = {"args": list(error.args), "attributes": dict(vars(error))}
        return {"class": table.encoded(type(error)), "text": str(error)[:10_000], "parts": table.encoded(parts)}
    except BaseException as wrong:  # the solution's own
        return {"class": ["class", "RuntimeError"], "text": words_of(wrong), "parts": None}


def _to_error(data: Message, peer: Peer) -> BaseException:
    table = Table(peer)
    kind = _catchable(table.decoded(data["class"]))
    parts = table.decoded(data["parts"]) or {"args": [], "attributes": {}}
    try:
        error = kind(*parts["args"])
    except Exception:  # it needs other arguments
        error = kind.__new__(kind)
    if str(error) != data["text"]:
        error.args = (data["text"],)
    if kind.__module__ != "builtins":
        vars(error).update({name: value for name, value in parts["attributes"].items() if not name.startswith("_")})
    return error
