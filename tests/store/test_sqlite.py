import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, StoreError
from rllm.store.schema import APPLICATION_ID, MIGRATIONS, migrate, open_for_writing
from rllm.store.sqlite import SqliteTraceStore
from rllm.types import StepCredit, Trace


def trace_of(id: str = "a", session_id: str = "s", **changes: Any) -> Trace:
    values: dict[str, Any] = {"model": "m", "messages": [], "response": {}, "prompt_ids": [1], "response_ids": [2]}
    return Trace(id=id, call_id=id, session_id=session_id, **(values | changes))


def test_a_file_is_created_with_its_folders_and_outlives_the_store(tmp_path: Path):
    path = tmp_path / "new" / "folder with #? %20" / "traces.db"
    with SqliteTraceStore(path) as store:
        store.add([trace_of()])
    with SqliteTraceStore(str(path)) as again:
        assert again.by_session("s") == [trace_of()]
    assert path.exists()


def test_closing_flushes_what_nobody_waited_for(tmp_path: Path):
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        for k in range(300):
            store.add([trace_of(str(k))])
    with SqliteTraceStore(tmp_path / "traces.db") as again:
        assert [trace.id for trace in again.by_session("s")] == [str(k) for k in range(300)]


def test_the_turns_of_a_conversation_take_room_for_what_each_adds(tmp_path: Path):
    ids = [(k * 99_991) % 150_000 for k in range(20_000)]  # 2.25 bytes each, which nothing can compress
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        empty, prompt_ids = store.num_bytes(), []
        for start in range(0, len(ids), 1000):
            prompt_ids = [*prompt_ids, *ids[start : start + 1000]]
            store.add([trace_of(str(start), prompt_ids=prompt_ids, response_ids=[7])]).result()
            prompt_ids = [*prompt_ids, 7]
        assert 45_000 <= store.num_bytes() - empty < 100_000
        assert store.by_session("s")[-1].prompt_ids == prompt_ids[:-1]


def test_a_closed_store_is_one_file_that_can_be_copied(tmp_path: Path):
    store = SqliteTraceStore(tmp_path / "traces.db")
    store.add([trace_of()]).result()
    with ThreadPoolExecutor(4) as threads:
        assert all(found == [trace_of()] for found in threads.map(store.by_session, ["s"] * 20))
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["traces.db"]


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    SqliteTraceStore("~/traces.db").close()
    assert (tmp_path / "traces.db").exists()


def test_an_empty_file_becomes_a_store(tmp_path: Path):
    (tmp_path / "traces.db").touch()
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        store.add([trace_of()]).result()


def make_directory(path: Path) -> None:
    path.mkdir()


def make_text(path: Path) -> None:
    path.write_text("not a database, and longer than the hundred bytes that a SQLite header takes " * 4)


def make_other_application(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 77")
    connection.close()


def make_unmarked_tables(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()


def make_newer(path: Path) -> None:
    SqliteTraceStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (make_text, r"file is not a database: .* choose another path"),
        (make_other_application, r"another application's SQLite file \(application_id=77, 0 tables"),
        (make_unmarked_tables, r"another application's SQLite file \(application_id=0, 1 tables"),
        (make_newer, r"has schema 99 and this version of rllm knows 3: upgrade rllm"),
    ],
)
def test_what_is_no_store_of_this_version_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Any, complaint: str, read_only: bool
):
    path = tmp_path / "traces.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=complaint):
        SqliteTraceStore(path, read_only=read_only)
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_is_a_mistake_of_the_user(tmp_path: Path, read_only: bool):
    with pytest.raises(ConfigError, match=f"is a directory: name a file in it, such as '{tmp_path}/traces.db'"):
        SqliteTraceStore(tmp_path, read_only=read_only)


@contextmanager
def as_ordinary_user() -> Iterator[Path]:
    """A folder of a user who is not root, as that user: root may write anywhere."""
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    try:
        if root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        yield folder
    finally:
        folder.chmod(0o755)
        if root:
            os.seteuid(0)
        shutil.rmtree(folder)


def test_a_file_that_may_not_be_written_is_refused_with_the_remedy():
    with as_ordinary_user() as folder:
        path = folder / "traces.db"
        SqliteTraceStore(path).close()
        path.chmod(0o444)
        with pytest.raises(StoreError, match=r"traces\.db.*readonly database: .* or open it with read_only=True"):
            SqliteTraceStore(path)


def test_a_folder_that_may_not_be_written_is_refused_with_the_remedy():
    with as_ordinary_user() as folder:
        folder.chmod(0o555)
        with pytest.raises(StoreError, match=r"unable to open database file: choose a path in a folder"):
            SqliteTraceStore(folder / "traces.db")
        with pytest.raises(StoreError, match=r"its folder cannot be created \(Permission denied\)"):
            SqliteTraceStore(folder / "new" / "traces.db")


def test_a_store_in_a_folder_that_may_not_be_written_can_be_read():
    with as_ordinary_user() as folder:
        with SqliteTraceStore(folder / "traces.db") as store:
            store.add([trace_of()])
        folder.chmod(0o555)
        with SqliteTraceStore(folder / "traces.db", read_only=True) as reading:
            assert reading.by_session("s") == [trace_of()]


def test_commits_reach_the_disk_itself(tmp_path: Path):
    connection = open_for_writing(tmp_path / "traces.db", timeout_s=1)
    settings = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "fullfsync")]
    connection.close()
    assert settings == [2, 1], "the second counts on macOS"


def test_a_store_in_use_can_be_read_by_another_process(tmp_path: Path):
    path = tmp_path / "traces.db"
    program = (
        "import sys; from rllm.store import open_store\n"
        "with open_store(sys.argv[1], read_only=True) as store: print(len(store.by_session('s')))"
    )
    with SqliteTraceStore(path) as store:
        store.add([trace_of("a"), trace_of("b")]).result()
        assert subprocess.check_output([sys.executable, "-c", program, str(path)], text=True) == "2\n"


def test_reading_only_refuses_writes_and_needs_a_file(tmp_path: Path):
    with pytest.raises(StoreError, match="there is no such file"):
        SqliteTraceStore(tmp_path / "traces.db", read_only=True)
    SqliteTraceStore(tmp_path / "traces.db").close()
    with SqliteTraceStore(tmp_path / "traces.db", read_only=True) as store:
        with pytest.raises(StoreError, match="read_only=True: open it again to write"):
            store.add([trace_of()])
        with pytest.raises(StoreError, match="read_only=True"):
            store.delete("s")


def test_a_trace_that_cannot_be_stored_fails_alone(tmp_path: Path):
    with SqliteTraceStore(tmp_path / "traces.db", timeout_s=60) as store:
        # Holding the lock makes all of them wait, so that they are committed together.
        with locked(store.path):
            futures = [
                store.add([trace_of("first")]),
                store.add([trace_of("good sibling"), trace_of("bad", prompt_ids=[-1])]),
                store.add([trace_of("bad type", weight_version=2**70)]),
                store.add([trace_of("last")]),
            ]
        assert [future.exception(timeout=60) is None for future in futures] == [True, False, False, True]
        assert isinstance(futures[1].exception(), StoreError)
        assert isinstance(futures[2].exception(), StoreError)
        assert [trace.id for trace in store.by_session("s")] == ["first", "last"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process's long write."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("COMMIT")
        connection.close()


def test_a_forgotten_store_is_flushed_when_the_interpreter_ends(tmp_path: Path):
    program = (
        "import sys; from rllm.store import open_store; from rllm.types import Trace\n"
        "store = open_store(sys.argv[1])\n"
        "for k in range(50):\n"
        "    store.add([Trace(id=str(k), call_id='c', session_id='s', model='m', messages=[], response={})])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "traces.db")], check=True, timeout=300)
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        assert len(store.by_session("s")) == 50


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    [version] = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(version)


def test_a_file_is_marked_as_ours_and_with_its_version(tmp_path: Path):
    SqliteTraceStore(tmp_path / "traces.db").close()
    connection = sqlite3.connect(tmp_path / "traces.db")
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    connection.close()
    assert version_of(tmp_path / "traces.db") == len(MIGRATIONS)


NEXT = (*MIGRATIONS, ("ALTER TABLE sessions ADD COLUMN owner TEXT", "UPDATE sessions SET owner = 'me'"))


def test_an_older_file_is_migrated_forward_and_keeps_its_traces(tmp_path: Path):
    path = tmp_path / "traces.db"
    with SqliteTraceStore(path) as store:
        store.add([trace_of()])
    connection = open_for_writing(path, 1.0)
    migrate(connection, path, NEXT)
    migrate(connection, path, NEXT)  # a second time does nothing
    assert connection.execute("SELECT id, owner FROM sessions").fetchall() == [("s", "me")]
    assert connection.execute("SELECT id FROM traces").fetchall() == [("a",)]
    connection.close()
    assert version_of(path) == len(NEXT)
    with pytest.raises(StoreError, match=f"has schema {len(NEXT)} and this version of rllm knows {len(MIGRATIONS)}"):
        SqliteTraceStore(path)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path):
    path = tmp_path / "traces.db"
    connection = open_for_writing(path, 1.0)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        migrate(connection, path, (*NEXT, ("DELETE FROM missing",)))
    assert "owner" not in [row[1] for row in connection.execute("PRAGMA table_info(sessions)")]
    connection.close()
    assert version_of(path) == len(MIGRATIONS)


def test_a_file_that_was_begun_and_never_written_is_not_opened_for_reading_only(tmp_path: Path):
    path = tmp_path / "traces.db"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.close()
    with pytest.raises(StoreError, match="holds nothing: nothing was ever written to it"):
        SqliteTraceStore(path, read_only=True)


SCHEMA_1 = Path(__file__).parent / "data" / "schema_1.db"
"""Written by the version before traces could build upon each other."""


@pytest.fixture(params=["only read", "migrated"])
def old_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteTraceStore]:
    path = tmp_path / "traces.db"
    shutil.copy(SCHEMA_1, path)
    with SqliteTraceStore(path, read_only=request.param == "only read") as store:
        yield store


def test_a_file_of_the_first_version_is_read(old_store: SqliteTraceStore):
    first, second = old_store.by_session("one")
    assert (first.prompt_ids, first.response_ids, first.logprobs) == ([1, 2, 3], [5, 2], [-0.5, -0.1])
    assert (second.parent_id, second.prompt_ids) == ("a", [1, 2, 3, 5, 2, 70_000])
    assert second.messages[-1] == {"role": "user", "content": "müsli 🥣 \ud800"}
    assert second.metadata == {"n": 2**70}
    long, failed = old_store.by_session("two")
    assert long.messages == [{"role": "user", "content": "word " * 2000}]
    assert failed.error == "no tokens"
    assert [(credit.advantage, credit.trainer_logprobs) for credit in old_store.credits("one")] == [
        (0.5, [-0.5, -0.125])
    ]
    assert [(info.id, info.num_traces) for info in old_store.sessions()] == [("two", 2), ("one", 2)]


@pytest.mark.parametrize("read_only", [True, False])
def test_a_file_with_one_credit_for_a_step_is_read(tmp_path: Path, read_only: bool):
    path = tmp_path / "traces.db"
    with sqlite3.connect(path) as connection:
        migrate(connection, path, MIGRATIONS[:2])
        connection.execute("INSERT INTO sessions (id, created_at) VALUES ('s', 0.0)")
        connection.execute("INSERT INTO credits VALUES (1, 'a', 3, 't:0', 'solver', 1.0, 't', 0.5, 0.5, NULL, NULL)")
        connection.commit()
    connection.close()
    credit = StepCredit(
        trace_id="a", session_id="s", training_step=3, episode_id="t:0", trajectory_name="solver", reward=1.0,
        group_id="t", baseline=0.5, advantage=0.5,
    )  # fmt: skip
    with SqliteTraceStore(path, read_only=read_only) as store:
        assert store.credits("s") == [credit]
        if not read_only:
            second = replace(credit, trajectory_index=1)
            store.annotate([second]).result()
            assert store.credits("s") == [credit, second]


def test_a_conversation_that_began_in_the_first_version_goes_on(tmp_path: Path):
    path = tmp_path / "traces.db"
    shutil.copy(SCHEMA_1, path)
    with SqliteTraceStore(path) as store:
        before = store.by_session("one")
        store.add([trace_of("c", "one", parent_id="b")]).result()
        store.add([trace_of("d", "one", parent_id="c", prompt_ids=[1, 2, 3])]).result()
        assert store.by_session("one")[:2] == before
        assert [trace.prompt_ids for trace in store.by_session("one")[2:]] == [[1], [1, 2, 3]]
