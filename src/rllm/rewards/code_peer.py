"""Channel between tests and the solution that they test, which run in two processes and do not trust each other.

Values cross as JSON. Those of plain types (numbers, texts, containers, dates, NumPy's arrays) are copied, of exactly
that type. All others stay where they are; the other end has a `Remote` for each. Whatever a solution does to itself, it
can only send such values: nothing of it is executed beside the tests. It imports nothing of ours.
"""

from __future__ import annotations

import base64
import builtins
import collections
import copy
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
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias

ENDED = "the solution ended"
"""Replaced outside by how it ended."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_PRINTED_BYTES = 1 << 20

Message: TypeAlias = dict[str, Any]
Container: TypeAlias = list[object] | dict[object, object] | set[object] | bytearray


class Ended(RuntimeError):
    """The process at the other end is gone, or writes nonsense."""


def words_of(error: BaseException) -> str:
    """Return its type and message, cut."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # its message is the solution's
        return type(error).__name__


class Peer:
    """One end of the channel. A request may lead to requests in return before its reply: tests pass functions, too.

    A message is one line. Mutable containers in a request are numbered, and the reply has their new contents, so that a
    call may change its arguments.
    """

    def __init__(self, channel: int, *, trusts: bool, printed: io.TextIOWrapper | None = None) -> None:
        """Open this end.

        Args:
            channel: number of the socket.
            trusts: accept pickles, and any use of objects that were sent. The tests trust no peer.
            printed: output to send with every reply.
        """
        self.trusts = trusts
        self.is_closed = False
        self.exported: dict[int, object] = {}
        self.error_classes: dict[type, int] = {}
        self.classes: set[int] = set()
        """Objects of the other end that the tests mean as classes: those with a capital."""
        self.made: set[int] = set()
        """Objects that these classes returned, and that operators made of those. One that comes from anywhere else,
        such as a method, is a result to be judged, and not among them."""
        self.learned: set[int] = set()
        """Objects that may be the difference from, or the quotient by, a value that is expected."""
        self._remotes: dict[int, Remote] = {}
        self._socket = socket.socket(fileno=channel)
        self._reader = self._socket.makefile("rb")
        self._printed = printed

    def send(self, message: Message) -> None:
        """Write one message."""
        self._write(f"{json.dumps(message)}\n".encode())

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

    def request(self, operation: str, target: Remote | None, /, *arguments: object, **named: object) -> Any:
        """Have the other end apply the operation to its object, or to its module, and return or raise what it does."""
        table = Table(self)
        number = 0 if target is None else _number_of(target)
        makes = number in (self.classes if operation == "call" else self.made if operation in _COMBINES else ())
        self.send({"do": operation, "to": number, "with": table.encoded([list(arguments), named])})
        while "do" in (message := self.receive()):
            self.serve(message)
        try:
            if isinstance(out := message.get("out"), str) and out:
                sys.stdout.write(out)
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
        self._classify(operation, number, arguments, result, makes=makes)
        return result

    def _classify(
        self, operation: str, number: int, arguments: tuple[object, ...], result: object, *, makes: bool
    ) -> None:
        """Record the kind of an object that an operation returned."""
        others = {_number_of(item) for item in arguments if type(item) is Remote}
        is_difference = operation in _DIFFERENCES and len(others) < len(arguments)
        has_learned = operation in _COMBINES | _READS and not self.learned.isdisjoint({number, *others})
        learned = is_difference or has_learned
        if type(result) is not Remote:
            if learned:
                raise TypeError("an object of the solution combines with a plain value to a plain one")
            return
        found = _number_of(result)
        if learned:
            self.learned.add(found)
        if operation == "get" and number == 0 and str(arguments[0])[:1].isupper():
            self.classes.add(found)
        elif makes:
            self.made.add(found)

    def serve(self, message: Message) -> None:
        """Do what the other end asks for, and reply."""
        try:
            table = Table(self)
            arguments, named = table.decoded(message["with"])
            target = self.exported[message["to"]]
            if not self.trusts:
                _check_permitted(message["do"], target, arguments)
            before = table.contents()
            result = table.encoded(_OPERATIONS[message["do"]](target, *arguments, **named))
            after = table.contents(len(before))
            changed = [[index, new] for index, (old, new) in enumerate(zip(before, after, strict=True)) if new != old]
            line = json.dumps({"result": result, "changed": changed, "out": self._drain_printed()})
        except Ended:
            raise
        except BaseException as error:
            line = json.dumps({"raise": _from_error(error, self), "out": self._drain_printed()})
        self._write(f"{line}\n".encode())

    def export(self, value: object) -> int:
        """Keep the object for the other end, and return its number."""
        self.exported[id(value)] = value
        return id(value)

    def remote(self, number: object) -> Remote:
        """Return the object that stands for one of the other end."""
        if type(number) is not int:
            raise TypeError(f"not a number: {number!r:.100}")
        self.made.discard(number)
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]

    def error_class(self, number: int, name: str, base: object) -> type:
        """Return the class that stands for a class of errors of the other end, so that tests can catch them."""
        for kind, known in self.error_classes.items():
            if known == number:
                return kind
        kind = type(str(name), (_catchable(base),), {})
        self.error_classes[kind] = number
        return kind

    def _drain_printed(self) -> str:
        if self._printed is None:
            return ""
        raw = self._printed.buffer
        assert isinstance(raw, io.BytesIO)
        text = raw.getvalue()[:MAX_PRINTED_BYTES].decode(errors="replace")
        raw.seek(0)
        raw.truncate(0)
        return text

    def _write(self, line: bytes) -> None:
        try:
            self._socket.sendall(line)
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        self.is_closed = True
        raise Ended(ENDED)


def _check_permitted(operation: str, target: object, arguments: list[object]) -> None:
    """Permit a solution no more than tests that pass a function, an iterator or an object of theirs mean to."""
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


class Remote:
    """An object of the other end. What is done to it, is done there.

    No operator of its own learns what was expected, and decides. A comparison with a value from here raises a
    `TypeError`, so that neither `==` nor `!=` passes; subclasses of lists, sets and dictionaries are compared as such.
    Only objects that the tests make by calling a class, as in `Vector(1, 2) * 3`, combine with values from here, and
    differ from them.
    """

    __slots__ = ("_number", "_peer")
    _number: int
    _peer: Peer

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattribute__(self, name: str) -> object:
        if name in ("__class__", "__deepcopy__"):
            return object.__getattribute__(self, name)
        if name.startswith("__") and name not in _NAMES_OF_FUNCTIONS:  # which libraries look for
            raise AttributeError(name)
        found = _ask("get", self, name)
        if name in _COMPARING_METHODS and not (_is_made(self) or _peer_of(self).trusts):
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
        if _is_made(self):
            return _ask("contains", self, item) is True
        return any(found is item or found == item for found in self)

    def __iter__(self) -> Iterator[object]:
        return _ask("iter", self)  # type: ignore[no-any-return]

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and _ask("isinstance", self, value) is True

    def __subclasscheck__(self, value: object) -> bool:
        return type(value) is Remote and _ask("issubclass", self, value) is True

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an object of the solution stays there")

    def __hash__(self) -> int:
        return _ask("hash", self)  # type: ignore[no-any-return]


def _number_of(remote: Remote) -> int:
    number: int = object.__getattribute__(remote, "_number")
    return number


def _peer_of(remote: Remote) -> Peer:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer


def _is_made(remote: Remote) -> bool:
    return _number_of(remote) in _peer_of(remote).made


def _ask(operation: str, remote: Remote, /, *arguments: object, **named: object) -> Any:
    return _peer_of(remote).request(operation, remote, *arguments, **named)


def _unary(operation: str) -> Callable[..., object]:
    return lambda self, /, *arguments, **named: _ask(operation, self, *arguments, **named)


def _binary(operation: str) -> Callable[[Remote, object], object]:
    def combine(self: Remote, other: object) -> object:
        if type(other) is Remote or (operation in _COMBINES and _is_made(self)) or _peer_of(self).trusts:
            return _ask(operation, self, other)
        if operation in ("eq", "ne"):
            return _equals(self, other) is (operation == "eq")
        raise _meets(other)

    return combine


def _equals(remote: Remote, value: object) -> bool:
    """Compare with a value from here, which an object of the solution's own class may only differ from."""
    if value is None:
        return False
    if type(value) in (list, dict, set):
        with suppress(TypeError):
            return bool(_ask("plain", remote) == value)
    if not _is_made(remote) or _ask("eq", remote, value) is not False:
        raise _meets(value)
    return False


def _compare_by(method: Callable[..., object], *values: object) -> object:
    """Call a method of a result with other objects of the solution, but not with what is expected."""
    for value in values:
        if type(value) is not Remote:
            raise _meets(value)
    return method(*values)


def _meets(value: object) -> TypeError:
    return TypeError(f"an object of the solution, not a plain value, meets one of type {type(value).__name__}")


def _plain(value: object) -> Container:
    """Return a copy, of exactly that type."""
    if isinstance(value, list):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set):
        return set(value)
    raise TypeError("not a container")


def _next(iterator: Iterator[object]) -> list[object]:
    try:
        return [next(iterator)]
    except StopIteration:
        return []


def _swapped(function: Callable[..., object]) -> Callable[..., object]:
    return lambda one, other: function(other, one)


_OPERATIONS: dict[str, Callable[..., object]] = {
    "await": lambda coroutine: _run(coroutine),
    "call": lambda function, /, *arguments, **named: function(*arguments, **named),
    "contains": operator.contains,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "enter": lambda manager: manager.__enter__(),
    "eval": lambda module, expression: eval(expression, {**vars(module), "__builtins__": {}}),
    "exit": lambda manager, *_: manager.__exit__(None, None, None),
    "get": getattr,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    "iter": iter,
    "next": _next,
    "plain": _plain,
    "set": setattr,
}
_NAMES_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__")
_ALONE = ("abs", "bool", "float", "format", "hash", "int", "len", "repr", "reversed", "round", "str")
_OF_OPERATOR = ("delitem", "getitem", "index", "invert", "neg", "pos", "setitem")
_WITH_ANOTHER = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = tuple("add and floordiv lshift matmul mod mul or pow rshift sub truediv xor".split())
_REFLECTED = tuple(f"r{name}" for name in _ARITHMETIC)
_IN_PLACE = tuple(f"i{name}" for name in _ARITHMETIC)
_COMBINES = {*_ARITHMETIC, *_REFLECTED, *_IN_PLACE}
_COMBINES |= {"abs", "bool", "float", "index", "int", "invert", "neg", "pos", "round", "copy", "deepcopy"}
_COMPARING_METHODS = set("allclose endswith eq equals isclose isdisjoint issubset issuperset startswith".split())
_READS = {"getitem", "len", "next"}
"""All that a library which takes numbers, such as NumPy, does to an object."""
_DIFFERENCES = {f"{kind}{name}" for kind in ("", "r", "i") for name in ("sub", "xor", "truediv")}
_OPERATIONS.update({name: getattr(builtins, name) for name in _ALONE})
_OPERATIONS.update({name: getattr(operator, f"__{name}__") for name in _OF_OPERATOR + _WITH_ANOTHER + _ARITHMETIC})
for _name in ("call", "copy", "deepcopy", "enter", "exit", *_ALONE, *_OF_OPERATOR):
    if _name != "hash":
        setattr(Remote, f"__{_name}__", _unary(_name))
_OPERATIONS.update({name: getattr(operator, f"__{name}__") for name in _IN_PLACE})
_OPERATIONS.update({name: _swapped(_OPERATIONS[name[1:]]) for name in _REFLECTED})
for _name in _WITH_ANOTHER + _ARITHMETIC + _REFLECTED + _IN_PLACE:
    setattr(Remote, f"__{_name}__", _binary(_name))


class Table:
    """Values of a request and its reply as JSON, with numbers for its mutable containers."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._items: list[Container] = []
        self._numbers: dict[int, int] = {}

    def contents(self, number: int | None = None) -> list[object]:
        """Return the present contents of the first containers."""
        return [self._content(item) for item in self._items[:number]]

    def change(self, index: int, content: Any) -> None:
        """Replace the contents of a container."""
        item = self._items[index]
        item.clear()
        self._fill(item, content)

    def encoded(self, value: object) -> object:
        """Return the value as JSON."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if type(value) is int:
            return value if -_LARGE < value < _LARGE else ["int", hex(value)]
        if isinstance(value, list | dict | set | bytearray) and kind in (list, dict, set, bytearray):
            if id(value) in self._numbers:
                return ["same", self._numbers[id(value)]]
            self._add(value)
            return [kind.__name__, self._content(value)]
        if kind in _TO_JSON:
            name, parts = _TO_JSON[kind]
            return [name, *map(self.encoded, parts(value))]
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
        if name in _FROM_JSON:
            return _FROM_JSON[name](*map(self.decoded, parts))
        return self._decoded_object(name, parts)

    def _add(self, item: Container) -> None:
        self._numbers[id(item)] = len(self._items)
        self._items.append(item)

    def _content(self, item: Container) -> object:
        if isinstance(item, dict):
            return [[self.encoded(key), self.encoded(value)] for key, value in item.items()]
        if isinstance(item, bytearray):
            return base64.b64encode(item).decode()
        return [self.encoded(value) for value in item]

    def _fill(self, item: Container, content: Any) -> None:
        if isinstance(item, dict):
            item.update((self.decoded(key), self.decoded(value)) for key, value in content)
        elif isinstance(item, bytearray):
            item.extend(base64.b64decode(content))
        elif isinstance(item, set):
            item.update(map(self.decoded, content))
        else:
            item.extend(map(self.decoded, content))

    def _encoded_object(self, value: Any, kind: type) -> object:
        if kind is Remote:
            return ["yours", _number_of(value)]
        if isinstance(value, type):
            return self._encoded_class(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named", kind.__name__, list(map(str, kind._fields)), [self.encoded(item) for item in tuple(value)]]
        if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "O") in "biufcSU":
            content = base64.b64encode(value.tobytes()).decode()
            return ["array", value.dtype.str, self.encoded(list(map(int, value.shape))), content]
        for base, exact in _IMMUTABLE.items():
            if isinstance(value, base):
                return self.encoded(exact(value))
        if isinstance(value, types.CoroutineType):
            return ["coroutine", self._peer.export(value)]
        if not self._peer.trusts:
            with suppress(Exception):  # of what the tests define
                return ["pickle", base64.b64encode(pickle.dumps(value)).decode()]
        return ["mine", self._peer.export(value)]

    def _encoded_class(self, value: type) -> list[object]:
        if getattr(builtins, value.__name__, None) is value:
            return ["class", value.__name__]
        if value in self._peer.error_classes:
            return ["yours", self._peer.error_classes[value]]
        if issubclass(value, BaseException):
            base = next(found for found in value.__mro__[1:] if issubclass(found, BaseException))
            if _standard_error(value.__module__, value.__name__) is value:
                return ["standard error", value.__module__, value.__name__, self.encoded(base)]
            return ["error class", self._peer.export(value), value.__name__, self.encoded(base)]
        return ["mine", self._peer.export(value)]

    def _decoded_object(self, name: object, parts: list[Any]) -> object:
        match name, parts:
            case "mine", [number]:
                return self._peer.remote(number)
            case "yours", [number]:
                return self._peer.exported[number]
            case "class", [called] if isinstance(found := getattr(builtins, str(called)), type):
                return found
            case "error class", [number, called, base]:
                return self._peer.error_class(number, called, self.decoded(base))
            case "standard error", [module, called, base]:
                return _standard_error(module, called) or self.decoded(base)
            case "named", [called, fields, items]:
                return _named_tuple(str(called), tuple(fields))(*map(self.decoded, items))
            case "coroutine", [number]:
                return _awaited(self._peer.remote(number))
            case "pickle", [content] if self._peer.trusts:
                return pickle.loads(base64.b64decode(content))
        raise TypeError(f"unknown kind of value: {name!r:.100}")


_LARGE = 1 << 63
_MODULES_WITH_ERRORS = set("binascii dataclasses decimal json.decoder queue _queue re statistics struct zlib".split())
_EMPTY: dict[object, Callable[[], Container]] = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}
_TO_JSON: dict[type, tuple[str, Callable[[Any], Iterable[object]]]] = {
    tuple: ("tuple", tuple),
    frozenset: ("frozenset", tuple),
    bytes: ("bytes", lambda value: [base64.b64encode(value).decode()]),
    complex: ("complex", lambda value: [value.real, value.imag]),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    decimal.Decimal: ("decimal", lambda value: [str(value)]),
    fractions.Fraction: ("fraction", lambda value: [value.numerator, value.denominator]),
    datetime.date: ("date", lambda value: [value.isoformat()]),
    datetime.time: ("time", lambda value: [value.isoformat()]),
    datetime.datetime: ("datetime", lambda value: [value.isoformat()]),
    datetime.timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    collections.Counter: ("counter", lambda value: [dict(value)]),
    collections.OrderedDict: ("ordered", lambda value: [list(value.items())]),
    collections.defaultdict: ("default", lambda value: [dict(value)]),
    collections.deque: ("deque", lambda value: [list(value), value.maxlen]),
    type({}.keys()): ("keys", lambda value: [list(value)]),
    type({}.values()): ("values", lambda value: [list(value)]),
    type({}.items()): ("items", lambda value: [list(value)]),
    type(...): ("ellipsis", lambda value: []),
    type(NotImplemented): ("not implemented", lambda value: []),
}
_FROM_JSON: dict[object, Callable[..., object]] = {
    "int": lambda text: int(text, 16),
    "tuple": lambda *items: items,
    "frozenset": lambda *items: frozenset(items),
    "bytes": base64.b64decode,
    "complex": complex,
    "range": range,
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "timedelta": datetime.timedelta,
    "counter": collections.Counter,
    "ordered": collections.OrderedDict,
    "default": lambda value: collections.defaultdict(None, value),
    "deque": collections.deque,
    "keys": lambda value: dict.fromkeys(value).keys(),
    "values": lambda value: dict(enumerate(value)).values(),
    "items": lambda value: dict(value).items(),
    "ellipsis": lambda: ...,
    "not implemented": lambda: NotImplemented,
    "array": lambda *parts: _array(*parts),
}
_IMMUTABLE: dict[type, Callable[[Any], object]] = {
    str: lambda value: str.__getitem__(value, slice(None)),
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    tuple: lambda value: tuple(tuple.__iter__(value)),
}
"""Plain values of the subclasses of these types."""


def _array(data_type: str, shape: list[int], content: str) -> object:
    import numpy as np

    if not re.fullmatch(r"[<>|=][biufcSU]\d{1,6}", data_type):
        raise TypeError(f"unknown type of numbers: {data_type!r:.100}")
    array = np.frombuffer(base64.b64decode(content), dtype=data_type).reshape(shape).copy()
    return array if shape else array[()]


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Callable[..., object]:
    return collections.namedtuple(name, fields, rename=True)


def _run(coroutine: Coroutine[object, object, object]) -> object:
    import asyncio  # slow, and rarely needed

    return asyncio.run(coroutine)


async def _awaited(remote: Remote) -> object:
    return _ask("await", remote)


def _standard_error(module: object, name: object) -> type[BaseException] | None:
    """Return the class of errors that the module has, if it is imported here, and its errors mean nothing to tests."""
    found = getattr(sys.modules.get(str(module)), str(name), None) if module in _MODULES_WITH_ERRORS else None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _catchable(kind: object) -> type[BaseException]:
    """Return the class of errors, unless it ends an iteration, and with it tests that run in one, early."""
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
    except Exception:  # it wants other arguments
        error = kind.__new__(kind)
    if str(error) != data["text"]:
        error.args = (data["text"],)
    if kind.__module__ != "builtins":
        vars(error).update({name: value for name, value in parts["attributes"].items() if not name.startswith("_")})
    return error
