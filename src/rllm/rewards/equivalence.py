"""Equivalence of mathematical answers, decided by math-verify in warm worker processes.

It runs in processes because a comparison may have to be killed (see `equivalence_worker`), and because rewards run in
threads, where math-verify's own deadlines do not work.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue

from rllm._runtime.process import no_fork_meanwhile
from rllm.errors import MissingDependencyError, RewardError

NUM_WORKERS = min(4, os.cpu_count() or 1)
MAX_CHARS = 1000
"""Longer answers are never compared: parsing takes more than linear time."""

_PROGRAM = Path(__file__).with_name("equivalence_worker.py")


def are_equivalent(gold: str, answer: str, deadline_s: float = 5.0) -> bool | None:
    """Return whether two LaTeX answers are equal; `None` if undecided within `deadline_s` CPU seconds.

    The order matters: the answer "4" is right for the gold "x=4". Safe to call from many threads.

    Raises:
        MissingDependencyError: without math-verify.
        RewardError: if no worker process can be started.
    """
    if max(len(gold), len(answer)) > MAX_CHARS:
        return None
    workers = _workers(os.getpid())
    worker = workers.get()
    try:
        if worker is None or not worker.is_alive():
            worker = _Worker()
        return worker.compare(gold, answer, deadline_s)
    finally:
        workers.put(worker)


@cache
def check_installed() -> None:
    """Check that math-verify is installed.

    Raises:
        MissingDependencyError: without math-verify.
    """
    if find_spec("math_verify") is None:
        raise MissingDependencyError.of("math-verify", "math", "comparing mathematical answers")


@cache
def _workers(pid: int) -> LifoQueue[_Worker | None]:
    """Return the workers of this process, started on demand: a fork must not share its parent's."""
    workers: LifoQueue[_Worker | None] = LifoQueue()
    for _ in range(NUM_WORKERS):
        workers.put(None)
    atexit.register(_end_all, workers, pid)
    return workers


def _end_all(workers: LifoQueue[_Worker | None], pid: int) -> None:
    while os.getpid() == pid and not workers.empty():
        worker = workers.get_nowait()
        if worker is not None:
            worker.end()


class _Worker:
    """One process; it is used by one thread at a time."""

    def __init__(self) -> None:
        check_installed()
        with no_fork_meanwhile():
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        if self._reply() is None:
            raise RewardError(
                f"the process that compares mathematical answers ended with code {self._process.returncode} before it "
                f"was ready; run `{sys.executable} -P {_PROGRAM}` to see why"
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def compare(self, gold: str, answer: str, deadline_s: float) -> bool | None:
        assert self._process.stdin is not None
        request = json.dumps({"gold": gold, "answer": answer, "deadline_s": deadline_s})
        with suppress(BrokenPipeError):  # it is dead, which `_reply` finds out
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        reply = self._reply()
        if reply is None:
            return None
        if reply["last"]:
            self.end()
        return reply["equal"]

    def _reply(self) -> dict[str, bool | None] | None:
        """Return the next reply; `None` if the process died, as it does at its deadline."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.end()
            return None
        reply: dict[str, bool | None] = json.loads(line)
        return reply

    def end(self) -> None:
        self._process.kill()
        with self._process, suppress(BrokenPipeError):  # closes the pipes and waits
            pass
