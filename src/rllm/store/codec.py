"""Exact encoding of token ids, floats and JSON documents as bytes, compressed with Zstandard.

A blob is one byte for its kind, then its content. Numbers are little-endian, as on all machines that rllm runs on, and
stored in planes: the lowest bytes of all numbers, then the next ones, and so on, because bytes of the same significance
compress well together.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Mapping, Sequence, Set
from datetime import date
from hashlib import sha256
from typing import Any

import orjson
import zstandard

from rllm._runtime.untrusted import MAX_UNPACKED_BYTES, TooLargeError, check_values
from rllm.errors import StoreError
from rllm.types import is_scored

UNREADABLE = (LookupError, ValueError, TypeError, AttributeError, RecursionError, zstandard.ZstdError)
"""Errors raised for a damaged blob."""
UNWRITABLE = (TypeError, ValueError, RecursionError)
"""Errors of `to_json` for integers beyond 64 bits, lone surrogates, keys that are tuples, and circular values."""

_COMPRESSED = 0x80
"""Bit of the first byte. The other bits are the width of a number, or the way in which a document is written."""
_SHORTEST_COMPRESSED = 16
"""Minimum bytes of content that is worth compressing; the compressed frame alone takes about ten."""
_FAST, _STANDARD = 0, 1
"""Documents written by orjson, and those that only the standard library can write and read."""
_MAX_ARRAY_BYTES = 64 * 1024 * 1024
"""Uncompressed size of an array: the longest contexts have a few million tokens."""
_MAX_VALUE_BYTES = 1024 * 1024 * 1024
"""Limit for `check_values`: more than a gateway accepts as a request and an answer together."""
_MAX_DEPTH = 100
"""Levels of nesting in a document; of deeper and circular values only the type is kept."""
_LONGEST_INTEGER = 8192
"""Maximum bits of an integer that is kept as a number: Python does not print or parse more than 4,300 digits."""


class _Contexts(threading.local):
    """Compression contexts, which are costly to make and not safe to share between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def _pack(kind: int, content: bytes, limit: int) -> bytes:
    """Return a blob, compressed if that makes it smaller and if its content is small enough to be read again."""
    if _SHORTEST_COMPRESSED <= len(content) <= limit:
        compressed = _contexts.compressor.compress(content)
        if len(compressed) < len(content):
            return bytes([kind | _COMPRESSED]) + compressed
    return bytes([kind]) + content


def _unpack(blob: bytes, limit: int) -> tuple[int, bytes]:
    """Return the kind and the content of a blob."""
    kind, content = blob[0], blob[1:]
    if kind & _COMPRESSED:
        size = zstandard.frame_content_size(content)
        if not 0 <= size <= limit:
            raise TooLargeError(f"{len(content):,} bytes claim to unpack to {size:,}: the limit is {limit:,}")
        content = _contexts.decompressor.decompress(content, allow_extra_data=False)
    return kind & ~_COMPRESSED, content


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as four bytes each; raise `StoreError` if an id is negative, too large, or not an integer."""
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise StoreError(f"token ids cannot be stored ({error}): use whole numbers from 0 to 4294967295") from error


def pack_ids(ids: bytes) -> bytes:
    """Return a blob of token ids, given as four bytes each."""
    return _pack(4, _to_planes(ids, 4), _MAX_ARRAY_BYTES)


def unpack_ids(blob: bytes) -> list[int]:
    """Return the token ids of a blob."""
    width, content = _unpack(blob, _MAX_ARRAY_BYTES)
    if width != 4:
        raise ValueError(f"token ids of {width} bytes")
    return array("I", _from_planes(content, 4)).tolist()


def floats_to_bytes(values: Sequence[float]) -> bytes:
    """Return floats as eight bytes each."""
    return array("d", values).tobytes()


def pack_floats(values: bytes) -> bytes:
    """Return a blob of floats from `floats_to_bytes`, in four bytes each if that loses nothing, otherwise in eight."""
    width = 8
    if not values[::8].strip(b"\0"):  # The lowest 29 bits of a double are zero if it was a float.
        numbers = array("d", values).tolist()
        narrow = array("f", numbers)
        if narrow.tolist() == numbers:
            values, width = narrow.tobytes(), 4
    return _pack(width, _to_planes(values, width), _MAX_ARRAY_BYTES)


def unpack_floats(blob: bytes) -> list[float]:
    """Return the floats of a blob."""
    width, content = _unpack(blob, _MAX_ARRAY_BYTES)
    if width not in (4, 8):
        raise ValueError(f"floats of {width} bytes")
    return array("f" if width == 4 else "d", _from_planes(content, width)).tolist()


def _to_planes(numbers: bytes, width: int) -> bytes:
    return b"".join([numbers[place::width] for place in range(width)])


def _from_planes(planes: bytes, width: int) -> bytes:
    count = len(planes) // width
    numbers = bytearray(len(planes))
    for place in range(width):
        numbers[place::width] = planes[place * count : (place + 1) * count]
    return bytes(numbers)


def pack_json(text: bytes, *, is_plain: bool = True) -> bytes:
    """Return a blob of a JSON document that `to_json` wrote, or `any_to_json` if it is not plain."""
    return _pack(_FAST if is_plain else _STANDARD, text, MAX_UNPACKED_BYTES)


def pack_document(value: object) -> bytes:
    """Return a blob of any value, as JSON.

    Values without a JSON form are converted to the nearest one: sets and arrays to lists, numpy scalars to numbers,
    models to their fields, and everything else to text. Nothing that a user puts into metadata makes this fail.
    """
    try:
        return pack_json(to_json(value))
    except UNWRITABLE:
        return pack_json(any_to_json(value), is_plain=False)


def unpack_document(blob: bytes) -> Any:
    """Return the value of a document."""
    return unpack_sized_document(blob)[0]


def unpack_sized_document(blob: bytes) -> tuple[Any, int]:
    """Return the value of a document, and the size of its JSON in bytes.

    Raises:
        One of UNREADABLE: if it is damaged, or larger than any document that is written.
    """
    kind, text = _unpack(blob, MAX_UNPACKED_BYTES)
    check_values(text, limit=_MAX_VALUE_BYTES)
    return (json.loads(text) if kind == _STANDARD else orjson.loads(text)), len(text)


def to_json(value: object, *, sort_keys: bool = False) -> bytes:
    """Return a value as JSON; raise one of `UNWRITABLE` for values that only `pack_document` can write."""
    options = orjson.OPT_NON_STR_KEYS | (orjson.OPT_SORT_KEYS if sort_keys else 0)
    return orjson.dumps(value, default=_nearest, option=options)


def any_to_json(value: object) -> bytes:
    """Return any value as JSON, with the conversions of `pack_document`; `json` reads it, orjson does not always."""
    try:
        return to_json(value)
    except UNWRITABLE:
        return json.dumps(_plain(value)).encode()


def readable_json(value: object, *, sort_keys: bool = False) -> bytes:
    """Return any value as JSON on one line that any parser reads: lone surrogates and huge integers become text."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_SORT_KEYS if sort_keys else 0)
    try:
        return orjson.dumps(value, default=_readable, option=options)
    except UNWRITABLE:
        return orjson.dumps(_plain(value, is_exact=False), default=_readable, option=options)


def plain_text(text: str) -> str:
    """Return text that can be encoded: half of a surrogate pair becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def column_text(text: str) -> str:
    """Return text that a column of every database can hold: NUL, too, becomes its escape."""
    return plain_text(text).replace("\0", "\\x00")


def _nearest(value: object) -> object:
    """Return the nearest value that has a JSON form."""
    if isinstance(value, float):
        return float(value) if is_scored(value) else None
    if isinstance(value, date):  # subclasses, such as pandas' timestamps
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set | tuple):
        return list(value)
    for method in ("model_dump", "tolist", "to_dict"):  # pydantic models; arrays and tensors; our own types
        if callable(convert := getattr(value, method, None)):
            converted: object = convert()
            return converted
    return _text(value)


_MOST_SHOWN = 200
"""Maximum number of bytes that are shown in full."""


def _readable(value: object) -> object:
    """Return the nearest readable value: for more bytes than that, such as an image's, their number and digest."""
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > _MOST_SHOWN:
        return f"<{len(value)} bytes, sha256 {sha256(value).hexdigest()[:16]}>"
    return _nearest(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _plain(value: object, inside: tuple[int, ...] = (), *, is_exact: bool = True) -> object:
    """Rebuild a value from dictionaries with text keys, lists and scalars.

    Args:
        value: any value.
        inside: ids of the enclosing containers.
        is_exact: keep lone surrogates and integers of more than 64 bits, which only the standard library reads.
    """
    if isinstance(value, str):
        return value if is_exact else plain_text(value)
    if isinstance(value, float):  # JSON has no form for NaN, and orjson writes null
        return float(value) if math.isfinite(value) and is_scored(value) else None
    if isinstance(value, int) and value.bit_length() > (_LONGEST_INTEGER if is_exact else 63):
        return _text(value)
    if isinstance(value, int | None):
        return value
    if id(value) in inside or len(inside) == _MAX_DEPTH:
        return f"<{type(value).__name__}>"
    around = (*inside, id(value))
    if isinstance(value, Mapping):
        texts = ((_text(key), item) for key, item in value.items())
        return {key if is_exact else plain_text(key): _plain(item, around, is_exact=is_exact) for key, item in texts}
    if isinstance(value, list | tuple | Set):
        return [_plain(item, around, is_exact=is_exact) for item in value]
    try:
        nearest = _nearest(value) if is_exact else _readable(value)
    except Exception:  # the conversion is users' code
        nearest = _text(value)
    return _plain(nearest, around, is_exact=is_exact)
