"""The beginning and the end of what a program prints, however much that is."""

from __future__ import annotations

from collections import deque


class HeadAndTail:
    """Takes in a stream of bytes and keeps `max_bytes` of it, half from either end."""

    def __init__(self, max_bytes: int) -> None:
        self.num_dropped = 0
        """How many bytes between the two are not kept."""
        self._room = max_bytes - max_bytes // 2
        self._head = bytearray()
        self._max_tail = max_bytes // 2
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def add(self, data: bytes) -> bytes:
        """Take it in; returns how much of it belongs to the beginning."""
        head, rest = data[: self._room], data[self._room :]
        self._room -= len(head)
        self._head += head
        if rest:
            self._tail.append(rest)
            self._tail_size += len(rest)
            self._drop()
        return head

    def _drop(self) -> None:
        while (surplus := self._tail_size - self._max_tail) > 0:
            first = self._tail.popleft()
            if len(first) > surplus:
                self._tail.appendleft(first[surplus:])
            cut = min(len(first), surplus)
            self._tail_size -= cut
            self.num_dropped += cut

    def rest(self) -> bytes:
        """What follows the beginning: the end, behind a line that says how much is left out between them."""
        gap = f"\n[... {self.num_dropped} bytes left out ...]\n".encode() if self.num_dropped else b""
        return gap + b"".join(self._tail)

    def text(self) -> str:
        """All of it."""
        return (bytes(self._head) + self.rest()).decode(errors="replace")
