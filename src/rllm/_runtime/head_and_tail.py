"""Bounded output of a program: its beginning and its end."""

from __future__ import annotations

_GAP = "\n[... {} bytes left out ...]\n"


class HeadAndTail:
    """Keeps `max_bytes` of a stream: half from its beginning, half from its end."""

    def __init__(self, max_bytes: int, *, gap: str = _GAP) -> None:
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
