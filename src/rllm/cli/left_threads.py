"""Says of a command that has done its work what it is waiting for: threads that an agent has left behind."""

from __future__ import annotations

import sys
import threading
import time

_PATIENCE_S = 5.0


def tell_of_left_threads(patience_s: float = _PATIENCE_S) -> None:
    """Name the threads that still run a while after the command, since Python ends only with the last that is no daemon."""
    if _left():
        threading.Thread(target=_tell, args=(patience_s,), name="rllm left threads", daemon=True).start()


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
