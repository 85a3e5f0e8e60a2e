"""An attacker writes the code that the Python sandbox runs: it gains no privilege, leaves nothing, and always has a result."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

from rllm.rewards.code_reward import RewardCodeFn
from rllm.sandbox import bubblewrap
from rllm.sandbox import python as sandbox
from rllm.sandbox.python import SandboxError, SandboxResult, arun_python, run_python

pytestmark = pytest.mark.sandbox

needs_bubblewrap = pytest.mark.skipif(bool(run_python("").missing), reason="needs bubblewrap")
TRY = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(function, *arguments):
    try:
        result = function(*arguments)
    except OSError as error:
        return error.strerror
    return os.strerror(ctypes.get_errno()) if result == -1 else f'permitted: {result!r}'
"""


def attempt(*calls: str) -> list[str]:
    """Return the result of each call of a function, as one line each."""
    code = TRY + "\n".join(f"print(refused({call}), flush=True)" for call in calls)
    result = run_python(code, timeout_s=60)
    lines = result.stdout.splitlines()
    assert len(lines) == len(calls), result
    return lines


NUMBERS = {  # of system calls, x86-64 and AArch64
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "keyctl": (250, 219),
    "pivot_root": (155, 41),
}


def number(call: str) -> int:
    """Return the number of a system call on this machine."""
    return NUMBERS[call][platform.machine() == "aarch64"]


@pytest.fixture
def unconfined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without bubblewrap."""
    monkeypatch.setattr(sandbox, "_is_confined", lambda: False)


def assert_all_refused(*calls: str) -> None:
    assert [
        (call, line) for call, line in zip(calls, attempt(*calls), strict=True) if line.startswith("permitted")
    ] == []


# Rights


@needs_bubblewrap
def test_all_capability_sets_are_empty_and_cannot_be_regained() -> None:
    status = run_python("print(open('/proc/self/status').read())").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {
        name: int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    } == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)
    assert fields["NoNewPrivs"] == "1"


@needs_bubblewrap
def test_mounting_and_unmounting_are_denied() -> None:
    assert_all_refused(
        "libc.umount2, b'/proc', 2",
        "libc.mount, b'tmpfs', b'/tmp', b'tmpfs', 0, None",
        "libc.mount, None, b'/', None, 0x20 | 0x4000, None",  # to remount it writable
        "libc.syscall, 428, -100, b'/', 1",
        "libc.syscall, 430, b'tmpfs', 0",
        "libc.chroot, b'.'",
        f"libc.syscall, {number('pivot_root')}, b'.', b'.'",
    )


@needs_bubblewrap
def test_further_namespaces_are_denied() -> None:
    flags = {"user": 1 << 28, "mount": 0x20000, "pid": 1 << 29, "network": 1 << 30, "ipc": 1 << 27, "uts": 1 << 26}
    assert_all_refused(
        *(f"libc.unshare, {flag}" for flag in flags.values()),
        *(f"libc.unshare, {flag | flags['user']}" for flag in flags.values()),
        f"libc.syscall, {number('clone')}, {flags['user'] | 17}, 0, 0, 0, 0",
        f"libc.setns, os.open('/proc/self/ns/user', os.O_RDONLY), {flags['user']}",
    )


@needs_bubblewrap
def test_kernel_settings_cannot_be_written() -> None:
    names = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
    ]
    names += [
        "/sys/kernel/uevent_helper",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/fs/cgroup/release_agent",
    ]
    assert_all_refused(*(f"os.open, {name!r}, os.O_WRONLY" for name in names))


@needs_bubblewrap
def test_devices_of_the_machine_are_absent() -> None:
    assert sorted(run_python("import os; print(*os.listdir('/dev'))").stdout.split()) == sorted(
        "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero".split()
    )
    assert_all_refused(
        "os.mknod, 'disk', 0o60600, os.makedev(254, 0)", "os.mknod, '/dev/mem', 0o20600, os.makedev(1, 1)"
    )


@needs_bubblewrap
def test_keyring_cannot_be_read() -> None:
    assert_all_refused(
        f"libc.syscall, {number('keyctl')}, 0, -3, 0",
        f"libc.syscall, {number('add_key')}, b'user', b'name', b'secret', 6, -3",
        f"libc.syscall, {number('bpf')}, 0, 0, 0",
        "libc.syscall, 425, 8, bytes(120)",  # io_uring_setup: a filter cannot see the calls inside a ring
    )


# Other processes


@needs_bubblewrap
def test_other_processes_are_hidden_and_no_descriptor_is_inherited() -> None:
    code = "import os; print([n for n in os.listdir('/proc') if n.isdigit()], sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    processes, descriptors = run_python(code).stdout.strip().split("] [")
    assert processes == "['1', '2'"
    assert descriptors == "0, 1, 2]"


@needs_bubblewrap
def test_signal_to_its_group_reaches_only_itself() -> None:
    result = run_python("import os, signal, time; os.kill(0, signal.SIGSTOP)", timeout_s=1)
    assert result.timed_out
    assert run_python("import os; os.kill(0, 15)").exit_code == -15
    assert run_python("import os; os.kill(os.getppid(), 9)").network == "namespace"


@needs_bubblewrap
def test_socket_in_the_file_system_is_unreachable() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/docker.sock")
        server.listen()
        assert_all_refused(
            f"__import__('socket').socket(__import__('socket').AF_UNIX).connect, {server.getsockname()!r}"
        )
    assert run_python("import socket; a, b = socket.socketpair(); a.send(b'x'); socket.socket(socket.AF_UNIX)").ok


@needs_bubblewrap
def test_sockets_to_the_hypervisor_and_kernel_are_denied() -> None:
    families = {"vsock": 40, "crypto": 38, "packet": 17, "bluetooth": 31, "tipc": 30, "xdp": 44, "can": 29}
    assert_all_refused(*(f"libc.socket, {family}, {kind}, 0" for family in families.values() for kind in (1, 2, 5)))
    assert run_python("import socket; socket.socket(); socket.socket(socket.AF_INET6); socket.if_nameindex()").ok


@needs_bubblewrap
def test_number_of_processes_is_limited_even_for_root() -> None:
    code = "import os, time\nfor n in range(5000):\n    if os.fork() == 0: time.sleep(600)\n"
    result = run_python(code, timeout_s=60)
    assert "BlockingIOError" in result.stderr or "OSError" in result.stderr


# Files


@needs_bubblewrap
def test_files_of_the_machine_are_neither_seen_nor_written(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("as it was")
    mine.chmod(0o666)
    source = sandbox.__file__
    assert_all_refused(
        *(f"os.open, {name!r}, os.O_RDONLY" for name in (str(mine), "/etc/shadow", str(Path.home() / ".ssh"))),
        *(f"os.open, {name!r}, os.O_WRONLY" for name in (str(mine), source, sys.executable, "/usr/bin/env")),
        "os.open, '/usr/bin/new', os.O_WRONLY | os.O_CREAT",
        f"os.unlink, {str(mine)!r}",
        f"os.chmod, {str(mine)!r}, 0o777",
        f"os.rename, {str(mine)!r}, {str(tmp_path / 'other')!r}",
        f"os.link, {str(mine)!r}, 'hard'",
    )
    assert run_python("open('here', 'w').write('x'); open('/dev/shm/here', 'w').write('x')").ok
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert mine.read_text() == "as it was"


DEEP = "import os\nfor _ in range({depth}):\n    os.mkdir('d' * 200); os.chdir('d' * 200)\n"
LITTER = {
    "deep folders": DEEP.format(depth=3000),
    "many files": "for n in range(60_000): open(str(n), 'w').close()",
    "odd names": "import os\nfor name in [b'\\xff', b'\\n', b'-rf', b' ', '\\u202e'.encode(), b'x' * 255]: os.mkdir(name)",
    "locked folders": "import os\nos.makedirs('a/b/c'); open('a/b/c/f', 'w'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)",
    "links": "import os\nos.symlink('/', 'root'); os.symlink('/tmp', 'tmp'); os.symlink('loop', 'loop')",
    "fifos and sockets": "import os, socket\nos.mkfifo('fifo'); s = socket.socket(socket.AF_UNIX); s.bind('socket')",
    "sparse files": "import os\nfor n in range(9): os.truncate(os.open(str(n), os.O_CREAT | os.O_RDWR), 16 << 20)",
    "its own folder removed": "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)",
}


@pytest.mark.parametrize("litter", LITTER)
def test_remains_in_the_folder_are_a_result_and_are_removed(
    litter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert isinstance(run_python(LITTER[litter], timeout_s=60), SandboxResult)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unconfined")
@pytest.mark.parametrize("litter", LITTER)
def test_remains_are_removed_without_bubblewrap(litter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "temporary").mkdir()
    code = f"import os\nos.symlink({str(outside)!r}, 'to it')\n{LITTER[litter].replace('60_000', '9_000')}"
    assert isinstance(run_python(code, timeout_s=60), SandboxResult)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert outside.read_text() == "mine"


@needs_bubblewrap
def test_folder_is_limited_and_uses_no_disk() -> None:
    code = "import os\nfor n in range(100):\n    with open(str(n), 'wb') as file: file.write(bytes(15 << 20))"
    assert "No space left" in run_python(code, timeout_s=60).stderr


@pytest.mark.usefixtures("unconfined")
async def test_cleanup_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    removing, seen = sandbox._remove, []
    monkeypatch.setattr(sandbox, "_remove", lambda folder: (seen.append(_in_loop()), removing(folder)))
    await asyncio.gather(arun_python("open('x', 'w')"), arun_python("import time; time.sleep(60)", timeout_s=0.2))
    cancelled = asyncio.create_task(arun_python("import time; time.sleep(60)"))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert seen == [False] * 3


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# Memory outside of the limits or lifetime of a process


@needs_bubblewrap
def test_shared_memory_does_not_outlive_the_code(tmp_path: Path) -> None:
    calls = ["libc.shmget, 0, 400 << 20, 0o1666", "libc.msgget, 0, 0o1666", "libc.semget, 0, 1, 0o1666"]
    assert_all_refused(*calls, "libc.mq_open, b'/queue', os.O_CREAT | os.O_RDWR, 0o666, None")
    of_this_process = Path("/proc/self/ns/ipc").readlink()
    assert run_python("import os; print(os.readlink('/proc/self/ns/ipc'))").stdout.strip() != str(of_this_process)
    name = f"left-{tmp_path.name}-{os.getpid()}"
    assert run_python(f"from multiprocessing.shared_memory import *; SharedMemory({name!r}, True, 1 << 20)").ok
    assert not Path("/dev/shm", name).exists()


@needs_bubblewrap
def test_files_in_memory_are_limited() -> None:
    assert_all_refused("os.memfd_create, 'x'", "libc.syscall, 447, 0")
    code = "for n in range(9): open(f'/dev/shm/{n}', 'wb').write(bytes(8 << 20))"
    assert "No space left" in run_python(code, timeout_s=60).stderr


# Every outcome is a result, except for failures to set up

ENDINGS = {
    "killed": "import os; os.kill(os.getpid(), 9)",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "out of memory": "x = [bytes(1 << 20) for _ in range(10_000)]",
    "out of processes": "import os\nwhile True: os.fork()",
    "out of files": "files = [open('/dev/null') for _ in range(100)]",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "no output": "import os; os.close(1); os.close(2); os.close(0)",
    "bytes that are not text": "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100); sys.exit(1)",
    "a flood of errors": "import sys\nwhile True: sys.stderr.write('x' * 10_000)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "an exit code of another kind": "import sys; sys.exit('\\ud800')",
    "no memory to end": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1)); x = 'x' * 10**6",
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\nraise SystemExit(1)",
}


@needs_bubblewrap
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_exit_of_a_wrong_answer_is_scored_0(ending: str) -> None:
    task = {"ground_truth": {"inputs": [""], "outputs": ["42"]}}
    verdict = RewardCodeFn(timeout_s=1, memory_mb=256)(task, f"```python\n{ENDINGS[ending]}\n```")
    assert (verdict.reward, verdict.is_correct) == (0.0, False)
    assert verdict.metadata["first_failure"].keys() & {"error", "got"}


def test_sandbox_that_cannot_be_set_up_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("raise OSError('no room for another process')")
    for name, value in {"_CHILD": str(broken), "tempfile.tempdir": str(tmp_path / "missing")}.items():
        with monkeypatch.context() as patched:
            patched.setattr(sandbox, name, value) if "." not in name else patched.setattr(tempfile, "tempdir", value)
            with pytest.raises(SandboxError):
                run_python("print(1)")
            with pytest.raises(SandboxError):
                RewardCodeFn()({"tests": ["assert f() == 1"]}, "```python\ndef f():\n    return 1\n```")


@pytest.mark.usefixtures("unconfined")
def test_sandbox_of_a_solution_that_cannot_be_set_up_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child.py"
    broken = "import os\nif b'solution' in os.pread(0, 20, 0): raise OSError('no room')\n"
    child.write_text(broken + Path(sandbox._CHILD).read_text())
    monkeypatch.setattr(sandbox, "_CHILD", str(child))
    assert run_python("print(1)").ok
    with pytest.raises(SandboxError, match="no room"):
        RewardCodeFn()({"tests": ["assert f() == 1"]}, "```python\ndef f():\n    return 1\n```")


@pytest.mark.usefixtures("unconfined")
def test_code_that_could_not_begin_is_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "child.py"
    slow.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(sandbox, "_CHILD", str(slow))
    monkeypatch.setattr(sandbox, "_START_TIMEOUT_S", 0.2)
    with pytest.raises(SandboxError, match=r"not in 0\.2 seconds"):
        run_python("print(1)", timeout_s=0.1)


@needs_bubblewrap
def test_machine_without_a_call_filter_has_the_rest_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "call_filter", lambda *, namespaced: None)
    result = run_python("print(open('/proc/self/status').read())")
    assert (result.network, result.missing) == ("namespace", ("calls",))
    assert "CapEff:\t0000000000000000" in result.stdout


RUN = "import sys; sys.path += sys.argv[2:]; from rllm.sandbox.python import run_python; print(run_python(sys.argv[1]))"


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_root_without_the_right_to_mount_has_the_rest_of_the_sandbox() -> None:
    rights = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    ended = subprocess.run([*rights, sys.executable, "-c", RUN, "print(1)"], capture_output=True, text=True)
    assert "stdout='1\\n'" in ended.stdout
    assert "missing=('processes', 'files')" in ended.stdout
    assert "unshare mnt" in ended.stderr


@needs_bubblewrap
def test_virtual_environment_in_the_folder_of_a_project_does_not_show_the_project(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    (tmp_path / ".env").write_text("KEY=secret")
    command = [f"{tmp_path}/bin/python", "-c", RUN, "import os, sys; print(os.listdir(sys.prefix))", *sys.path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "pyvenv.cfg" in ended.stdout, ended.stderr
    assert ".env" not in ended.stdout


def test_descriptors_of_this_process_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0  # noqa: PTH208
    for _ in range(3):
        run_python("raise SystemExit(1)")
        RewardCodeFn()({"tests": ["assert f() == 1"]}, "```python\ndef f():\n    return 1\n```")
    after = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0  # noqa: PTH208
    assert after <= before


@pytest.mark.usefixtures("unconfined")
@pytest.mark.skipif(sys.platform != "linux", reason="needs a filter of system calls")
def test_result_without_bubblewrap_has_no_network_and_names_what_is_missing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX) as local:
        local.bind(f"{tmp_path}/docker.sock")
        local.listen()
        result = run_python(f"""
import asyncio, fcntl, os, resource, socket, struct
asyncio.run(asyncio.sleep(0))
parent = os.getppid()
pair, _ = socket.socketpair()
for attempt in (
    socket.socket,
    lambda: socket.socket(socket.AF_UNIX).connect({local.getsockname()!r}),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    lambda: os.kill(parent, 0),
    lambda: resource.prlimit(parent, resource.RLIMIT_CPU),
    lambda: fcntl.fcntl(pair, fcntl.F_SETOWN, parent),
    lambda: fcntl.ioctl(pair, 0x8901, struct.pack("i", parent)),
    lambda: os.readlink(f"/proc/{{parent}}/fd/0"),
):
    try: attempt()
    except PermissionError: print("refused")
if os.fork() == 0: print("child")
os.wait()
""")
    assert (result.network, result.missing) == ("filter", ("processes", "files"))
    is_root = os.geteuid() == 0  # other processes of root have capabilities
    assert sorted(result.stdout.split()) == ["child", *["refused"] * (8 if is_root else 7)]


@pytest.mark.usefixtures("unconfined")
def test_code_rewards_are_correct_without_bubblewrap() -> None:
    for code, reward in {"return 1": 1.0, "import os; os._exit(0)": 0.0, "while True: pass": 0.0}.items():
        verdict = RewardCodeFn(timeout_s=5)({"tests": ["assert f() == 1"]}, f"```python\ndef f():\n    {code}\n```")
        assert verdict.reward == reward


def test_missing_bubblewrap_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    for cached in bubblewrap.problem, sandbox._is_confined:
        cached.cache_clear()
    try:
        assert [run_python("print(1)").ok for _ in range(2)] == [True, True]
        assert [("apt-get install bubblewrap" in record.message) for record in caplog.records] == [True]
    finally:
        for cached in bubblewrap.problem, sandbox._is_confined:
            cached.cache_clear()
