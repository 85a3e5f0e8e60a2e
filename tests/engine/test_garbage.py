"""Python searches for garbage less often while rollouts are under way, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rllm.engine.garbage import THRESHOLDS, rarely_collected
from rllm.engine.runner import Attempt, RolloutRunner
from rllm.types import Episode


@pytest.fixture(autouse=True)
def pythons_own() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_it_lasts_until_the_outermost_ends() -> None:
    with rarely_collected():
        with rarely_collected():
            pass
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)


def test_what_a_program_has_chosen_stays() -> None:
    gc.set_threshold(0)
    with rarely_collected():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


async def test_rollouts_are_inside() -> None:
    seen = []

    class Looks:
        async def rollout(self, attempt: Attempt) -> Episode:
            seen.append(gc.get_threshold())
            return Episode(task=attempt.task)

    await RolloutRunner(Looks()).run([Attempt(task={}, task_id="a")])
    assert seen == [THRESHOLDS]
    assert gc.get_threshold() == (700, 10, 10)
