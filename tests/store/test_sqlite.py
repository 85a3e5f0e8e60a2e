import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, StoreError
from rllm.store.rows import SCHEMA
from rllm.store.sqlite import APPLICATION_ID, SqliteTraceStore, open_for_writing
from rllm.types import Trace


def trace_of(id: str = "a", session_id: str = "s", **changes: Any) -> Trace:
    values: dict[str, Any] = {"model": "m", "messages": [], "response": {}, "prompt_ids": [1], "response_ids": [2]}
    return Trace(id=id, call_id=id, session_id=session_id, **(values | changes))


def test_file_is_created_with_its_folders(tmp_path: Path):
    path = tmp_path / "new" / "folder with #? %20" / "traces.db"
    with SqliteTraceStore(path) as store:
        store.add([trace_of()])
    with SqliteTraceStore(str(path)) as again:
        assert again.by_session("s") == [trace_of()]
    assert path.exists()


def test_closing_flushes_pending_writes(tmp_path: Path):
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        for k in range(300):
            store.add([trace_of(str(k))])
    with SqliteTraceStore(tmp_path / "traces.db") as again:
        assert [trace.id for trace in again.by_session("s")] == [str(k) for k in range(300)]


def test_turns_use_space_only_for_what_they_add(tmp_path: Path):
    ids = random.Random(0).choices(range(150_000), k=20_000)  # 17.2 bits of entropy each
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        empty, prompt_ids = store.num_bytes(), []
        for start in range(0, len(ids), 1000):
            prompt_ids = [*prompt_ids, *ids[start : start + 1000]]
            store.add([trace_of(str(start), prompt_ids=prompt_ids, response_ids=[7])]).result()
            prompt_ids = [*prompt_ids, 7]
        assert 43_000 <= store.num_bytes() - empty < 100_000
        assert store.by_session("s")[-1].prompt_ids == prompt_ids[:-1]


def test_closed_store_is_one_file_that_can_be_copied(tmp_path: Path):
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


def test_empty_file_becomes_a_store(tmp_path: Path):
    (tmp_path / "traces.db").touch()
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        store.add([trace_of()]).result()


def make_directory(path: Path) -> None:
    path.mkdir()


def make_text(path: Path) -> None:
    path.write_text("not a database, and longer than the hundred bytes that a SQLite header takes " * 4)


def make_other_application(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA application_id = 77")


def make_unmarked_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE notes (text)")


def make_newer(path: Path) -> None:
    SqliteTraceStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (make_text, "not a database"),
        (make_other_application, "application_id=77, 0 tables"),
        (make_unmarked_tables, "application_id=0, 1 tables"),
        (make_newer, f"schema 99.* {SCHEMA} "),
    ],
)
def test_other_files_and_schemas_are_rejected_unchanged(tmp_path: Path, make: Any, complaint: str, read_only: bool):
    path = tmp_path / "traces.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=complaint):
        SqliteTraceStore(path, read_only=read_only)
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("read_only", [False, True])
def test_directory_is_a_user_error(tmp_path: Path, read_only: bool):
    with pytest.raises(ConfigError, match="directory"):
        SqliteTraceStore(tmp_path, read_only=read_only)


@contextmanager
def as_ordinary_user() -> Iterator[Path]:
    """Yield a folder of a user who is not root, as that user: root may write anywhere."""
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


def test_file_without_write_permission_is_rejected():
    with as_ordinary_user() as folder:
        path = folder / "traces.db"
        SqliteTraceStore(path).close()
        path.chmod(0o444)
        with pytest.raises(StoreError, match=r"traces\.db.*read_only=True"):
            SqliteTraceStore(path)


def test_folder_without_write_permission_is_rejected():
    with as_ordinary_user() as folder:
        folder.chmod(0o555)
        with pytest.raises(StoreError, match="choose a path"):
            SqliteTraceStore(folder / "traces.db")
        with pytest.raises(StoreError, match="Permission denied"):
            SqliteTraceStore(folder / "new" / "traces.db")


def test_store_in_a_read_only_folder_can_be_read():
    with as_ordinary_user() as folder:
        with SqliteTraceStore(folder / "traces.db") as store:
            store.add([trace_of()])
        folder.chmod(0o555)
        with SqliteTraceStore(folder / "traces.db", read_only=True) as reading:
            assert reading.by_session("s") == [trace_of()]


def test_commits_are_synced_to_disk(tmp_path: Path):
    connection = open_for_writing(tmp_path / "traces.db", timeout_s=1)
    settings = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "fullfsync")]
    connection.close()
    assert settings == [2, 1], "the second counts on macOS"


def test_store_in_use_can_be_read_by_another_process(tmp_path: Path):
    path = tmp_path / "traces.db"
    program = (
        "import sys; from rllm.store import open_store\n"
        "with open_store(sys.argv[1], read_only=True) as store: print(len(store.by_session('s')))"
    )
    with SqliteTraceStore(path) as store:
        store.add([trace_of("a"), trace_of("b")]).result()
        assert subprocess.check_output([sys.executable, "-c", program, str(path)], text=True) == "2\n"


def test_read_only_store_rejects_writes_and_needs_a_file(tmp_path: Path):
    with pytest.raises(StoreError, match="no such file"):
        SqliteTraceStore(tmp_path / "traces.db", read_only=True)
    SqliteTraceStore(tmp_path / "traces.db").close()
    with SqliteTraceStore(tmp_path / "traces.db", read_only=True) as store:
        with pytest.raises(StoreError, match="read_only=True: open it again to write"):
            store.add([trace_of()])
        with pytest.raises(StoreError, match="read_only=True"):
            store.delete("s")


def test_trace_that_cannot_be_stored_fails_alone(tmp_path: Path):
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
    """Hold the lock of a long write in another process."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("COMMIT")
        connection.close()


def test_unclosed_store_is_flushed_at_interpreter_exit(tmp_path: Path):
    program = (
        "import sys; from rllm.store import open_store; from rllm.types import Trace\n"
        "store = open_store(sys.argv[1])\n"
        "for k in range(50):\n"
        "    store.add([Trace(id=str(k), call_id='c', session_id='s', model='m', messages=[], response={})])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "traces.db")], check=True, timeout=300)
    with SqliteTraceStore(tmp_path / "traces.db") as store:
        assert len(store.by_session("s")) == 50


def test_file_has_our_application_id_and_version(tmp_path: Path):
    SqliteTraceStore(tmp_path / "traces.db").close()
    connection = sqlite3.connect(tmp_path / "traces.db")
    found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    connection.close()
    assert found == [APPLICATION_ID, SCHEMA]


def test_incomplete_file_cannot_be_opened_read_only(tmp_path: Path):
    path = tmp_path / "traces.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    with pytest.raises(StoreError, match="empty"):
        SqliteTraceStore(path, read_only=True)
