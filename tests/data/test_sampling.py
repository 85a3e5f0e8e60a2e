"""Tasks of a step: epochs, weights of sources, and sampling by recorded success rates."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.config.schema import DataConfig
from rllm.data.dataset import Dataset
from rllm.data.sampling import Record, TaskSampler, _order, apportioned, by_difficulty, easy_first
from rllm.errors import ConfigError, PluginError
from rllm.types import Task


def numbers(num_tasks: int, name: str | None = None) -> Dataset:
    return Dataset([{"number": number} for number in range(num_tasks)], name=name)


def sampler_of(
    data: Dataset | int,
    *,
    per_step: int,
    seed: int = 0,
    delay: int = 0,
    records: Mapping[str, Sequence[Record]] | None = None,
    **settings: Any,
) -> TaskSampler:
    data = numbers(data) if isinstance(data, int) else data
    return TaskSampler(data, DataConfig(**settings), seed=seed, per_step=per_step, delay=delay, records=records)


def taken(num_steps: int, *, num_tasks: int, per_step: int, seed: int = 0) -> list[int]:
    sampler = sampler_of(num_tasks, per_step=per_step, seed=seed)
    return [row for step in range(num_steps) for row in sampler.tasks_of_step(step)]


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_each_task_is_sampled_once_per_epoch(num_tasks: int, per_step: int, seed: int) -> None:
    rows = taken(num_tasks * 2, num_tasks=num_tasks, per_step=per_step, seed=seed)
    assert len(rows) == num_tasks * 2 * per_step
    for epoch in range(2 * per_step):
        assert sorted(rows[epoch * num_tasks : (epoch + 1) * num_tasks]) == list(range(num_tasks))


@given(st.integers(0, 100))
def test_step_depends_only_on_seed_and_step(step: int) -> None:
    first = sampler_of(50, per_step=7, seed=1).tasks_of_step(step)
    _order.cache_clear()
    assert sampler_of(50, per_step=7, seed=1).tasks_of_step(step) == first


def test_order_is_the_same_on_every_machine() -> None:
    assert sampler_of(6, per_step=6).tasks_of_step(0) == [2, 3, 1, 0, 5, 4]


def test_epochs_and_seeds_differ() -> None:
    first, second = (taken(1, num_tasks=40, per_step=80)[part * 40 :][:40] for part in range(2))
    assert first != second
    assert first != taken(1, num_tasks=40, per_step=40, seed=1)


def test_step_may_need_more_tasks_than_exist() -> None:
    assert Counter(taken(1, num_tasks=3, per_step=7)).most_common()[0][1] == 3


def more(num_drawn: int, *, num_tasks: int, count: int, seed: int = 0) -> list[int]:
    return sampler_of(num_tasks, per_step=4, seed=seed).more_tasks_of_step(3, num_drawn=num_drawn, count=count)


def test_more_tasks_differ_from_those_of_the_step() -> None:
    own = sampler_of(20, per_step=4).tasks_of_step(3)
    assert sorted(own + more(0, num_tasks=20, count=16)) == list(range(20))
    assert set(more(0, num_tasks=5, count=9)) == set(range(5)) - set(sampler_of(5, per_step=4).tasks_of_step(3))
    assert sorted(more(0, num_tasks=4, count=4)) == [0, 1, 2, 3]


def test_later_round_continues_the_previous_one() -> None:
    assert more(0, num_tasks=20, count=7) + more(7, num_tasks=20, count=9) == more(0, num_tasks=20, count=16)


def test_more_tasks_depend_on_the_seed() -> None:
    first = more(0, num_tasks=40, count=9)
    assert first == more(0, num_tasks=40, count=9)
    assert first != sorted(first)
    assert first != more(0, num_tasks=40, count=9, seed=1)


# Several datasets


MIXED = Dataset.concatenate([numbers(10, "math"), numbers(4, "code"), numbers(3, "math")])


def test_rows_of_several_datasets_keep_their_source() -> None:
    assert MIXED.sources == ["math", "code", "math-2"]
    assert [MIXED.task_id(row) for row in (0, 10, 13, 14)] == ["math/0", "code/0", "code/3", "math-2/0"]
    assert [MIXED.shuffle(1).source_of(row) for row in range(17)].count("code") == 4
    assert {MIXED.shuffle(1).task_id(row) for row in range(17)} == {MIXED.task_id(row) for row in range(17)}
    assert numbers(3, "math").source_of(0) is None


def test_shares_follow_the_weights_and_each_source_has_its_epochs() -> None:
    sampler = sampler_of(MIXED, per_step=10, weights=[5, 3, 2])
    steps = [sampler.tasks_of_step(step) for step in range(4)]
    shares = [Counter(MIXED.source_of(row) for row in rows) for rows in steps]
    assert shares == 4 * [{"math": 5, "code": 3, "math-2": 2}]
    assert sorted(row for rows in steps[:2] for row in rows if row < 10) == list(range(10)), "one epoch of math"
    assert steps[0] != sorted(steps[0]), "sources are mixed within a step"


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 400))
def test_apportionment_is_monotonic_and_near_the_weights(weights: list[float], num_places: int) -> None:
    now, then = apportioned(num_places, weights), apportioned(num_places + 1, weights)
    assert sum(now) == num_places
    assert sorted(after - before for before, after in zip(now, then, strict=True)) == [0] * (len(weights) - 1) + [1]
    for number, weight in zip(now, weights, strict=True):
        assert abs(number - num_places * weight / sum(weights)) < len(weights)


@pytest.mark.parametrize(
    ("data", "weights"), [(MIXED, [0.7, 0.3]), (numbers(3), [1.0]), (Dataset.concatenate([numbers(3)]), [1.0])]
)
def test_mismatched_weights_are_rejected(data: Dataset, weights: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"data\.weights"):
        sampler_of(data, per_step=2, weights=weights)


# By outcomes


def test_weights_match_hand_computed_values() -> None:
    rates = [None, 0.0, 0.25, 0.5, 1.0]
    assert by_difficulty([], rates, 0) == [1.0, 0.05, 0.75, 1.0, 0.05]
    assert easy_first([], [0.0, 0.5, None, 1.0], 0) == pytest.approx([0.05, math.sqrt(0.05), math.sqrt(0.05), 0.05])
    assert easy_first([], [0.9], 0)[0] > 0.5


def test_always_or_never_solved_tasks_are_sampled_less() -> None:
    sampler = sampler_of(40, per_step=8, sampling="difficulty")
    sampler.record(0, {str(task): 0.5 if task < 20 else float(task % 2) for task in range(40)})
    counts = Counter(row < 20 for step in range(1, 51) for row in sampler.tasks_of_step(step))
    assert counts[True] > 5 * counts[False] > 0
    assert len(set(sampler.tasks_of_step(1))) == 8


def test_easiest_unsolved_tasks_come_first() -> None:
    sampler = sampler_of(40, per_step=8, sampling="easy_first")
    sampler.record(0, {str(task): [1.0, 0.9, 0.1, 0.0][task // 10] for task in range(40)})
    counts = Counter(row // 10 for step in range(1, 51) for row in sampler.tasks_of_step(step))
    assert counts.most_common(1)[0][0] == 1
    assert counts[1] > 4 * counts[2]


def test_sampling_starts_uniform() -> None:
    sampler = sampler_of(20, per_step=5, sampling="difficulty")
    assert [sampler.tasks_of_step(step) for step in range(4)] == [
        sampler_of(20, per_step=5).tasks_of_step(step) for step in range(4)
    ]
    assert "uniform" in " ".join(sampler.in_words())


def test_step_uses_only_outcomes_available_to_its_rollouts() -> None:
    """With rollouts two steps ahead, step 3 may begin when step 0 is done; it ignores later outcomes."""
    early, late = (sampler_of(20, per_step=5, sampling="difficulty", delay=2) for _ in range(2))
    for sampler in (early, late):
        sampler.record(0, {str(task): 0.0 for task in range(10)})
    late.record(1, {str(task): 0.5 for task in range(10)})
    assert early.tasks_of_step(3) == late.tasks_of_step(3)
    assert early.tasks_of_step(4) != late.tasks_of_step(4)


def test_restored_records_give_the_same_tasks() -> None:
    whole = sampler_of(30, per_step=6, sampling="difficulty", delay=1)
    for step in range(5):
        whole.record(step, {str(row): row % 4 / 3 for row in whole.tasks_of_step(step)})
    resumed = sampler_of(30, per_step=6, sampling="difficulty", delay=1, records=json.loads(json.dumps(whole.records)))
    assert max(map(len, whole.records.values())) <= 2, "older rates than a step may need are forgotten"
    for step in range(5, 9):
        assert whole.tasks_of_step(step) == resumed.tasks_of_step(step)
        for sampler in (whole, resumed):
            sampler.record(step, {str(row): row % 3 / 2 for row in sampler.tasks_of_step(step)})
    assert whole.more_tasks_of_step(9, num_drawn=0, count=4) == resumed.more_tasks_of_step(9, num_drawn=0, count=4)


def test_sampling_by_outcomes_keeps_the_weights_of_sources() -> None:
    sampler = sampler_of(MIXED, per_step=10, weights=[5, 3, 2], sampling="difficulty")
    sampler.record(0, {MIXED.task_id(row): 0.0 for row in range(5)})
    shares = Counter(MIXED.source_of(row) for row in sampler.tasks_of_step(1))
    assert shares == {"math": 5, "code": 3, "math-2": 2}
    assert len(sampler.more_tasks_of_step(1, num_drawn=0, count=5)) == 5


# A user's function


def even_ones(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[bool]:
    return [task["number"] % 2 == step % 2 for task in tasks]


def nothing(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> None: ...


def too_few(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[float]:
    return [1.0]


def not_a_number(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[float]:
    return [math.nan for _ in tasks]


def no_task(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[float]:
    return [0.0 for _ in tasks]


def raising(tasks: Sequence[Task], rates: Sequence[float | None], step: int) -> list[float]:
    raise KeyError("level")


def test_sampling_function_of_the_user_is_used() -> None:
    sampler = sampler_of(10, per_step=3, sampling=f"{__name__}:even_ones")
    assert [{row % 2 for row in sampler.tasks_of_step(step)} for step in range(3)] == [{0}, {1}, {0}]
    assert Counter(sampler_of(4, per_step=5, sampling=f"{__name__}:even_ones").tasks_of_step(0)).keys() == {0, 2}


@pytest.mark.parametrize("function", [nothing, too_few, not_a_number, no_task])
def test_invalid_return_value_of_the_function_is_reported(function: Any) -> None:
    sampler = sampler_of(10, per_step=3, sampling=f"{__name__}:{function.__name__}")
    with pytest.raises(ConfigError, match=rf"data\.sampling=.*{function.__name__}"):
        sampler.tasks_of_step(0)


def test_error_in_the_function_is_reported() -> None:
    with pytest.raises(PluginError, match="raising raised KeyError"):
        sampler_of(10, per_step=3, sampling=f"{__name__}:raising").tasks_of_step(0)


def test_unknown_sampling_method_error_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'difficulty'"):
        sampler_of(10, per_step=3, sampling="dificulty")
