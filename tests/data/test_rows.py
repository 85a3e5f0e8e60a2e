from __future__ import annotations

import json
from collections import OrderedDict
from datetime import date
from typing import Any

import numpy as np
import pytest

from rllm.data.rows import json_value
from rllm.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.str_("a"), "a"),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["a", None], dtype=object), ["a", None]),
        ((1, (2, "x")), [1, [2, "x"]]),
        (OrderedDict(a=np.float64(1.5)), {"a": 1.5}),
    ],
)
def test_values_become_plain_python(value: Any, kept: Any) -> None:
    plain = json_value(value, "it")
    assert plain == kept
    assert json.loads(json.dumps(plain)) == kept
    assert type(plain) is type(kept)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"at": [date(2026, 1, 2)]},
            r"row 3\.at\[0\] .*'date'",
        ),
        ({"a": {1: "x"}}, r"row 3\.a has the key 1: JSON has only text for keys, so use '1'"),
        ({"image": b"\x00"}, r"row 3\.image is b'.x00'"),
        ({"choice": {1, 2}}, "'set'"),
    ],
)
def test_lossy_values_are_rejected(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        json_value(value, "row 3")
