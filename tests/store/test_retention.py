import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from rllm.errors import ConfigError, StoreError
from rllm.store import TraceStore, open_store
from rllm.store.maintenance import Pruned, Retention, prune, pruning

from .sample_traces import trace_of

DAY_S = 86_400


@pytest.fixture(params=["memory:", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path):
    with open_store("memory:" if request.param == "memory:" else str(tmp_path / "traces.db")) as store:
        yield store


def begin(store: TraceStore, name: str, *, days_ago: float, last_call_days_ago: float | None = None) -> None:
    now = time.time()
    store.open_session(name, {}, created_at=now - days_ago * DAY_S).result()
    called = now - (days_ago if last_call_days_ago is None else last_call_days_ago) * DAY_S
    # 22,500 bytes, which cannot be compressed
    ids = [(k * 99_991 + len(name)) % 150_000 for k in range(10_000)]
    store.add([trace_of("a", name, started_at=called, prompt_ids=ids)]).result()


def names(store: TraceStore) -> list[str]:
    return [info.id for info in store.sessions(oldest_first=True)]


def test_sessions_expire_days_after_their_last_call(store: TraceStore):
    begin(store, "old", days_ago=9)
    begin(store, "old and in use", days_ago=9, last_call_days_ago=1)
    begin(store, "older", days_ago=30)
    begin(store, "new", days_ago=1)
    assert prune(store, Retention(keep_days=7)) == Pruned(num_sessions=2, num_traces=2)
    assert names(store) == ["old and in use", "new"]


def test_damaged_session_is_pruned_like_others(tmp_path: Path):
    path = tmp_path / "traces.db"
    with open_store(path) as store:
        begin(store, "damaged", days_ago=9)
        begin(store, "old", days_ago=9)
        with closing(sqlite3.connect(path)) as database:
            database.execute("UPDATE traces SET document = x'ff' WHERE seq = 1")
            database.commit()
        with pytest.raises(StoreError):
            store.by_session("damaged")
        assert prune(store, Retention(keep_days=7)) == Pruned(num_sessions=2, num_traces=2)


def test_oldest_sessions_are_pruned_until_the_size_fits(store: TraceStore):
    for number in range(12):
        begin(store, f"{number:02}", days_ago=20 - number)
    before = store.num_bytes()
    pruned = prune(store, Retention(max_gb=before / 2 / 1e9))
    assert store.num_bytes() <= before / 2
    assert 6 <= pruned.num_sessions <= 9
    assert names(store) == [f"{number:02}" for number in range(pruned.num_sessions, 12)]


@pytest.mark.parametrize("retention", [Retention(keep_days=7), Retention(max_gb=1e-9)])
def test_pruning_stops_soon_when_asked(store: TraceStore, retention: Retention):
    for number in range(300):
        store.open_session(f"{number}", {}, created_at=1.0)
    store.add([trace_of(session_id="299", started_at=1.0)]).result()
    asked = iter([False, True])
    assert prune(store, retention, is_over=lambda: next(asked)).num_sessions == 256
    assert len(store.sessions(limit=300)) == 44


def test_session_in_use_is_kept_at_any_size(store: TraceStore):
    begin(store, "in use", days_ago=3, last_call_days_ago=0)
    begin(store, "unused", days_ago=2)
    assert prune(store, Retention(max_gb=1e-6)).num_sessions == 1
    assert names(store) == ["in use"]


def test_old_session_added_late_is_pruned(store: TraceStore):
    for number in range(300):
        store.open_session(f"young {number}", {})
    begin(store, "copied", days_ago=9)
    assert prune(store, Retention(keep_days=7)).num_sessions == 1
    assert len(store.sessions(limit=1000)) == 300


def test_everything_is_kept_without_limits(store: TraceStore):
    begin(store, "old", days_ago=900)
    assert not Retention()
    assert prune(store, Retention()) == Pruned()
    assert names(store) == ["old"]


def test_background_thread_prunes_periodically(store: TraceStore):
    begin(store, "old", days_ago=9)
    with pruning(store, Retention(keep_days=7), every_s=0.01):
        deadline = time.monotonic() + 60
        for name in ("another", "a third"):
            # At once: what is added to a session that was just deleted begins a new one.
            store.open_session(name, {}, created_at=time.time() - 8 * DAY_S).result()
            while name in names(store) or "old" in names(store):
                assert time.monotonic() < deadline
                time.sleep(0.005)


@pytest.mark.parametrize("limits", [{"keep_days": 0}, {"keep_days": -1.0}, {"max_gb": 0}, {"max_gb": float("nan")}])
def test_limits_that_keep_nothing_are_rejected(limits: dict[str, float]):
    [name] = limits
    with pytest.raises(ConfigError, match=rf"{name}=.*: use a number above 0"):
        Retention(**limits)
