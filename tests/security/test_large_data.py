"""An attacker writes traces, batches and bodies that are small and expand to more than fits into memory."""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from rllm._runtime.untrusted import TooLargeError, check_values, parse_json, unpack_zlib
from rllm.data.sources import read_file
from rllm.errors import ConfigError, StoreError
from rllm.parser.tool_json import arguments_json
from rllm.parser.tool_parser import tool_parser
from rllm.store import codec, open_store
from rllm.types import Trace
from rllm.viewer.batches import read_batch

MEGABYTE = 1024 * 1024


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """Limit the memory of Python's objects."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * MEGABYTE
    finally:
        tracemalloc.stop()


def zstd_bomb(megabytes: int, *, claimed: int | None = -1) -> bytes:
    """Return compressed zeros that claim to hold `claimed` bytes: by default the true number, with `None` unknown."""
    size = megabytes * MEGABYTE
    frame = zstandard.ZstdCompressor(level=1, write_content_size=claimed is not None).compress(bytes(size))
    assert frame.count(size.to_bytes(4, "little")) == (claimed is not None)
    return frame if claimed in (None, -1) else frame.replace(size.to_bytes(4, "little"), claimed.to_bytes(4, "little"))


def bomb(megabytes: int) -> bytes:
    """Return compressed zeros: about a kilobyte for each megabyte."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY)
    return b"".join(compressor.compress(bytes(MEGABYTE)) for _ in range(megabytes)) + compressor.flush()


def trace(name: str, session: str) -> Trace:
    return Trace(id=name, call_id=name, session_id=session, model="m", messages=[], response={"role": "assistant"})


def test_stream_is_decompressed_up_to_its_limit() -> None:
    with at_most(4), pytest.raises(TooLargeError):
        unpack_zlib(bomb(64), limit=MEGABYTE)
    with pytest.raises(ValueError, match="truncated"):
        unpack_zlib(zlib.compress(b"x" * 100)[:-6])
    assert unpack_zlib(zlib.compress(b"x" * 100), limit=100) == b"x" * 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (b"[" + b"[]," * 1_500_000 + b"[]]", True),
        (b"[" + b'{"a":1},' * 600_000 + b"1]", True),
        (b"[" + b"1," * 3_000_000 + b"1]", True),
        (b'["' + b'[],{}\\",' * 2_000_000 + b'"]', False),  # brackets inside of a string
        (b'["a\\\\",' + b'"\\\\",' * 1_000_000 + b'"["]', False),
        (b"[" + b"[]," * 500_000 + b"[]]", False),
    ],
)
def test_values_count_towards_the_limit_and_text_does_not(text: bytes, refused: bool) -> None:
    if refused:
        with at_most(100), pytest.raises(TooLargeError):
            parse_json(text)
    else:
        check_values(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "make_blob"),
    [
        ("document", lambda: bytes([0x80]) + zstd_bomb(300)),
        ("document", lambda: bytes([0x80]) + zstd_bomb(300, claimed=1000)),
        ("document", lambda: bytes([0x80]) + zstandard.compress(b'{"messages":[' + b"[]," * 12_000_000 + b"[]]}", 1)),
        ("document", lambda: bytes([0x80]) + zstandard.compress(b"{}", 1)[:-2]),
        ("document", lambda: bytes([0x80]) + zstandard.compress(b'{"messages":[]}', 1) * 2),
        ("document", lambda: bytes([1]) + b"[" * 100_000),
        ("document", lambda: bytes([1]) + b"9" * 100_000),
        ("prompt_ids", lambda: bytes([0x84]) + zstd_bomb(80)),
        ("response_ids", lambda: bytes([0x84]) + zstd_bomb(80, claimed=None)),
        ("logprobs", lambda: bytes([0x84]) + b"\xff\xff\xff\x7f"),
        ("logprobs", lambda: bytes([7]) + b"1234567"),
        ("document", lambda: b'\0"text"'),
        ("document", lambda: b'\0{"messages":5}'),
    ],
)
def test_row_that_decompresses_beyond_the_limit_is_reported(
    tmp_path: Path, column: str, make_blob: Callable[[], bytes]
) -> None:
    url = str(tmp_path / "traces.db")
    with open_store(url) as store:
        store.add([trace("harmless", "other")]).result(60)
        store.add([trace("planted", "hostile")]).result(60)
    with closing(sqlite3.connect(url)) as database, database:
        database.execute(f"UPDATE traces SET {column} = ? WHERE id = 'planted'", (make_blob(),))
    with open_store(url, read_only=True) as store:
        with at_most(400), pytest.raises(StoreError, match=r"'hostile'.*'planted'"):
            store.by_session("hostile")
        assert [trace.id for trace in store.by_session("other")] == ["harmless"]


def test_shared_rows_count_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.store.rows._MAX_SESSION_BYTES", 50_000_000)
    url = str(tmp_path / "traces.db")
    ids = codec.pack_ids(codec.ids_to_bytes([7] * 500_000))
    shared = codec.pack_document({"messages": [], "response": {}, "shared": [500_000, 0, []]})
    with open_store(url) as store:
        store.add([trace(f"call-{number:03}", "hostile") for number in range(60)]).result(60)
    with closing(sqlite3.connect(url)) as database, database:
        first, *others = [seq for (seq,) in database.execute("SELECT seq FROM traces ORDER BY seq")]
        database.execute("UPDATE traces SET prompt_ids = ? WHERE seq = ?", (ids, first))
        database.executemany(
            "UPDATE traces SET base = ?, document = ? WHERE seq = ?", [(first, shared, n) for n in others]
        )
    with open_store(url, read_only=True) as store, pytest.raises(StoreError, match=r"at call 'call-0\d\d'"):
        store.by_session("hostile")


def packed(data: bytes, kind: str = "i4") -> dict[str, str]:
    return {"kind": kind, "data": b64encode(data).decode()}


@pytest.mark.parametrize(
    "expected",
    [
        {"ids": packed(bomb(100)), "num_tokens": 100 * MEGABYTE // 4},
        {"ids": packed(zlib.compress(b"1234")[:-5]), "num_tokens": 1},
        {"ids": packed(b"no zlib"), "num_tokens": 1},
        {"ids": packed(zlib.compress(b"12345")), "num_tokens": 1},
        {"ids": packed(zlib.compress(b"1234"), "i8"), "num_tokens": 1},
    ],
)
def test_batch_that_decompresses_beyond_the_limit_is_reported(tmp_path: Path, expected: dict[str, Any]) -> None:
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches/step-000001.json").write_text(
        json.dumps({"step": 1, "sequences": [], "tokens": {}, **expected})
    )
    with at_most(150), pytest.raises(StoreError, match=r"step-000001.json"):
        read_batch(tmp_path, 1)


def test_circular_schema_references_end() -> None:
    double = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}] * 9}
    schema = {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {**double, "type": "integer"}, "b": double}}
    assert arguments_json({"x": "5"}, schema) == '{"x": 5}'
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(5_000):
        deep = {"anyOf": [deep]}
    assert arguments_json({"x": "5"}, {"properties": {"x": deep}}) == '{"x": "5"}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "argument", ["9" * 100_000, "[" * 100_000, '{"a":' * 100_000, "-" + "9" * 5_000, "1e999999999"]
)
def test_arguments_of_any_size_are_parsed(argument: str) -> None:
    text = f"<function=f>\n<parameter=x>\n{argument}\n</parameter>\n</function>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}}
    [call] = tool_parser("qwen3_coder").for_tools([tool]).parse(text).tool_calls
    assert argument in call["function"]["arguments"].replace("\\", "")
    for name in ("hermes", "llama3_json", "mistral"):
        assert not tool_parser(name).parse(f'{{"name": "f", "arguments": {{"x": {argument}').tool_calls


@pytest.mark.slow
def test_table_that_repeats_a_long_text_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = pyarrow.array(["x" * 100_000]).dictionary_encode().take(pyarrow.array([0] * 4_000))
    parquet.write_table(pyarrow.table({"question": text}), tmp_path / "tasks.parquet")
    monkeypatch.setattr("rllm.data.sources._MUCH_DATA", MEGABYTE)
    with pytest.raises(ConfigError, match=r"tasks\.parquet unpacks to more than"):
        read_file(tmp_path / "tasks.parquet")


def test_rows_without_columns_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr("rllm.data.sources._MANY_ROWS", 1_000)
    parquet.write_table(pyarrow.table({"question": ["again"] * 100_000}), tmp_path / "tasks.parquet")
    with pytest.raises(ConfigError, match=r"tasks\.parquet has 100,000 rows"):
        read_file(tmp_path / "tasks.parquet")
