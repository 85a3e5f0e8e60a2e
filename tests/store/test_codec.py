import datetime
import struct
import zlib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rllm.errors import StoreError
from rllm.store.codec import (
    pack_document,
    pack_floats,
    pack_ids,
    unpack_document,
    unpack_floats,
    unpack_ids,
)

# One strategy for each width, so that every width is tried with every length.
ids = st.one_of(
    *(st.lists(st.integers(0, largest)) for largest in (2**8, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**32 - 1))
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(ids)
def test_ids_come_back_exactly(values: list[int]):
    assert unpack_ids(pack_ids(values)) == values


@pytest.mark.parametrize(
    ("largest", "width"), [(0, 2), (2**16 - 1, 2), (2**18, 3), (2**24 - 1, 3), (2**24, 4), (2**32 - 1, 4)]
)
def test_ids_take_as_many_bytes_as_the_largest_needs(largest: int, width: int):
    blob = pack_ids([1, largest, 2])
    assert blob == bytes([width]) + b"".join(value.to_bytes(width, "little") for value in (1, largest, 2))


def test_ids_of_most_vocabularies_take_eighteen_bits():
    # Low bytes, middle bytes, and the highest two bits of all four in one byte: 0, 1, 3, 2 from the lowest up.
    assert pack_ids([1, 2**16, 2**18 - 1, 2**17]) == b"\x05" + b"\1\0\xff\0" + b"\0\0\xff\0" + bytes([0b10_11_01_00])


def test_many_ids_are_compressed_where_that_makes_them_smaller():
    assert len(pack_ids([70_000, 80_000] * 500)) < 100
    even = [(k * 99_991) % 150_000 for k in range(1000)]
    assert len(pack_ids(even)) == 1 + 2250
    assert unpack_ids(pack_ids(even)) == even
    assert unpack_ids(pack_ids([70_000, 80_000] * 500)) == [70_000, 80_000] * 500


def test_what_the_first_version_wrote_is_read():
    assert unpack_ids(b"\x03\x01\x00\x00\x00\x00\x01") == [1, 65_536]
    assert unpack_document(b"\x02" + zlib.compress(b'{"a":1}')) == {"a": 1}


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_ids_that_are_no_ids_are_refused(bad: Any):
    with pytest.raises(StoreError, match="whole numbers from 0"):
        pack_ids([1, bad])


@given(st.lists(st.floats()) | st.lists(st.floats(width=32)) | st.lists(st.floats(-2, 0, width=32), min_size=65))
@settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.too_slow])
def test_floats_come_back_bit_for_bit(values: list[float]):
    back = unpack_floats(pack_floats(values))
    assert struct.pack(f"{len(back)}d", *back) == struct.pack(f"{len(values)}d", *values)


@pytest.mark.parametrize(("values", "width"), [([-0.5, 0.0], 4), ([-0.1, -0.5], 8), ([1e300], 8)])
def test_floats_take_four_bytes_where_that_loses_nothing(values: list[float], width: int):
    assert len(pack_floats(values)) == 1 + width * len(values)


def test_the_few_exponents_of_many_floats_take_half_a_byte():
    # -0.5 and -0.25 begin with 0xbf and 0xbe: two different heads.
    assert len(pack_floats([-0.5, -0.25, -0.5] * 67)) == 1 + 4 + 3 * 201 + 101 + 2
    assert len(pack_floats([2.0 ** (k % 120) for k in range(200)])) == 1 + 4 * 200  # 60 different heads


@given(json_values)
def test_documents_come_back_exactly(value: Any):
    back = unpack_document(pack_document(value))
    assert back == value
    assert repr(back) == repr(value)


def test_a_long_document_is_compressed_and_a_short_one_is_not():
    assert len(pack_document("word " * 1000)) < 200
    assert pack_document("word") == b'\x00"word"'


class Answer(BaseModel):
    value: int


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({3}, [3]),
        ((1, 2), [1, 2]),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
        (Path("a/b"), "a/b"),
        (Answer(value=4), {"value": 4}),
        (ValueError("bad"), "bad"),
        (Hostile(), "<Hostile>"),
        ({1: "int key", None: "null key"}, {"1": "int key", "null": "null key"}),
        ({("a", 1): np.int64(5)}, {"('a', 1)": 5}),
        ({"big": 2**70, "of": {2}, "hostile": Hostile()}, {"big": 2**70, "of": [2], "hostile": "<Hostile>"}),
        ("half \ud83e surrogate", "half \ud83e surrogate"),
        ([float("nan"), float("-inf")], [None, None]),
        ([float("nan"), float("-inf"), 2**70], [None, None, 2**70]),
    ],
)
def test_values_that_json_cannot_hold_are_kept_as_the_nearest_that_it_can(value: Any, kept: Any):
    assert unpack_document(pack_document({"v": value})) == {"v": kept}


def test_circular_and_very_deep_values_end_somewhere():
    circular: dict[str, Any] = {"n": 1}
    circular["self"] = circular
    assert unpack_document(pack_document(circular))["self"]["self"]["n"] == 1
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert unpack_document(pack_document(deep))[0][0] != []
