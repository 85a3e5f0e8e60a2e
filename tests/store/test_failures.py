"""Failures that no store can prevent: killed processes, full disks, lost files. Nothing acknowledged is lost."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from rllm.errors import StoreError
from rllm.store import open_store
from rllm.store.sqlite import SqliteTraceStore
from rllm.types import StepCredit

from .sample_traces import trace_of, turn_of

HERE = str(Path(__file__).parent)

WRITE_UNTIL_KILLED = f"""
import itertools, sys
sys.path.insert(0, {HERE!r})
from rllm.store import open_store
from sample_traces import turn_of

url, attempt, num_sessions = sys.argv[1], sys.argv[2], int(sys.argv[3])

def report(done, name):
    if done.exception() is None:
        print(name, flush=True)

with open_store(url) as store:
    print("ready", flush=True)
    for turn in itertools.count():
        for number in range(num_sessions):
            done = store.add([turn_of(turn, f"{{attempt}}-{{number}}")])
            done.add_done_callback(lambda done, name=f"{{attempt}}-{{number}} {{turn}}": report(done, name))
        done.result()
"""


@pytest.mark.parametrize("num_rounds", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_acknowledged_writes_survive_killing_the_writer(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, num_rounds: int
):
    url = str(tmp_path / "traces.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    rng = random.Random(num_rounds)
    acknowledged: set[tuple[str, int]] = set()
    for attempt in range(num_rounds):
        program = [sys.executable, "-c", WRITE_UNTIL_KILLED, url, str(attempt), str(rng.choice([1, 4, 16]))]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            lines = [process.stdout.readline() for _ in range(rng.randrange(0, 60))]
            time.sleep(rng.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        whole = [
            line.split() for line in lines if line.endswith("\n")
        ]  # the last line may have been truncated by the kill
        acknowledged |= {(session_id, int(turn)) for session_id, turn in whole}
    assert len(acknowledged) > 10 * num_rounds
    with open_store(url) as store:
        for info in store.sessions(limit=10_000):
            stored = store.by_session(info.id)
            assert stored == [turn_of(turn, info.id) for turn in range(len(stored))]
            acknowledged -= {(info.id, turn) for turn in range(len(stored))}
    assert acknowledged == set()


FULL_DISK = """
import random, resource, sys
from rllm.errors import StoreError
from rllm.store import open_store
from rllm.types import Trace

IDS = random.Random(0).choices(range(150_000), k=20_000)  # at least 43 kB

def trace(id):
    return Trace(id=id, call_id=id, session_id="s", model="m", messages=[], response={}, prompt_ids=IDS)

store = open_store(sys.argv[1])
store.add([trace("before")]).result()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
kept, refused = ["before"], []
for k in range(20):
    try:
        store.add([trace(f"during {k}")]).result()
        kept.append(f"during {k}")
    except StoreError as error:
        refused.append(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.add([trace("after")]).result()
kept.append("after")
print(refused[0])
print(sorted(trace.id for trace in store.by_session("s")) == sorted(kept), len(refused) > 5)
store.close()
"""


def test_full_disk_rejects_writes_until_it_has_space(tmp_path: Path):
    output = subprocess.check_output([sys.executable, "-c", FULL_DISK, str(tmp_path / "traces.db")], text=True)
    refused, kept = output.splitlines()
    assert "traces.db" in refused
    assert "check that its disk" in refused or "free some space" in refused
    assert kept == "True True"


def lock(path: Path) -> sqlite3.Connection:
    """Hold the lock of a long write in another process."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


def test_file_locked_for_too_long_fails_only_the_write(tmp_path: Path):
    with SqliteTraceStore(tmp_path / "traces.db", timeout_s=0.05) as store:
        other = lock(store.path)
        with pytest.raises(StoreError, match=r"traces\.db.*locked"):
            store.add([turn_of(0)]).result(timeout=60)
        other.execute("COMMIT")
        other.close()
        # Turn 0 was not written, so the next one does not refer to it.
        store.add([turn_of(1)]).result(timeout=60)
        assert store.by_session("s") == [turn_of(1)]


def delete(path: Path) -> None:
    path.unlink()


def delete_folder(path: Path) -> None:
    for file in path.parent.iterdir():
        file.unlink()


def move(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def replace(path: Path) -> None:
    SqliteTraceStore(path.with_name("other.db")).close()
    path.with_name("other.db").rename(path)


@pytest.mark.parametrize("lose", [delete, delete_folder, move, replace])
def test_file_deleted_while_in_use_is_detected(tmp_path: Path, lose: Callable[[Path], None]):
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        store.add([trace_of("a")]).result()
        lose(store.path)
        with pytest.raises(StoreError, match="deleted, moved or replaced"):
            store.add([trace_of("b")]).result()
        with pytest.raises(StoreError, match="deleted, moved or replaced"):
            store.by_session("s")


def test_agent_that_changes_the_folder_does_not_move_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with SqliteTraceStore("traces.db") as store:
        store.add([trace_of("a")]).result()
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.add([trace_of("b")]).result()
        assert [trace.id for trace in store.by_session("s")] == ["a", "b"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))


@pytest.mark.parametrize("damage", [truncate, scribble])
def test_damaged_file_is_reported(tmp_path: Path, damage: Callable[[Path], None]):
    path = tmp_path / "traces.db"
    with SqliteTraceStore(path) as store:
        for number in range(20):
            store.add([turn_of(number)]).result()
    damage(path)
    with (
        pytest.raises(StoreError, match=r"traces\.db.*malformed.*restore"),
        SqliteTraceStore(path, read_only=True) as store,
    ):
        store.by_session("s")


def test_damaged_metadata_and_credits_are_reported(tmp_path: Path):
    credit = {"episode_id": "t:0", "trajectory_name": "agent", "reward": 1.0, "trainer_logprobs": [-0.5]}
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        store.open_session("s", {"of": "me"}).result()
        store.annotate([StepCredit(session_id="s", trace_id="a", training_step=1, **credit)]).result()
        with closing(sqlite3.connect(store.path)) as other, other:
            other.execute("UPDATE sessions SET metadata = x'00ff'")
            other.execute("UPDATE credits SET trainer_logprobs = x''")
        other.close()
        for read in (store.sessions, partial(store.session, "s"), partial(store.credits, "s")):
            with pytest.raises(StoreError, match="session 's'"):
                read()


def test_manually_changed_blob_is_reported(tmp_path: Path):
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        for number in range(3):
            store.add([turn_of(number)]).result()
        for change in ("document = x'04ffff'", "document = x''", "base = 77"):
            with closing(sqlite3.connect(store.path)) as other, other:
                other.execute(f"UPDATE traces SET {change} WHERE id = 'turn 2'")
            other.close()
            with pytest.raises(StoreError, match="session 's'"):
                store.by_session("s")
