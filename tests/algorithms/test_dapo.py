from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.grpo import DAPO
from rllm.errors import ConfigError

from .values import group_of

SHAPED = DAPO(normalize_std=False, overlong_length=100, overlong_buffer=20)


def test_upper_clip_is_wider_and_all_tokens_weigh_the_same() -> None:
    assert (DAPO().clip_low, DAPO().clip_high, DAPO().aggregation) == (0.2, 0.28, "token-mean")


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0), (101, 1.0), (500, 1.0)]
)
def test_penalty_rises_over_the_buffer(length: int, penalty: float) -> None:
    assert SHAPED.overlong_penalty(length) == pytest.approx(penalty)


def test_overlong_responses_earn_less() -> None:
    group = group_of(1.0, 1.0, 0.0, lengths=[50, 90, 70])
    assert SHAPED.credit(group) == [0.5, 0.0, -0.5], "of rewards 1, 0.5 and 0"
    assert SHAPED.baseline(group) == 0.5


def test_other_penalties_are_kept() -> None:
    assert SHAPED.credit(group_of(1.0, 1.0, lengths=[90, 50], penalties=[0.0, 0.5])) == [0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 200)), min_size=2, max_size=8))
def test_credit_without_length_limit_equals_grpo(rows: list[tuple[float, int]]) -> None:
    group = group_of(*[reward for reward, _ in rows], lengths=[size for _, size in rows])
    assert DAPO(normalize_std=False).credit(group) == [
        pytest.approx(reward - sum(group.rewards) / len(rows), abs=1e-9) for reward in group.rewards
    ]


def test_buffer_may_equal_the_maximum_length() -> None:
    assert DAPO(overlong_length=4, overlong_buffer=4).overlong_penalty(1) == 0.25


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 0.3}, r"algorithm\.clip_high=0\.28: use at least algorithm\.clip_low"),
        ({"overlong_length": 100}, r"algorithm\.overlong_buffer=None: set it together with algorithm\.overlong_length"),
        ({"overlong_buffer": 20}, r"algorithm\.overlong_buffer=20: set it together with algorithm\.overlong_length"),
        ({"overlong_length": 100, "overlong_buffer": 101}, r"algorithm\.overlong_buffer=101: .*overlong_length=100"),
        ({"overlong_length": 100, "overlong_buffer": 0}, r"algorithm\.overlong_buffer=0"),
    ],
)
def test_invalid_settings_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DAPO(**fields)
