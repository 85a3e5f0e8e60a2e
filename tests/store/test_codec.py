import datetime
import struct
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
    floats_to_bytes,
    ids_to_bytes,
    pack_document,
    pack_floats,
    pack_ids,
    readable_json,
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


def packed_ids(values: list[int]) -> bytes:
    return pack_ids(ids_to_bytes(values))


@given(ids)
def test_ids_round_trip_exactly(values: list[int]):
    assert unpack_ids(packed_ids(values)) == values


def test_many_ids_are_compressed():
    even = [(k * 99_991) % 150_000 for k in range(1000)]
    assert len(packed_ids(even)) < 2600
    assert len(packed_ids([70_000, 80_000] * 500)) < 100


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_invalid_ids_are_rejected(bad: Any):
    with pytest.raises(StoreError, match="4294967295"):
        ids_to_bytes([1, bad])


@given(st.lists(st.floats()) | st.lists(st.floats(width=32)) | st.lists(st.floats(-2, 0, width=32), min_size=65))
@settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.too_slow])
def test_floats_round_trip_bit_for_bit(values: list[float]):
    back = unpack_floats(pack_floats(floats_to_bytes(values)))
    assert struct.pack(f"{len(back)}d", *back) == struct.pack(f"{len(values)}d", *values)


@pytest.mark.parametrize(("values", "width"), [([-0.5, 0.0], 4), ([-0.1, -0.5], 8), ([1e300], 8)])
def test_floats_use_four_bytes_if_that_is_lossless(values: list[float], width: int):
    assert len(pack_floats(floats_to_bytes(values))) == 1 + width * len(values)


@given(json_values)
def test_documents_round_trip_exactly(value: Any):
    back = unpack_document(pack_document(value))
    assert back == value
    assert repr(back) == repr(value)


def test_long_document_is_compressed_and_a_short_one_is_not():
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
def test_values_without_json_type_become_the_nearest_one(value: Any, kept: Any):
    assert unpack_document(pack_document({"v": value})) == {"v": kept}


def test_circular_and_very_deep_values_are_truncated():
    circular: dict[str, Any] = {"n": 1}
    circular["self"] = circular
    assert unpack_document(pack_document(circular)) == {"n": 1, "self": "<dict>"}
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert unpack_document(pack_document(deep))[0][0] != []


def test_arrays_dates_and_bytes_are_readable() -> None:
    value = {
        "number": np.float32(0.1),
        "array": np.arange(3),
        "moment": np.datetime64("2020-01-01T00:00:00", "ns"),
        "image": b"x" * 1_000_000,
    }
    text = readable_json(value).decode()
    assert text.startswith('{"number":0.1,"array":[0,1,2],"moment":"2020-01-01T00:00:00"')
    assert "1000000 bytes, sha256" in text
    assert len(text) < 400
