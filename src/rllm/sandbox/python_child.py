"""Program with which `rllm.sandbox.python` runs untrusted Python code: it limits itself first.

It is run by its path, and imports as little as possible, because imports cost time in each run.
"""

import resource
import sys
import types
from contextlib import suppress

FILE_NAME = "program.py"


def main(
    code_fd: int,
    report_fd: int,
    filter_fd: int,
    show_last_value: int,
    cpu_s: int,
    memory_bytes: int,
    file_bytes: int,
    max_processes: int,
) -> None:
    """Limit this process, report that the code begins, and run it; -1 leaves out a filter or a limit."""
    with open(code_fd, encoding="utf-8", errors="surrogatepass") as file:
        code = file.read()
    if filter_fd >= 0:
        give_up_rights(filter_fd)
    limits = {"CPU": cpu_s, "AS": memory_bytes, "FSIZE": file_bytes, "NPROC": max_processes}
    for name, limit in {**limits, "NOFILE": 64, "CORE": 0, "MSGQUEUE": 0}.items():
        with suppress(AttributeError, ValueError, OSError):  # the system lacks it, or has a stricter one already
            # The hard limit of CPU time kills what ignores the signal.
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit + (name == "CPU" and limit > 0)))
    with open(report_fd, "w") as file:
        file.write("begun")
    run(code, show_last_value=bool(show_last_value))


def give_up_rights(filter_fd: int) -> None:
    """Do what bubblewrap would: end with the parent, drop all capabilities, and load the filter of system calls.

    With its capabilities, root could write to the files and the memory of every process by `/proc`.
    """
    import ctypes

    with open(filter_fd, "rb") as file:
        program = file.read()
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    address = (len(program) // 8).to_bytes(8, sys.byteorder) + ctypes.addressof(buffer).to_bytes(8, sys.byteorder)
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    if libc.capset((0x20080522).to_bytes(8, sys.byteorder), bytes(24)) != 0:  # version 3, this process
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
    if libc.prctl(22, 2, address, 0, 0) != 0:  # PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


class Loader:
    """Loader that gives `inspect` and tracebacks the lines of the code."""

    def __init__(self, code: str) -> None:
        self._code = code

    def get_source(self, name: str) -> str:
        """Return the code."""
        return self._code


def run(code: str, *, show_last_value: bool) -> None:
    """Run the code as `__main__`; the traceback of an error has only the code's own frames."""
    program = types.ModuleType("__main__")
    program.__dict__.update(__file__=FILE_NAME, __loader__=Loader(code))
    sys.modules["__main__"], sys.argv = program, [FILE_NAME]
    parts: list[types.CodeType] = []
    try:
        parts += compiled(code, show_last_value=show_last_value)
        for part in parts:
            exec(part, program.__dict__)
    except Exception as error:
        import linecache
        import traceback

        lines = [f"{line}\n" for line in code.split("\n")]
        linecache.cache[FILE_NAME] = len(code), None, lines, FILE_NAME
        own_frames = error.__traceback__.tb_next if parts and error.__traceback__ else None
        traceback.print_exception(error.with_traceback(own_frames))
        sys.exit(1)


def compiled(code: str, *, show_last_value: bool) -> list[types.CodeType]:
    """Return the program, and apart from it its last line if that is an expression whose value is shown."""
    if show_last_value:
        import ast

        tree = ast.parse(code, FILE_NAME)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Interactive([tree.body.pop()])
            return [compile(tree, FILE_NAME, "exec"), compile(last, FILE_NAME, "single")]
    return [compile(code, FILE_NAME, "exec", dont_inherit=True)]


if __name__ == "__main__":
    sys.path += sys.argv[9:]
    main(*map(int, sys.argv[1:9]))
