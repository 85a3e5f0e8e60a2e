"""An attacker writes the trace store: opening it deletes nothing else, and reading it ends."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest

from rllm.errors import StoreError
from rllm.store import open_store


def made(folder: Path, num_sessions: int = 1) -> Path:
    path = folder / "traces.db"
    with open_store(str(path)) as store:
        for number in range(num_sessions):
            store.open_session(f"session {number}", {"note": "x" * 50}).result(60)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def pages_of(path: Path) -> tuple[int, int, int]:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        asked = ("PRAGMA page_size", "PRAGMA page_count", "SELECT rootpage FROM sqlite_master WHERE name = 'sessions'")
        size, count, root = (database.execute(statement).fetchone()[0] for statement in asked)
    return size, count, root


@pytest.mark.parametrize("read_only", [False, True])
def test_journal_that_names_another_file_deletes_nothing(tmp_path: Path, read_only: bool) -> None:
    path = made(tmp_path)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = DELETE")
    size, count, _ = pages_of(path)
    victim = tmp_path / "precious.txt"
    victim.write_text("precious")
    sign, name = bytes.fromhex("d9d505f920a163d7"), str(victim).encode()
    header = (sign + struct.pack(">5I", 0, 12345, count, 512, size)).ljust(512, b"\0")
    names_victim = struct.pack(">I", 0x40000000 // size + 1) + name + struct.pack(">2I", len(name), sum(name)) + sign
    Path(f"{path}-journal").write_bytes(header + names_victim)
    with pytest.raises(StoreError):
        open_store(str(path), read_only=read_only)
    assert victim.read_text() == "precious"


ENDLESS = "WITH RECURSIVE r(seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM r)"


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "statements",
    [
        [
            "ALTER TABLE sessions RENAME TO others",
            f"CREATE VIEW sessions AS {ENDLESS} SELECT seq, 'a' AS id, 1.0 AS created_at, NULL AS metadata FROM r",
        ],
        ["CREATE TRIGGER t AFTER DELETE ON traces BEGIN DELETE FROM sessions; END"],
        ["ALTER TABLE sessions ADD COLUMN made TEXT GENERATED ALWAYS AS (hex(zeroblob(100000000)))"],
        ["CREATE VIRTUAL TABLE found USING fts5(text)"],
    ],
)
def test_store_with_views_or_triggers_is_rejected(tmp_path: Path, statements: list[str], read_only: bool) -> None:
    path = made(tmp_path)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)
    with pytest.raises(StoreError, match="not a table or index"):
        open_store(str(path), read_only=read_only)


@pytest.mark.parametrize("limit", ["_MAX_STEPS", "_MAX_READ_BYTES"])
def test_circular_page_links_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"rllm.store.sqlite.{limit}", 2_000_000)
    path = made(tmp_path, 300)
    size, count, root = pages_of(path)
    data = bytearray(path.read_bytes())
    start = (root - 1) * size
    assert data[start] == 5  # an inner page, with children
    [first] = struct.unpack_from(">H", data, start + 12)
    [child] = struct.unpack_from(">I", data, start + first)
    for page in range(count + 1, count + 9):
        data += inner_page(size, child)
        child = page
    data[start : start + size] = inner_page(size, child)
    data[28:32] = struct.pack(">I", count + 8)
    path.write_bytes(data)
    with open_store(str(path), read_only=True) as store, pytest.raises(StoreError, match=r"traces\.db"):
        store.sessions(limit=10**9)


def inner_page(size: int, child: int, num_cells: int = 600) -> bytes:
    """Return a page of a table that names one child many times: eight levels of them stand for 10^22 rows."""
    cell = struct.pack(">I", child) + b"\x7f"
    place = size - len(cell)
    head = struct.pack(">BHHHBI", 5, 0, num_cells, place, 0, child) + struct.pack(">H", place) * num_cells
    return head.ljust(place, b"\0") + cell
