"""Bounds on what data of others costs to read: bytes that are unpacked, and values in JSON.

A megabyte of a compressed blob may stand for a gigabyte, and `[],[],...` takes thirty times its length in memory. Whatever
comes from a file or a network peer is unpacked and parsed here, where it can be large.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import orjson

MAX_UNPACKED_BYTES = 256 * 1024 * 1024
"""Of one blob. The longest requests and answers that a gateway takes have a quarter of that each."""
LARGE = 1024 * 1024
"""Bytes of JSON from which its values are counted, and from which an event loop has other threads read it."""
MAX_VALUE_BYTES = 128 * 1024 * 1024
"""Memory that the values of a JSON document may take, without its texts: 2,700,000 numbers, or 1,000,000 empty lists."""
_OBJECT, _LIST, _NEXT = 240, 64, 48
"""Bytes that an object, a list and each further value take in memory at least."""


_SHOWN_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    **dict.fromkeys(
        (*range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD
    ),
}


def shown(text: str) -> str:
    """Return text for a terminal: the controls that it would act on, and those of the direction of writing, become signs."""
    return text if text.isprintable() else text.translate(_SHOWN_CONTROLS)


class TooLargeError(ValueError):
    """Data of others that would take more memory than it may."""


def unpack_zlib(data: bytes, decompressor: Any = None, *, limit: int = MAX_UNPACKED_BYTES) -> bytes:
    """Return what a zlib stream stands for.

    Args:
        data: the whole stream.
        decompressor: an object like `zlib.decompressobj()`, for another library or a dictionary.
        limit: bytes of the result at most.

    Raises:
        TooLargeError: if the result is longer.
        ValueError: if the stream is cut short.
        zlib.error: if it is damaged.
    """
    decompressor = decompressor or zlib.decompressobj()
    unpacked: bytes = decompressor.decompress(data, limit + 1)
    if len(unpacked) > limit:
        raise TooLargeError(f"{len(data):,} bytes unpack to more than {limit:,}")
    if not decompressor.eof:
        raise ValueError("the compressed data is cut short")
    return unpacked


def parse_json(text: bytes, *, limit: int = MAX_VALUE_BYTES) -> Any:
    """Return the value of a JSON document whose values take at most `limit` bytes of memory, its texts aside.

    Raises:
        TooLargeError: if they take more.
        ValueError: if it is not JSON.
    """
    check_values(text, limit=limit)
    return orjson.loads(text)


def read_json(path: Path, *, limit: int = MAX_UNPACKED_BYTES) -> Any:
    """Return the value of a JSON file of at most `limit` bytes; `parse_json` bounds its values.

    Raises:
        TooLargeError: if it is larger.
        ValueError: if it is not JSON.
        OSError: if it cannot be read.
    """
    return parse_json(read_bytes(path, limit=limit))


def read_bytes(path: Path, *, limit: int = MAX_UNPACKED_BYTES) -> bytes:
    """Return the content of a file of at most `limit` bytes.

    Raises:
        TooLargeError: if it is larger.
        OSError: if it cannot be read.
    """
    if path.stat().st_size > limit:
        raise TooLargeError(f"{path.name} has more than {limit:,} bytes")
    return path.read_bytes()


def check_values(text: bytes, *, limit: int = MAX_VALUE_BYTES) -> None:
    """Check what the values of a JSON document will take in memory, without parsing it. Free of cost for short ones.

    Raises:
        TooLargeError: if they take more than `limit` bytes.
    """
    if len(text) < LARGE or _value_bytes(text) <= limit:
        return
    # That counted the punctuation of texts, too.
    taken, in_text = 0, False
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    for start in range(0, len(plain), LARGE):
        pieces = plain[start : start + LARGE].split(b'"')
        taken += _value_bytes(b" ".join(pieces[in_text::2]))
        in_text ^= len(pieces) % 2 == 0
        if taken > limit:
            raise TooLargeError(
                f"its lists and objects would take more than {limit:,} bytes of memory: send fewer values"
            )


def _value_bytes(text: bytes) -> int:
    """Return the memory of values with this punctuation; a piece at a time, so that other threads can run in between."""
    taken = 0
    for start in range(0, len(text), LARGE):
        piece = text[start : start + LARGE]
        taken += _OBJECT * piece.count(b"{") + _LIST * piece.count(b"[") + _NEXT * piece.count(b",")
    return taken
