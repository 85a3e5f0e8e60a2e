from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rllm.data.dataset import _order, more_tasks_of_step, tasks_of_step


def taken(num_steps: int, *, num_tasks: int, per_step: int, seed: int = 0) -> list[int]:
    steps = (tasks_of_step(step, num_tasks=num_tasks, per_step=per_step, seed=seed) for step in range(num_steps))
    return [row for rows in steps for row in rows]


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_every_task_comes_once_an_epoch(num_tasks: int, per_step: int, seed: int) -> None:
    rows = taken(num_tasks * 2, num_tasks=num_tasks, per_step=per_step, seed=seed)
    assert len(rows) == num_tasks * 2 * per_step
    for epoch in range(2 * per_step):
        assert sorted(rows[epoch * num_tasks : (epoch + 1) * num_tasks]) == list(range(num_tasks))


@given(st.integers(0, 100))
def test_a_step_is_a_function_of_seed_and_step_alone(step: int) -> None:
    first = tasks_of_step(step, num_tasks=50, per_step=7, seed=1)
    _order.cache_clear()
    assert tasks_of_step(step, num_tasks=50, per_step=7, seed=1) == first


def test_the_order_is_the_same_on_every_machine() -> None:
    assert tasks_of_step(0, num_tasks=6, per_step=6, seed=0) == [2, 3, 1, 0, 5, 4]


def test_epochs_and_seeds_differ() -> None:
    first, second = (taken(1, num_tasks=40, per_step=80)[part * 40 :][:40] for part in range(2))
    assert first != second
    assert first != taken(1, num_tasks=40, per_step=40, seed=1)


def test_a_step_may_take_more_than_there_are() -> None:
    assert Counter(taken(1, num_tasks=3, per_step=7)).most_common()[0][1] == 3


def more(num_drawn: int, *, num_tasks: int, count: int, seed: int = 0) -> list[int]:
    return more_tasks_of_step(3, num_tasks=num_tasks, per_step=4, num_drawn=num_drawn, count=count, seed=seed)


def test_more_tasks_differ_from_those_of_the_step() -> None:
    own = tasks_of_step(3, num_tasks=20, per_step=4, seed=0)
    assert sorted(own + more(0, num_tasks=20, count=16)) == list(range(20))
    assert set(more(0, num_tasks=5, count=9)) == set(range(5)) - set(tasks_of_step(3, num_tasks=5, per_step=4, seed=0))
    assert sorted(more(0, num_tasks=4, count=4)) == [0, 1, 2, 3]


def test_a_later_round_goes_on_where_the_one_before_ended() -> None:
    assert more(0, num_tasks=20, count=7) + more(7, num_tasks=20, count=9) == more(0, num_tasks=20, count=16)


def test_more_tasks_are_drawn_anew_with_each_seed() -> None:
    first = more(0, num_tasks=40, count=9)
    assert first == more(0, num_tasks=40, count=9)
    assert first != sorted(first)
    assert first != more(0, num_tasks=40, count=9, seed=1)
