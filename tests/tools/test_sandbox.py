import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.sandbox.python import arun_python, run_python

pytestmark = pytest.mark.sandbox

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_code_runs_and_reads_its_input() -> None:
    result = run_python("print(int(input()) + 1)", stdin="41\n")

    assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "", 0)
    assert result.ok
    assert not result.truncated
    assert result.network in ("namespace", "filter", "open")


def test_value_of_the_last_line_is_shown_on_request() -> None:
    assert run_python("x = 2\nx + 1", show_last_value=True).stdout == "3\n"
    assert run_python("x = 2\nx + 1").stdout == ""


def test_traceback_shows_only_lines_of_the_code() -> None:
    result = run_python("def half(x):\n    return x / 0\nhalf(1)")

    assert result.exit_code == 1
    assert not result.ok
    assert result.stderr.splitlines()[1] == '  File "program.py", line 3, in <module>'
    assert "return x / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(("code", "error"), [("x = (", "SyntaxError"), ("print('\ud800')", "UnicodeEncodeError")])
def test_invalid_code_is_reported_with_the_reason(code: str, error: str) -> None:
    result = run_python(code)

    assert result.exit_code == 1
    assert error in result.stderr
    assert "python_child" not in result.stderr


def test_exit_code_is_kept() -> None:
    assert run_python("import sys; sys.exit(3)").exit_code == 3


def test_code_starts_in_an_empty_folder_that_is_removed() -> None:
    result = run_python("import os; open('made', 'w').close(); print(os.getcwd(), os.listdir())")

    folder, listing = result.stdout.split()
    assert listing == "['made']"
    assert not Path(folder).exists()


def test_environment_of_the_parent_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "a-secret-of-the-parent")

    assert "a-secret" not in run_python("import os; print(dict(os.environ))").stdout


def test_network_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")

    assert "ConnectionRefusedError" in result.stderr or "PermissionError" in result.stderr


def long_enough() -> float:
    """Return seconds within which a program prints something, on a machine as busy as this one is now."""
    began = time.monotonic()
    run_python("print('hello')")
    return max(1.0, 10 * (time.monotonic() - began))


def test_output_before_the_deadline_is_kept() -> None:
    result = run_python("import time; print('before'); time.sleep(600)", timeout_s=long_enough())

    assert result.timed_out
    assert not result.ok
    assert result.exit_code == -signal.SIGKILL
    assert result.stdout == "before\n"


@linux_only
def test_memory_is_limited() -> None:
    result = run_python("x = bytearray(1 << 30)", memory_mb=256)

    assert result.exit_code == 1
    assert result.stderr.endswith("MemoryError\n")


def test_long_output_is_truncated() -> None:
    result = run_python("while True: print('x' * 100_000)", max_output_bytes=10)

    assert result.stdout == "x" * 10
    assert result.truncated
    assert not result.ok


def test_end_of_a_long_error_is_kept() -> None:
    result = run_python(
        "import sys; sys.stderr.write('noise' * 1000); raise ValueError('the cause')", max_output_bytes=40
    )

    assert result.truncated
    assert result.stderr.endswith("ValueError: the cause\n")


@pytest.mark.skipif(bool(run_python("").missing), reason="needs bubblewrap: it signals every process")
def test_other_processes_cannot_be_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        results = [run_python(f"import os; os.kill({pid}, 9)") for pid in (other.pid, -1)]
        assert other.poll() is None
        other.kill()

    assert not any(result.ok for result in results)


LEAVE_A_CHILD = "import os, time\nif os.fork() == 0: {}; time.sleep(600)\n"


@linux_only
@pytest.mark.parametrize("child", ["pass", "os.setsid()"])
@pytest.mark.parametrize("ending", ["", "time.sleep(600)"])
def test_processes_are_not_left_behind(child: str, ending: str) -> None:
    if child == "os.setsid()" and run_python("").missing:
        pytest.skip("needs bubblewrap")
    code = _named("left") + LEAVE_A_CHILD.format(child) + ending

    assert run_python(code, timeout_s=long_enough()).stdout == "named\n"

    _wait_until(lambda: not _is_running("left"))


def _named(name: str) -> str:
    """Return code that gives its process, and those that it starts, a name."""
    return f"open('/proc/self/comm', 'w').write('{name} {os.getpid()}'); print('named')\n"


def _is_running(name: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().strip() == f"{name} {os.getpid()}":
                return True
    return False


def _wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(6_000):  # a killed process takes time to end
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the condition was not met within a minute")


async def test_async_version_returns_the_same() -> None:
    results = await asyncio.gather(*(arun_python(f"print({n})") for n in range(3)))

    assert [result.stdout for result in results] == ["0\n", "1\n", "2\n"]
    assert (await arun_python("import time; time.sleep(600)", timeout_s=0.3)).timed_out


@linux_only
async def test_cancelling_kills_the_process() -> None:
    running = asyncio.create_task(arun_python(_named("cancelled") + "import time; time.sleep(600)", timeout_s=600))
    await asyncio.to_thread(_wait_until, lambda: _is_running("cancelled"))

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await asyncio.to_thread(_wait_until, lambda: not _is_running("cancelled"))


@pytest.mark.parametrize("limit", [{"timeout_s": 0}, {"memory_mb": 1}, {"max_output_bytes": -1}])
def test_invalid_limit_is_reported(limit: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limit))):
        run_python("", **limit)  # type: ignore[arg-type]
