import threading

import pytest

from rllm.errors import RLLMError
from rllm.tracking.base import Background


def test_calls_are_made_in_order_and_all_before_closing() -> None:
    received: list[int] = []
    background = Background("test")
    for number in range(5):
        background.do(lambda number=number: received.append(number))  # type: ignore[misc]
    background.close()
    background.close()
    assert received == [0, 1, 2, 3, 4]


def test_background_error_is_raised_by_the_next_call() -> None:
    received: list[str] = []
    background = Background("test")
    background.do(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.close()
    with pytest.raises(ZeroDivisionError):
        background.do(lambda: received.append("later"))
    assert not received


def test_hanging_call_does_not_block_the_caller() -> None:
    begun, free = threading.Event(), threading.Event()
    background = Background("test", max_waiting=2)
    background.do(begun.set)
    background.do(lambda: free.wait(60))
    assert begun.wait(60)
    with pytest.raises(RLLMError, match="does not keep up: 2 calls"):  # noqa: PT012
        for _ in range(3):
            background.do(lambda: None)
    free.set()


def test_closing_waits_for_a_limited_time() -> None:
    free = threading.Event()
    background = Background("test", close_s=0.01)
    background.do(lambda: free.wait(60))
    with pytest.raises(RLLMError, match="did not finish within"):
        background.close()
    free.set()


def test_closing_reports_lost_calls() -> None:
    begun, free = threading.Event(), threading.Event()
    background = Background("test", max_waiting=2, close_s=0.01)
    background.do(lambda: begun.set() or free.wait(60))
    assert begun.wait(60)
    background.do(lambda: None)
    with pytest.raises(RLLMError, match=r"did not finish within 0\.01 s; 2 calls are lost"):
        background.close()
    free.set()
