"""Programs are supervised, limited in their output, and leave no processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.sdk.programs import HeadAndTail, ProgramLimits, ProgramResult, run_program, run_program_async, run_supervised

from ..waiting import wait_for

FAMILY = """
import os, signal, subprocess, sys, time
from pathlib import Path

depth, folder = int(sys.argv[1]), Path(sys.argv[2])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth:
    subprocess.Popen([sys.executable, "-S", __file__, str(depth - 1), str(folder)], start_new_session=True, env={})
(folder / f"{os.getpid()}.pid").touch()
if depth == 2 and "leave" in sys.argv:
    while len(list(folder.glob("*.pid"))) < 3:
        time.sleep(0.01)
    sys.exit(7)
time.sleep(600)
"""
"""A process, its child and its grandchild, each in its own session, with an empty environment, ignoring SIGTERM."""

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="on other systems a process that leaves its group is not killed"
)


def run(*command: str, **options: Any) -> ProgramResult:
    limits = {name: options.pop(name) for name in list(options) if name in ProgramLimits.__dataclass_fields__}
    return run_supervised(command, ProgramLimits(**limits), env=dict(os.environ), **options)


def python(code: str, **options: Any) -> ProgramResult:
    return run(sys.executable, "-S", "-c", code, **options)


@pytest.fixture
def family(tmp_path: Path) -> list[str]:
    (tmp_path / "family.py").write_text(FAMILY)
    return [sys.executable, "-S", str(tmp_path / "family.py"), "2", str(tmp_path)]


def members(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.pid")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_program_returns_its_output_and_exit_code() -> None:
    done = python("import sys; print('out'); print(sys.stdin.read(), file=sys.stderr); sys.exit(3)", stdin="in")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "in\n")
    assert (done.timed_out, done.num_dropped_bytes, done.num_killed) == (False, 0, 0)


def test_signal_that_ended_a_program_is_reported() -> None:
    assert python("import os, signal; os.kill(os.getpid(), signal.SIGABRT)").exit_code == -signal.SIGABRT


def test_more_files_may_be_open_than_select_supports() -> None:
    with ExitStack() as files:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(2048, before[1])), before[1]))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1024):
            files.enter_context(Path(os.devnull).open("rb"))
        assert run("echo", "hi").stdout == "hi\n"


def test_hanging_program_is_stopped_at_its_time_limit() -> None:
    done = python("import time; time.sleep(600)", timeout_s=0.5)
    assert done.timed_out
    assert done.exit_code == -signal.SIGTERM


def test_program_may_clean_up_when_terminated(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path("ready").touch()
time.sleep(600)
"""
    done = python(code, cwd=tmp_path, is_wanted=lambda: not (tmp_path / "ready").exists(), grace_s=60)
    assert done.exit_code == 5
    assert not done.timed_out


@linux_only
def test_detached_grandchildren_are_killed_when_it_exits(family: list[str], tmp_path: Path) -> None:
    done = run(*family, "leave", grace_s=0.2)
    assert done.exit_code == 7
    assert done.num_killed == 2
    assert len(members(tmp_path)) == 3
    assert not any(map(alive, members(tmp_path)))


@linux_only
def test_detached_grandchildren_are_killed_when_it_is_cancelled(family: list[str], tmp_path: Path) -> None:
    done = run(*family, grace_s=0.2, is_wanted=lambda: len(members(tmp_path)) < 3)
    assert done.exit_code == -signal.SIGKILL
    assert done.num_killed == 3
    assert not any(map(alive, members(tmp_path)))


@linux_only
def test_detached_grandchildren_are_killed_when_its_parent_is_killed(family: list[str], tmp_path: Path) -> None:
    code = f"from rllm.sdk import run_program; run_program({family!r}, grace_s=0.2)"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_for(lambda: len(members(tmp_path)) == 3)
        parent.kill()
    wait_for(lambda: not any(map(alive, members(tmp_path))))


def test_output_flood_is_limited() -> None:
    done = python("print('a' * 3_000_000 + 'z')", max_output_bytes=100)
    assert done.stdout == "a" * 50 + "\n[... 2999902 bytes left out ...]\n" + "a" * 48 + "z\n"
    assert done.num_dropped_bytes == 2999902


def test_output_is_passed_on_as_it_arrives_within_the_limit() -> None:
    received: list[tuple[str, bytes]] = []
    done = python("print('abcdefgh', end='')", max_output_bytes=4, on_output=lambda *part: received.append(part))
    text = b"".join(data for stream, data in received if stream == "stdout").decode()
    assert text == done.stdout == "ab\n[... 4 bytes left out ...]\ngh"


def test_program_runs_in_the_given_folder_and_environment(tmp_path: Path) -> None:
    limits = ProgramLimits()
    look = "import os; print(os.getcwd(), os.environ['PWD'], os.environ['A'], 'HOME' in os.environ)"
    done = run_supervised([sys.executable, "-c", look], limits, env={"A": "1", "PWD": "/"}, cwd=tmp_path)
    assert done.stdout == f"{tmp_path} {tmp_path} 1 False\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"max_output_bytes": -1}, "max_output_bytes=-1"),
        ({"grace_s": -1}, "grace_s=-1"),
        ({"cwd": "/no/such"}, "/no/such"),
    ],
)
def test_invalid_limits_are_rejected(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run("true", **options)


def test_missing_program_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"'no-such-program' cannot be started: .*add its folder to PATH"):
        run("no-such-program")
    with pytest.raises(ConfigError, match="list of a program and its arguments"):
        run_supervised("ls -l", ProgramLimits(), env={})


async def test_empty_command_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"command=\[\]"):
        run_program([])
    with pytest.raises(ConfigError, match=r"command=\[\]"):
        await run_program_async([])


@pytest.mark.parametrize(
    ("command", "env", "message"),
    [
        (["echo", "a\0b"], {}, r"argument 1 of 'echo' has a NUL character \('a\\x00b'\)"),
        (["echo"], {"TASK": "a\0b"}, "the variable TASK of 'echo' has a NUL character"),
        (["sleep", 5], {}, "argument 1 of 'sleep' is 5"),
        (["echo"], {"PORT": 8000}, "the variable PORT of 'echo' is 8000"),
        (["echo", "\ud800"], {}, "'echo' cannot be started: .* surrogates not allowed"),
        (["echo", "a" * 2_000_000], {}, "'echo' cannot be started: .*stdin"),
    ],
)
def test_invalid_arguments_and_variables_are_reported(command: list[Any], env: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_supervised(command, ProgramLimits(), env=env)


def test_output_after_an_interrupt_is_read_to_the_end(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
def end(*_):
    print("x" * 200_000, flush=True)
    open("left", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, end)
os.write(1, b"up")
time.sleep(600)
"""
    received: list[bytes] = []

    def interrupted(stream: str, data: bytes) -> None:
        received.append(data)
        if len(received) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        python(code, cwd=tmp_path, grace_s=60.0, on_output=interrupted)
    assert b"".join(received) == b"up" + b"x" * 200_000 + b"\n"
    assert (tmp_path / "left").exists()


@pytest.mark.parametrize(
    "pieces", [[b"0123456789"], [b"012", b"34567", b"89"], [bytes([byte]) for byte in b"0123456789"]]
)
def test_both_ends_of_the_output_are_kept(pieces: list[bytes]) -> None:
    kept = HeadAndTail(5)
    assert b"".join(kept.add(piece) for piece in pieces) == b"012"
    assert kept.num_dropped == 5
    assert kept.text() == "012\n[... 5 bytes left out ...]\n89"


@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_short_output_is_kept_unchanged(size: int) -> None:
    kept = HeadAndTail(5)
    kept.add(b"01234"[:size])
    assert kept.text() == "01234"[:size]
    assert kept.num_dropped == 0


def test_zero_limit_keeps_nothing() -> None:
    kept = HeadAndTail(0)
    assert kept.add(b"abc") == b""
    assert kept.text() == "\n[... 3 bytes left out ...]\n"


def test_split_character_is_replaced() -> None:
    kept = HeadAndTail(2)
    kept.add("äö".encode())
    assert kept.text() == "\N{REPLACEMENT CHARACTER}\n[... 2 bytes left out ...]\n\N{REPLACEMENT CHARACTER}"
