"""Values to blobs and back: token ids, log-probabilities and documents, as small as is cheap, and exact.

Every blob starts with one tag byte that says how the rest is written; the numbers are little-endian. What is compressed is
a zlib stream, which `isal`, where it is installed, writes three times and reads twice as fast as the standard library.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import orjson

from rllm._runtime import native
from rllm._runtime.untrusted import MAX_UNPACKED_BYTES, check_values, unpack_zlib
from rllm.errors import StoreError

_zlib: ModuleType
try:
    from isal import isal_zlib as _zlib  # type: ignore[import-not-found, no-redef, unused-ignore]
except ImportError:
    _zlib = zlib

UNREADABLE = (LookupError, ValueError, TypeError, AttributeError, RecursionError, zlib.error, _zlib.error)
"""What is raised for a blob that nothing here packed."""

_FLOAT32, _FLOAT64, _FLOAT32_SPLIT = 4, 8, 20
_EIGHTEEN_BITS = 5
_COMPRESSED_IDS = 16
_STANDARD, _COMPRESSED, _COMPRESSED_WITH_WORDS = 1, 2, 4
_COMPRESS_JSON_ABOVE, _COMPRESS_IDS_ABOVE, _SPLIT_ABOVE = 64, 256, 64
"""Bytes, ids and floats below which it saves less than it costs."""
_WORDS = (
    b'"tool_calls":[{"id":"call_","type":"function","function":{"name":"","arguments":"{\\"","reasoning_content":"",'
    b'"tools":[{"type":"function","function":{"name":"","description":"","parameters":{"type":"object","properties":{"":'
    b'{"type":"string","description":""}},"required":[""]}}],"weight_updates":[],"frequency_penalty":0.0,'
    b'"presence_penalty":0.0,"requested_sampling":{"stop":null,"stream":true,"n":1,"metadata":{"task_id":"seed":0,'
    b'"shared":[1000,2,["tools","sampling","requested_sampling","metadata"]],"timings":{"first_token_s":0.0,'
    b'"queue_s":0.0,"total_s":0.0},"sampling":{"temperature":1.0,"top_p":1.0,"top_k":-1,"max_tokens":1024,'
    b'"max_completion_tokens":{"role":"tool","tool_call_id":"{"role":"assistant","content":null},{"role":"user",'
    b'"content":"{"role":"user","content":""}],"response":{"role":"assistant","content":"{"messages":[{"role":"system",'
    b'"content":"You are a helpful assistant. '
)
"""What documents are likely to contain, likeliest last: zlib refers to it instead of writing it. Part of the format."""
_MAX_ID_BYTES = 64 * 1024 * 1024
"""Of compressed token ids, unpacked: the longest contexts have a few million of them."""
_MAX_VALUE_BYTES = 1024 * 1024 * 1024
"""See `check_values`: more than a gateway accepts as a request and an answer together."""
_DEEPEST = 100
"""Levels of nesting that a document may have before the rest is kept as text; circular values end here too."""


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids in 4 bytes each.

    Raises:
        StoreError: if an id is negative, too large, or no integer.
    """
    try:
        return _little_endian(array("I", ids)).tobytes()
    except (OverflowError, TypeError) as error:
        raise StoreError(f"token ids cannot be stored ({error}): use whole numbers from 0 to 4294967295") from error


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as `pack_wide_ids` packs them.

    Raises:
        StoreError: if an id is negative, too large, or no integer.
    """
    return pack_wide_ids(ids_to_bytes(ids))


def pack_wide_ids(wide: bytes) -> bytes:
    """Token ids that have 4 bytes each in 2, 3 or 4, whichever holds the largest; the tag is that width.

    Compressed where that makes them smaller than in 18 bits each, which holds the ids of most vocabularies.
    """
    width, narrow = _narrowed(wide) if native.compiled is None else native.compiled.to_narrow(wide)
    highest = narrow[2::3] if width == 3 else b""
    in_bits = width == 3 and not highest.translate(None, b"\0\1\2\3")
    smallest = len(wide) * 18 // 32 if in_bits else len(narrow)
    if 4 * _COMPRESS_IDS_ABOVE < len(wide) <= _MAX_ID_BYTES:
        compressed: bytes = _zlib.compress(narrow, 1)
        if len(compressed) < smallest:
            return bytes([_COMPRESSED_IDS | width]) + compressed
    if in_bits:
        return bytes([_EIGHTEEN_BITS]) + narrow[0::3] + narrow[1::3] + _pack(highest, bits=2)
    return bytes([width]) + narrow


def unpack_ids(blob: bytes) -> list[int]:
    """What `pack_ids` packed."""
    tag, body = blob[0], blob[1:]
    if tag == _EIGHTEEN_BITS:
        return _unpack_eighteen_bits(body)
    width = tag & ~_COMPRESSED_IDS
    if tag & _COMPRESSED_IDS:
        body = unpack_zlib(body, _zlib.decompressobj(), limit=_MAX_ID_BYTES)
    if width == 2:
        return _little_endian(array("H", body)).tolist()
    if width == 3:
        wide = bytearray(len(body) // 3 * 4)
        for byte in range(3):
            wide[byte::4] = body[byte::3]
        body = bytes(wide)
    return _little_endian(array("I", body)).tolist()


def _narrowed(wide: bytes) -> tuple[int, bytes]:
    """How many bytes the largest of these numbers needs, at least 2; and all of them in that many."""
    nothing = bytes(len(wide) // 4)
    width = 4 if wide[3::4] != nothing else 3 if wide[2::4] != nothing else 2
    if width == 4:
        return width, wide
    narrow = bytearray(len(wide) // 4 * width)
    for byte in range(width):
        narrow[byte::width] = wide[byte::4]
    return width, bytes(narrow)


def _unpack_eighteen_bits(body: bytes) -> list[int]:
    count = len(body) * 4 // 9
    wide = bytearray(4 * count)
    wide[0::4], wide[1::4] = body[:count], body[count : 2 * count]
    wide[2::4] = _unpack(body[2 * count :], bits=2)[:count]
    return _little_endian(array("I", bytes(wide))).tolist()


def _pack(values: bytes, bits: int) -> bytes:
    """Numbers of 2 or 4 bits, as many to a byte as go in."""
    per_byte = 8 // bits
    packed = 0
    for place in range(per_byte):
        packed |= int.from_bytes(values[place::per_byte], "little") << (bits * place)
    return packed.to_bytes(-(-len(values) // per_byte), "little")


def _unpack(packed: bytes, bits: int) -> bytearray:
    """What `_pack` packed, with zeros behind it where the last byte was not full."""
    tables = _NUMBERS[bits]
    values = bytearray(len(tables) * len(packed))
    for place, table in enumerate(tables):
        values[place :: len(tables)] = packed.translate(table)
    return values


_NUMBERS = {
    bits: [bytes(byte >> place & (1 << bits) - 1 for byte in range(256)) for place in range(0, 8, bits)]
    for bits in (2, 4)
}
"""By width and place in a byte, the number that each byte has there."""


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats in 4 bytes each where every one of them survives that, else in 8; the tag is the width.

    Where the bytes that hold sign and exponent have at most 16 different values, as those of log-probabilities do, these
    take half a byte each.
    """
    narrow = _to_singles(values)
    if narrow is None:
        return bytes([_FLOAT64]) + _little_endian(array("d", values)).tobytes()
    if len(values) > _SPLIT_ABOVE and len(heads := bytes(set(narrow[3::4]))) <= 16:
        numbers = narrow[3::4].translate(bytes.maketrans(heads, bytes(range(len(heads)))))
        count = len(values).to_bytes(4, "little")
        packed = _pack(numbers, bits=4)
        return bytes([_FLOAT32_SPLIT]) + count + narrow[0::4] + narrow[1::4] + narrow[2::4] + packed + heads
    return bytes([_FLOAT32]) + narrow


def _to_singles(values: Sequence[float]) -> bytes | None:
    """The floats in 4 bytes each; `None` if one of them does not survive that."""
    if native.compiled is not None and isinstance(values, array) and sys.byteorder == "little":
        narrow: bytes | None = native.compiled.to_singles(values)
        return narrow
    layout = f"<{len(values)}f"
    try:
        narrow = struct.pack(layout, *values)  # half the price of an array
    except (OverflowError, struct.error):
        return None
    return narrow if struct.unpack(layout, narrow) == tuple(values) else None


def unpack_floats(blob: bytes) -> list[float]:
    """What `pack_floats` packed."""
    tag, body = blob[0], blob[1:]
    if tag == _FLOAT32_SPLIT:
        count, body = int.from_bytes(body[:4], "little"), body[4:]
        end = 3 * count + -(-count // 2)
        if end > len(body):
            raise ValueError(f"{count:,} numbers do not fit into {len(body):,} bytes")
        numbers, heads = _unpack(body[3 * count : end], bits=4), body[end:]
        narrow = bytearray(4 * count)
        for byte in range(3):
            narrow[byte::4] = body[byte * count : (byte + 1) * count]
        narrow[3::4] = numbers[:count].translate(heads.ljust(256, b"\0"))
        body = bytes(narrow)
    return _little_endian(array("d" if tag == _FLOAT64 else "f", body)).tolist()


def pack_document(value: Any) -> bytes:
    """Any value as JSON, compressed where that makes it smaller.

    What JSON has no form for is kept as near as possible: sets and arrays as lists, scalars of numpy as numbers, models as
    their fields, and anything else as text. Nothing that a user puts into metadata makes this fail.
    """
    try:
        return pack_json(to_json(value))
    except (TypeError, ValueError, RecursionError):
        # Integers beyond 64 bits, lone surrogates, keys that are tuples, circular values.
        return pack_json(json.dumps(_plain(value, _DEEPEST)).encode(), _STANDARD)


def plain_text(text: str) -> str:
    """Text that can be encoded: half of a surrogate pair becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def column_text(text: str) -> str:
    """Text that a column of every database can hold: NUL, too, becomes its escape."""
    return plain_text(text).replace("\0", "\\x00")


def any_to_json(value: Any) -> bytes:
    """Any value as JSON, with what JSON has no form for as in `pack_document`."""
    try:
        return to_json(value)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value, _DEEPEST)).encode()


def to_json(value: Any) -> bytes:
    """Any value as JSON.

    Raises:
        TypeError, ValueError, RecursionError: for the rare values that only `pack_document` has a way with.
    """
    return orjson.dumps(value, default=_nearest, option=orjson.OPT_NON_STR_KEYS)


def pack_json(text: bytes, tag: int = 0) -> bytes:
    """Return JSON with its tag, compressed where that makes it smaller and it may be unpacked again."""
    if _COMPRESS_JSON_ABOVE < len(text) <= MAX_UNPACKED_BYTES:
        compressor = _zlib.compressobj(
            1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY, _WORDS
        )
        compressed: bytes = compressor.compress(text) + compressor.flush()
        if len(compressed) < len(text):
            text, tag = compressed, tag | _COMPRESSED_WITH_WORDS
    return bytes([tag]) + text


def unpack_document(blob: bytes) -> Any:
    """What `pack_document` packed, in JSON's types."""
    return unpack_sized_document(blob)[0]


def unpack_sized_document(blob: bytes) -> tuple[Any, int]:
    """Return a document, and the bytes of its JSON.

    Raises:
        One of UNREADABLE: if it is damaged, or unpacks to more than any document has.
    """
    tag, text = blob[0], blob[1:]
    if tag & _COMPRESSED_WITH_WORDS:
        text = unpack_zlib(text, _zlib.decompressobj(zdict=_WORDS))
    elif tag & _COMPRESSED:
        text = unpack_zlib(text, _zlib.decompressobj())
    check_values(text, limit=_MAX_VALUE_BYTES)
    return (json.loads(text) if tag & _STANDARD else orjson.loads(text)), len(text)


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
    if isinstance(value, float) and not math.isfinite(value):
        return None  # as orjson has it: JSON has no form for it
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
