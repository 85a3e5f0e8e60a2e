"""Values to blobs and back: token ids, log-probabilities and documents, as small as is cheap, and exact.

Every blob starts with one tag byte that says how the rest is written; the numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rllm.errors import StoreError

_FLOAT32, _FLOAT64 = 4, 8
_STANDARD, _COMPRESSED = 1, 2
_COMPRESS_ABOVE = 4096
"""Bytes of JSON below which zlib saves less than it costs: it gives up the interpreter's lock, and a busy process waits
longer to get it back than compressing takes."""
_DEEPEST = 100
"""Levels of nesting that a document may have before the rest is kept as text; circular values end here too."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids in 2, 3 or 4 bytes each, whichever holds the largest; the tag is that width.

    Raises:
        StoreError: if an id is negative, too large, or no integer.
    """
    try:
        wide = _little_endian(array("I", ids)).tobytes()
    except (OverflowError, TypeError) as error:
        raise StoreError(f"token ids cannot be stored ({error}): use whole numbers from 0 to 4294967295") from error
    nothing = bytes(len(ids))
    width = 4 if wide[3::4] != nothing else 3 if wide[2::4] != nothing else 2
    if width == 4:
        return b"\x04" + wide
    narrow = bytearray(len(wide) // 4 * width)
    for byte in range(width):
        narrow[byte::width] = wide[byte::4]
    return bytes([width]) + narrow


def unpack_ids(blob: bytes) -> list[int]:
    """What `pack_ids` packed."""
    width, body = blob[0], blob[1:]
    if width == 2:
        return _little_endian(array("H", body)).tolist()
    if width == 3:
        wide = bytearray(len(body) // 3 * 4)
        for byte in range(3):
            wide[byte::4] = body[byte::3]
        body = bytes(wide)
    return _little_endian(array("I", body)).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats in 4 bytes each where every one of them survives that, else in 8; the tag is the width."""
    exact = struct.pack(f"<{len(values)}d", *values)
    try:
        narrow = struct.pack(f"<{len(values)}f", *values)
        if struct.unpack(f"<{len(values)}f", narrow) == tuple(values):
            return bytes([_FLOAT32]) + narrow
    except OverflowError:
        pass  # some are beyond what four bytes can hold
    return bytes([_FLOAT64]) + exact


def unpack_floats(blob: bytes) -> list[float]:
    """What `pack_floats` packed."""
    return _little_endian(array("f" if blob[0] == _FLOAT32 else "d", blob[1:])).tolist()


def pack_document(value: Any) -> bytes:
    """Any value as JSON, compressed where that makes it smaller.

    What JSON has no form for is kept as near as possible: sets and arrays as lists, scalars of numpy as numbers, models as
    their fields, and anything else as text. Nothing that a user puts into metadata makes this fail.
    """
    tag = 0
    try:
        text = orjson.dumps(value, default=_nearest, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError, RecursionError):
        # Integers beyond 64 bits, lone surrogates, keys that are tuples, circular values.
        text, tag = json.dumps(_plain(value, _DEEPEST)).encode(), _STANDARD
    if len(text) > _COMPRESS_ABOVE:
        compressed = zlib.compress(text, 1)
        if len(compressed) < len(text):
            text, tag = compressed, tag | _COMPRESSED
    return bytes([tag]) + text


def unpack_document(blob: bytes) -> Any:
    """What `pack_document` packed, in JSON's types."""
    tag, text = blob[0], blob[1:]
    if tag & _COMPRESSED:
        text = zlib.decompress(text)
    return json.loads(text) if tag & _STANDARD else orjson.loads(text)


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _nearest(value: Any) -> Any:
    """The nearest value that JSON has a form for."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return list(value)
    for method in ("model_dump", "tolist"):  # pydantic's models; arrays and scalars of numpy, tensors of torch
        convert = getattr(value, method, None)
        if callable(convert):
            return convert()
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _plain(value: Any, levels: int) -> Any:
    """The value rebuilt from dictionaries with text keys, lists and scalars, at most so many levels deep."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if levels == 0:
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return {_text(key): _plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, levels - 1) for item in value]
    try:
        return _plain(_nearest(value), levels - 1)
    except Exception:
        return _text(value)
