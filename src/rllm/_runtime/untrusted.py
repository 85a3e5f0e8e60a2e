"""Bounds on the cost of data from outside: compressed bytes, output of programs, and JSON, also in a model's text.

A megabyte of a compressed blob may stand for a gigabyte, and `[],[],...` takes thirty times its length in memory.
Data from a file or a network peer that may be large is unpacked and parsed here.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

MAX_UNPACKED_BYTES = 256 * 1024 * 1024
"""Limit for one blob; the longest requests and responses of a gateway have a quarter of it."""
LARGE = 1024 * 1024
"""Bytes of JSON above which its values are counted, and above which an event loop parses it in a thread."""
MAX_VALUE_BYTES = 128 * 1024 * 1024
"""Memory for the values of a JSON document without its strings: 2,700,000 numbers, or 1,000,000 empty lists."""
MAX_ANSWER_CHARS = 20_000
"""Number of characters at the end of a model's text that are searched for JSON or an action."""
_OBJECT, _LIST, _NEXT = 240, 64, 48
"""Minimum memory of an object, a list and each further value, in bytes."""


_SHOWN_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    **dict.fromkeys(
        (*range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD
    ),
}


def shown(text: str) -> str:
    """Return text with visible signs in place of terminal control characters and text direction marks."""
    return text if text.isprintable() else text.translate(_SHOWN_CONTROLS)


class TooLargeError(ValueError):
    """Data from outside that exceeds a memory limit."""


def unpack_zlib(data: bytes, *, limit: int = MAX_UNPACKED_BYTES) -> bytes:
    """Return the content of a whole zlib stream, of at most `limit` bytes.

    Raises:
        TooLargeError: if the result is longer.
        ValueError: if the stream is cut short.
        zlib.error: if it is damaged.
    """
    decompressor = zlib.decompressobj()
    unpacked = decompressor.decompress(data, limit + 1)
    if len(unpacked) > limit:
        raise TooLargeError(f"{len(data):,} bytes unpack to more than {limit:,}")
    if not decompressor.eof:
        raise ValueError("the compressed data is truncated")
    return unpacked


def parse_json(text: bytes, *, limit: int = MAX_VALUE_BYTES) -> Any:
    """Return the value of a JSON document whose values, strings aside, take at most `limit` bytes of memory.

    Raises:
        TooLargeError: if they take more.
        ValueError: if it is not JSON.
    """
    check_values(text, limit=limit)
    return orjson.loads(text)


def json_within(text: str, opening: str = "[{") -> Iterator[Any]:
    """Yield the outermost JSON values near the end of a text that begin with one of these brackets."""
    decoder, bracket = json.JSONDecoder(), re.compile(f"[{re.escape(opening)}]")
    text, position = text[-MAX_ANSWER_CHARS:], 0
    while begin := bracket.search(text, position):
        try:
            value, position = decoder.raw_decode(text, begin.start())
            yield value
        except ValueError:
            position = begin.end()
        except RecursionError:  # thousands of brackets; trying each of them would take long
            return


def last_json(text: str) -> Any:
    """Return the value of a JSON text, or else the last outermost JSON value in it; raise `ValueError` without one."""
    try:
        return json.loads(text[-MAX_ANSWER_CHARS:])
    except (ValueError, RecursionError):
        values = list(json_within(text))
    if not values:
        raise ValueError("the answer holds no JSON")
    return values[-1]


def read_json(path: Path, *, limit: int = MAX_UNPACKED_BYTES) -> Any:
    """Return the value of a JSON file of at most `limit` bytes; `parse_json` bounds its values.

    Raises:
        TooLargeError: if it is larger.
        ValueError: if it is not JSON.
        OSError: if it cannot be read.
    """
    return parse_json(read_bytes(path, limit=limit))


def read_bytes(path: Path, *, limit: int = MAX_UNPACKED_BYTES) -> bytes:
    """Return the content of a file; raise `TooLargeError` if it has more than `limit` bytes."""
    if path.stat().st_size > limit:
        raise TooLargeError(f"{path.name} has more than {limit:,} bytes")
    return path.read_bytes()


def check_values(text: bytes, *, limit: int = MAX_VALUE_BYTES) -> None:
    """Estimate the memory of a JSON document's values without parsing it; short documents are not checked.

    Raises:
        TooLargeError: if they take more than `limit` bytes.
    """
    if len(text) < LARGE or _value_bytes(text) <= limit:
        return
    # The estimate included punctuation inside strings; count again without it.
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
    """Return the memory of values with this punctuation; in pieces, so that other threads can run."""
    taken = 0
    for start in range(0, len(text), LARGE):
        piece = text[start : start + LARGE]
        taken += _OBJECT * piece.count(b"{") + _LIST * piece.count(b"[") + _NEXT * piece.count(b",")
    return taken


class HeadAndTail:
    """Keeps `max_bytes` of a stream: half from its beginning, half from its end."""

    def __init__(self, max_bytes: int, *, gap: str = "\n[... {} bytes left out ...]\n") -> None:
        """Keep nothing yet; `gap` is the text between the two, formatted with the number of omitted bytes."""
        self.num_dropped = 0
        """Number of omitted bytes between the two."""
        self._gap = gap
        self._head, self._max_head = bytearray(), max_bytes - max_bytes // 2
        self._tail, self._max_tail = bytearray(), max_bytes // 2

    @property
    def num_seen(self) -> int:
        """Return the number of bytes that were added."""
        return len(self._head) + self.num_dropped + len(self._tail)

    def add(self, data: bytes) -> bytes:
        """Add data; return the part that belongs to the beginning."""
        room = self._max_head - len(self._head)
        head = data[:room]
        self._head += head
        self._tail += data[room:]
        surplus = max(len(self._tail) - self._max_tail, 0)
        del self._tail[:surplus]
        self.num_dropped += surplus
        return head

    def rest(self) -> bytes:
        """Return the end, after the text for omitted bytes, if there are any."""
        gap = self._gap.format(self.num_dropped).encode() if self.num_dropped else b""
        return gap + bytes(self._tail)

    def text(self) -> str:
        """Return everything that was kept."""
        return (bytes(self._head) + self.rest()).decode(errors="replace")
