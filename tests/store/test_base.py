"""Functions that work with any store."""

from __future__ import annotations

from rllm.store.base import every_session
from rllm.store.memory import MemoryTraceStore


def test_all_sessions_are_read_over_several_pages() -> None:
    names = [f"s{number:03d}" for number in range(600)]
    with MemoryTraceStore() as store:
        for name in names:
            store.open_session(name, {}).result(60)
        assert [info.id for info in every_session(store, oldest_first=True)] == names
        assert [info.id for info in every_session(store)] == names[::-1]
