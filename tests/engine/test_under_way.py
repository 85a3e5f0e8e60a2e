import logging
from contextlib import ExitStack

import pytest

from rllm.engine.event_loop import UnderWay


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_much_slower_rollout_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    under_way = UnderWay(clock)
    with ExitStack() as slow:
        slow.enter_context(under_way.one("a:0"))
        for _ in range(4):
            with under_way.one("b:0"):
                assert under_way.num_running == 2
                clock.now += 8.0
        clock.now = 40.0  # five times as long as the others
        assert under_way.stuck() == {}
        clock.now = 41.0
        assert under_way.stuck() == {"a:0": 41.0}
        with caplog.at_level(logging.WARNING):
            under_way.warn()
            under_way.warn()
    assert [record.message for record in caplog.records] == [
        "rollout a:0 has been running for 41 s, and others took 8 s: it may be stuck; it is cancelled at rollout.timeout_s"
    ]
    assert (under_way.num_running, under_way.stuck()) == (0, {})


def test_rollouts_need_half_a_minute_and_others_for_comparison_to_be_stuck() -> None:
    clock = Clock()
    under_way = UnderWay(clock)
    with under_way.one("a:0"):
        clock.now = 500.0
        assert under_way.stuck() == {}
        for _ in range(4):
            with under_way.one("b:0"):
                clock.now += 0.1
        with under_way.one("c:0"):
            clock.now += 30.0
            assert set(under_way.stuck()) == {"a:0"}
