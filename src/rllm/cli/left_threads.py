"""What a command does about threads that are left behind: it says which of an agent's it waits for, and for no update."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from rllm._runtime.threads import BACKEND_THREAD

_PATIENCE_S = 5.0


def tell_of_left_threads(patience_s: float = _PATIENCE_S) -> None:
    """Name the threads that still run a while after the command, since Python ends only with the last that is no daemon."""
    if _left():
        threading.Thread(target=_tell, args=(patience_s,), name="rllm left threads", daemon=True).start()


def end_amid_an_update(code: int) -> None:
    """Called as Python ends: end the process, if an update goes on that was given up. Python would end its thread within torch's own code,
    which aborts then, with a signal for an exit code."""
    if any(thread.name == BACKEND_THREAD for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _tell(patience_s: float) -> None:
    threading.main_thread().join()
    time.sleep(patience_s)
    if names := _left():
        print(
            f"rllm: the work is done; still running, and waited for: {', '.join(names)}. Threads that an agent starts should end, or "
            "be made with daemon=True; Ctrl-C ends them",
            file=sys.stderr,
            flush=True,
        )


def _left() -> list[str]:
    main = threading.main_thread()
    return sorted(thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon)
